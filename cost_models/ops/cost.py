"""Price one node: floating-point operations and bytes moved, as formulas in the batch symbol.

forward           reads its arguments, writes its results
backward input    reads the results' gradient and what was kept, writes the gradients of activations
backward weight   the same for the gradients of parameters

What one node of a program does: of a forward or of a backward, which after differentiation are operators alike.

mm(gradient, weight)                    a product as any other: its rule says which
convolution_backward(gradient, ...)     the gradients of the products of the convolution that it names
native_layer_norm_backward(...)         reads and writes its tensors
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from cost_models.ops.contractions import Products, as_attention, attention, attention_gradients, operand_gradients
from cost_models.ops.gradient_order import gradient_order
from cost_models.ops.table import OPERATIONS, Operation
from cost_models.ops.work import NO_WORK, Family, Half, Work, flops_of
from passes.graph.aliasing import shares_memory
from passes.graph.schemas import bound_arguments, packet, viewed_arguments, written_arguments
from passes.graph.symbolic_sizes import size_of
from passes.ir.tensor_spec import Size, TensorSpec
from passes.ir.torch_private import OpOverload
from passes.rules.call import Call, tensors_in
from passes.rules.registry import loops_of_call

aten = torch.ops.aten


@dataclass(frozen=True)
class Recomputation:
    """The work of a backward that computes again a call of several kernels; what the call writes to buffers is not written again.

    Attributes:
        result: of its result, or of what it saves inside, from statistics that are saved.
        statistics: of its statistics, which its backward reads.
        both: of both.
    """

    result: Work
    statistics: Work
    both: Work


@dataclass(frozen=True)
class OperationCost:
    """The price of one node.

    Attributes:
        dtype: what it computes in.
        forward: of the forward.
        backward_input: of the gradients of activations.
        backward_weight: of the gradients of parameters.
        saves: parameter names of the schema, or ``"result"`` or ``"results"``: the values that the backward keeps.
        keeps: bytes that the backward keeps besides.
        derived: those of ``keeps`` that selective recomputation makes again from the others, such as normalized values of a sharded norm.
        working: bytes that the backward makes and frees besides.
        parameters: bytes of the parameters among its arguments.
        passed: bytes of each tensor among its arguments whose gradient is that of the result, or a view of it.
        known: whether the operator is in the table; if not, it is priced by its bytes alone, and assumed to keep all it touches.
        gradient_order: arguments in the order in which the backward computes their gradients; empty if one kernel computes all.
        repeated: of a backward that recomputes the forward; None: as the forward.
    """

    dtype: torch.dtype
    forward: Work
    backward_input: Work
    backward_weight: Work
    saves: tuple[str, ...]
    keeps: Size
    working: Size
    parameters: Size
    passed: tuple[Size, ...]
    known: bool
    gradient_order: tuple[str, ...] = ()
    repeated: Recomputation | None = None
    derived: Size = 0

    @property
    def first_half(self) -> Literal["", "activation", "weight"]:
        """The half of the backward that is computed first; empty: one kernel computes both, or there is one."""
        gradients = dict(self.forward.gradients)
        halves = [gradients[each] for each in self.gradient_order]
        if len(set(halves)) < 2:
            return ""
        return "weight" if halves[0] == "weight" else "activation"


def tensor_shapes(value: Any) -> tuple[TensorSpec, ...]:
    """Return the tensors of a node's value as shapes, with symbolic sizes as sympy expressions."""
    if isinstance(value, torch.Tensor):
        return (TensorSpec(tuple(size_of(size) for size in value.shape), value.dtype),)
    if isinstance(value, list | tuple):
        return tuple(shape for item in value for shape in tensor_shapes(item))
    return ()


def operation_cost(
    node: fx.Node,
    results: tuple[TensorSpec, ...],
    arguments: Mapping[str, Any],
    gradients: Mapping[str, str],
    *,
    is_view: bool,
    weights: frozenset[str] = frozenset(),
) -> OperationCost:
    """Price a node.

    Args:
        node: a ``call_function``.
        results: its tensors.
        arguments: its arguments by name: tensors as shapes, nested as the schema nests them.
        gradients: argument -> ``"activation"`` or ``"weight"``, for those whose gradient the backward computes; empty: no backward.
        is_view: whether its results share the memory of its arguments.
        weights: the arguments that are parameters.
    """
    dtype = results[0].known_dtype if results else torch.float32
    if node.target is operator.getitem or not results or not isinstance(node.target, OpOverload):
        return OperationCost(dtype, NO_WORK, NO_WORK, NO_WORK, (), 0, 0, 0, (), known=True)
    line = line_of(node.target)
    is_pointwise = torch.Tag.pointwise in node.target.tags
    known = line is not None or (not gradients and is_pointwise)
    is_view = is_view or (line is None and bool(viewed_arguments(node)) and not written_arguments(node))
    line = line or Operation(saves=(*gradients, "results"), family="pointwise" if is_pointwise else "other")
    call = Call.numbered(node.target, arguments.items(), results)
    parameters = sum((_bytes(tuple(tensors_in(call.arguments[name]))) for name in sorted(weights)), start=0)
    if is_view:
        backward = _view_backward(call, gradients)
        return OperationCost(dtype, NO_WORK, backward, NO_WORK, (), 0, 0, parameters, (), known=True)
    saves = _saves(line, gradients)
    return OperationCost(
        dtype=dtype,
        forward=_forward(call, line, gradients),
        backward_input=_backward("activation", call, line, gradients, saves),
        backward_weight=_backward("weight", call, line, gradients, saves),
        saves=saves,
        keeps=line.keeps(call) if line.keeps and gradients else 0,
        working=line.working(call) if line.working and gradients else 0,
        parameters=parameters,
        passed=tuple(tensor.bytes for name in gradients if _is_passed(call, line, name) for tensor in tensors_in(call.arguments[name])),
        known=known and (line.products is None or _is_counted(call, line)),
        gradient_order=gradient_order(call, line.family, gradients),
        repeated=_recomputation(call, line, gradients),
    )


def _recomputation(call: Call, line: Operation, gradients: Mapping[str, str]) -> Recomputation | None:
    """Return the work of computing again what a loss saves inside, from its first argument; its numbers are saved."""
    if not (line.copies[0] and line.keeps and gradients):
        return None
    forward = _forward(call, line, gradients)
    return Recomputation(replace(forward, bytes=_first_bytes(call) + line.keeps(call), launches=1), forward, forward)


def _forward(call: Call, line: Operation, gradients: Mapping[str, str]) -> Work:
    """Return the work of a call of a model, which may make values for its backward."""
    work = replace(forward_work(call, line), gradients=tuple(gradients.items()))
    if not gradients:
        return work
    more = line.decomposed(call)[0] if line.decomposed else ()
    return replace(work, bytes=work.bytes + _kept_by_kernels(call, line), then=more)


def _kept_by_kernels(call: Call, line: Operation) -> Size:
    """Return the bytes that the forward's kernel writes besides, and the backward's reads."""
    return line.keeps(call) if line.gives_kept and line.keeps else 0


def forward_work(call: Call, line: Operation) -> Work:
    """Return the work of a call: read its arguments, write its results."""
    written = _bytes(call.outputs)
    read = (
        (0 if line.writes_alone else written)
        if line.sparse_read or line.writes_alone
        else sum((_bytes(tensors) for tensors in _tensors_of(call).values()), start=0)
    )
    besides = line.copies[0] * _first_bytes(call)
    return _work(line.products(call) if line.products else (), read + written + besides, line.launches, line.family, call, "forward")


def _work(products: Products, size: Size, launches: int, family: Family, call: Call, half: Half) -> Work:
    return Work(flops_of(products), size, launches, family, products, call, half)


def _is_counted(call: Call, line: Operation) -> bool:
    """Return whether the products are given: recurrent layers and attention blocks without a rule, other operations with one."""
    return line.family == "recurrent" or bool(line.products and line.products(call)) or loops_of_call(call) is not None


def line_of(target: OpOverload) -> Operation | None:
    """Return the line of the overload, of the operator, or of the functional twin of an in-place operator."""
    line = OPERATIONS.get(target) or OPERATIONS.get(packet(target))
    name = target.overloadpacket.__name__
    if line is None and target.namespace == "aten" and name.endswith("_") and not name.endswith("__"):
        line = OPERATIONS.get(getattr(aten, name.removesuffix("_"), None))
    return line


def _saves(line: Operation, gradients: Mapping[str, str]) -> tuple[str, ...]:
    if not gradients:
        return ()
    conditions = [item.partition(":") for item in line.saves]
    return tuple(dict.fromkeys(name for name, _, needs in conditions if not needs or needs in gradients))


def _backward(kind: str, call: Call, line: Operation, gradients: Mapping[str, str], saves: tuple[str, ...]) -> Work:
    """Return the half of the backward that computes the gradients of one kind of arguments.

    A pointwise operation has a kernel for each gradient, which reads that of the result. The gradient of an argument that is broadcast is
    computed for all elements of the result, and then summed; that of an argument of a narrower type is computed in the type of the result,
    and then cast. The gradient of a bias is a sum over the rows of a product's gradient. Normalizations and convolutions have one kernel
    for all gradients.
    """
    tensors = _tensors_of(call)
    is_joint = line.family in ("normalisation", "convolution") and "activation" in gradients.values()
    wanted = [name for name, gradient in gradients.items() if gradient == kind or (is_joint and kind == "activation")]
    wanted = [name for name in wanted if not _is_passed(call, line, name)]
    if not wanted or (is_joint and kind == "weight"):
        return NO_WORK
    products_of = line.gradients(call) if line.gradients else {}
    products = tuple(product for name in wanted for product in products_of.get(name, ()))
    extra_bytes = line.copies[1] * _first_bytes(call)
    narrow: list[str] = []
    if line.family == "pointwise":
        broadcast = [name for name in wanted if saves and _is_broadcast(call, tensors[name])]
        narrow = [name for name in wanted if saves and _itemsize(tensors[name]) < _itemsize(call.outputs)]
        # Each further gradient reads that of the result again. The sum of a broadcast one, and the cast of a narrow one,
        # write and read a value of the result's size.
        extra_bytes += (len(wanted) - 1 + 2 * len(broadcast) + 2 * len(narrow)) * _bytes(call.outputs)
    saved_bytes = sum((_bytes(call.outputs if name.startswith("result") else tensors.get(name, ())) for name in saves), start=0)
    written_bytes = sum((_bytes(tensors[name]) for name in wanted), start=0)
    half: Half = "backward_input" if kind == "activation" else "backward_weight"
    launches = 1 if is_joint else len(wanted) + len(narrow)
    saved_bytes += _kept_by_kernels(call, line)
    work = _work(products, saved_bytes + _bytes(call.outputs) + written_bytes + extra_bytes, launches, line.family, call, half)
    summed = [
        name for name in wanted if line.family == "matrix product" and not products_of.get(name) and _is_broadcast(call, tensors[name])
    ]
    further_kernels = line.decomposed(call)[1] if line.decomposed else ()
    return replace(work, gradients=tuple(gradients.items()), beside=len(summed) * _bytes(call.outputs), then=further_kernels)


def _is_passed(call: Call, line: Operation, name: str) -> bool:
    """Return whether the gradient of an argument is that of the result, or views of it."""
    tensors = tuple(tensors_in(call.arguments[name]))
    return line.passes_gradient and _bytes(tensors) == _bytes(call.outputs)


def _view_backward(call: Call, gradients: Mapping[str, str]) -> Work:
    """Price the backward of a view: a view where each element appears once; otherwise a sum or a fill."""
    if not gradients:
        return NO_WORK
    viewed = sum((_bytes(tensors) for name, tensors in _tensors_of(call).items() if name in gradients), start=0)
    written = _bytes(call.outputs)
    if viewed == written and len(call.outputs) == 1:
        return NO_WORK
    whole = tuple((name, "activation") for name in gradients)
    return Work(0, viewed + written, 1, "movement", call=call, half="backward_input", gradients=whole)


def _bytes(tensors: tuple[TensorSpec, ...]) -> Size:
    return sum((tensor.bytes for tensor in tensors), start=0)


def _elements(tensors: tuple[TensorSpec, ...]) -> Size:
    return sum((tensor.numel for tensor in tensors), start=0)


def _is_broadcast(call: Call, tensors: tuple[TensorSpec, ...]) -> bool:
    return bool(_elements(tensors) != _elements(call.outputs))


def _itemsize(tensors: tuple[TensorSpec, ...]) -> int:
    return max(tensor.itemsize for tensor in tensors)


def _first_bytes(call: Call) -> Size:
    """Return the bytes of the first argument that is a tensor."""
    return next((_bytes(tensors) for tensors in _tensors_of(call).values()), 0)


def _tensors_of(call: Call) -> dict[str, tuple[TensorSpec, ...]]:
    return {name: tensors for name, value in call.values if (tensors := tuple(tensors_in(value)))}


# -- what one node of a program does -----------------------------------------------------------------------------------------------


def call_of_node(node: fx.Node, shapes: Mapping[fx.Node, tuple[TensorSpec, ...]] | None = None) -> Call:
    """Return the call of an operator.

    Args:
        node: a ``call_function`` of an operator.
        shapes: of the tensors that nodes give; None: as ``meta["val"]`` has them.
    """
    assert isinstance(node.target, OpOverload)
    arguments = [(name, described(value, shapes)) for name, value in bound_arguments(node).items()]
    return Call.numbered(node.target, arguments, tensor_shapes(node.meta.get("val")) if shapes is None else shapes[node])


def described(value: Any, shapes: Mapping[fx.Node, tuple[TensorSpec, ...]] | None = None) -> Any:
    """Return an argument with its nodes replaced by shapes and numbers; hashable.

    Args:
        value: the argument.
        shapes: of the tensors that nodes give; None: as ``meta["val"]`` has them.
    """
    if isinstance(value, fx.Node):
        held = value.meta.get("val")
        if isinstance(held, int | torch.SymInt):
            return size_of(held)
        of_node = tensor_shapes(held) if shapes is None else shapes[value]
        return of_node[0] if len(of_node) == 1 and not isinstance(held, list | tuple) else of_node
    if isinstance(value, list | tuple):
        return tuple(described(item, shapes) for item in value)
    return value


def node_work(node: fx.Node, shapes: Mapping[fx.Node, tuple[TensorSpec, ...]] | None = None) -> Work:
    """Return the work of a node as a formula in the batch symbol; nothing for views and for nodes that call no operator.

    Args:
        node: of a model, a stage or a program.
        shapes: of the tensors that nodes give; None: as ``meta["val"]`` has them.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return NO_WORK
    call = call_of_node(node, shapes)
    return NO_WORK if not call.outputs or shares_memory(node) else call_work(call)


@functools.lru_cache(maxsize=16384)
def call_work(call: Call) -> Work:
    """Return the work of a call that is not a view, in symbols or numbers."""
    return forward_work(call, _line(call.operator))


def _line(target: OpOverload) -> Operation:
    """Return the table's line of an operator, or one for operators that only differentiated graphs have."""
    name = target.overloadpacket.__name__
    if name.startswith("_scaled_dot_product"):
        products = attention_gradients if name.endswith("_backward") else attention
        return Operation(lambda call: products(as_attention(call)), family="attention")
    if packet(target) is aten.convolution_backward:
        return Operation(_convolution_backward, family="convolution")
    return line_of(target) or Operation(family=_family(target))


def _family(target: OpOverload) -> Family:
    """Return the family of an operator without a line in the table; a backward has that of its forward."""
    if torch.Tag.pointwise in target.tags:
        return "pointwise"
    name = target.overloadpacket.__name__
    if "norm" in name or "softmax" in name:
        return "normalisation"
    if "loss" in name:
        return "reduction"
    return "pointwise" if name.endswith("_backward") and "pool" not in name and "embedding" not in name else "movement"


def _convolution_backward(call: Call) -> Products:
    """Return the products of the gradients in the output mask."""
    gradient = call.arguments["grad_output"]
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    values = [(name, None if name == "bias" else call.arguments[name]) for name in names]
    gradients = operand_gradients("input", "weight", windowed=True)(Call.numbered(aten.convolution.default, values, (gradient,)))
    mask = call.arguments["output_mask"]
    return tuple(product for name, wanted in zip(("input", "weight"), mask, strict=False) if wanted for product in gradients[name])
