"""Derive the cuts of a custom autograd function from the ops that its forward and its backward call.

    Swish            mul, sigmoid, mul | mul, sub, mul, add, mul        "dim* -> dim*", each dimension by itself
    Linear(x, w)     mm | mm, mm        x [rows, in], w [in, out]       rows: parts of y and dx, and dw is summed over parts
                                                                        in:   y is summed over parts
                                                                        out:  parts of y and dw, and dx is summed over parts
    Normed           mean, sub, ...     x [rows, features]              features: cannot be cut, their mean is taken

The joint graph of a call is looked at as a model is: its axes are found, and for each of them every value is followed through forward and
backward as it would be on one of several ranks: as a part, the same everywhere, or a partial sum. An axis can be cut if results and
gradients come out as the rest of a model expects them. Parts apply the function anew, to smaller tensors, so it must call the same there:
joint graphs for other lengths of the axis are compared, and in the end those of the parts themselves.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, fx

from passes.analysis.axes import Axes, TensorAxes, find_axes, is_item
from passes.autograd.functions.operators import operator_of
from passes.autograd.trace_joint import Joint, differentiate
from passes.graph.aliasing import mutated_arguments
from passes.graph.equivalence import argument_key
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.schemas import bound_arguments, draws, tensor_operands
from passes.ir.errors import TraceError
from passes.ir.torch_private import FakeTensorMode, OpOverload
from passes.rules.call import Call
from passes.rules.language import ANY_DIMENSION
from passes.rules.loops import Factor, LocalCall, Loops, Reduction, Size
from passes.stages.split import StageGraph

Spec: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"
"""Shape and dtype of a tensor."""

_BATCH = 7
"""Stand-in for an open batch size."""


def joint_of_function(overload: OpOverload, operands: Sequence[Spec | int]) -> Joint:
    """Return the joint graph of one call of a function on tensors of these sizes, and on plain sizes.

    Raises:
        TraceError: its forward or its backward has no graph.
    """
    return _joint(overload, tuple(operands))


@functools.lru_cache(maxsize=1024)
def _joint(overload: OpOverload, operands: tuple[Spec | int, ...]) -> Joint:
    try:
        stage = _stage(overload, operands)
    except Exception as error:
        raise TraceError(f"{operator_of(overload).name} does not take tensors of these sizes: {error}") from error
    nodes = {node.name: node for node in stage.module.graph.nodes}
    learning, results = (frozenset(name for name in names if _requires_gradient(nodes[name])) for names in (stage.values, stage.outputs))
    return differentiate(stage, learning, results, stage.device)


def _stage(overload: OpOverload, operands: Sequence[Spec | int]) -> StageGraph:
    """Return a graph of one call, as a stage: its tensors are values of earlier stages."""
    applied, graph, values = operator_of(overload).applied, fx.Graph(), []
    for name, operand in zip(applied.names(), operands, strict=True):
        values.append(operand if isinstance(operand, int) else graph.placeholder(name))
    placeholders = list(graph.nodes)
    with FakeTensorMode():
        for node, (shape, dtype) in zip(placeholders, (each for each in operands if not isinstance(each, int)), strict=True):
            learns = dtype.is_floating_point or dtype.is_complex
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=applied.device, requires_grad=learns)
        call = graph.call_function(overload, tuple(values))
        call.meta["val"] = overload(*(value.meta["val"] if isinstance(value, fx.Node) else value for value in values))
    results = [call]
    if not isinstance(call.meta["val"], Tensor):
        results = [graph.call_function(operator.getitem, (call, index)) for index in range(len(call.meta["val"]))]
    for item, value in zip(results, _tensors(call.meta["val"]), strict=True):
        item.meta["val"] = value
    graph.output(tuple(results))
    return StageGraph(
        index=0,
        module=LazyGraphModule({}, graph, class_name="Function"),
        parameters=(),
        buffers=(),
        constants=(),
        model_inputs=(),
        values=tuple(node.name for node in placeholders),
        outputs=tuple(node.name for node in results),
        has_batch=False,
        device=applied.device,
    )


def _requires_gradient(node: fx.Node) -> bool:
    return bool(node.meta["val"].requires_grad)


def why_not_followed(joint: Joint) -> str | None:
    """Return why a function cannot be in a graph, as a clause; None if it can."""
    for node in joint.graph.nodes:
        if node.op == "get_attr":
            return "reads a tensor that is not among its arguments"
        if node.op == "call_function" and draws(node):
            return "draws random numbers, which no rank could draw alike"
        if node.op == "call_function" and mutated_arguments(node):
            return "writes into its arguments"
    return None


def loops_of_function(call: Call) -> Loops | None:
    """Return the loops of a call; None where it is computed whole: a symbolic size is among its arguments, or its axes are not found."""
    if len(call.operands) < len(call.values):
        return None
    specs = tuple((tuple(map(_number, operand.shape)), operand.known_dtype) for operand in call.operands)
    try:
        function = _Function.traced(call.operator, specs)
    except TraceError:
        return None
    sizes = _sizes_of_axes(call, function)
    if sizes is None:
        return None
    axes = tuple(axis for axis in sizes if sizes[axis] != 1)
    numbers = {axis: index for index, axis in enumerate(axes)}

    def dimensions(tensor: TensorAxes) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(numbers[axis] for axis in dimension if axis in numbers) for dimension in tensor)

    return Loops(
        factors=tuple(Factor(function.name_of(axis), sizes[axis], _reduction_if_cut(function, axis)) for axis in axes),
        operands=tuple(map(dimensions, function.inputs)),
        results=tuple(map(dimensions, function.outputs)),
        localize=functools.partial(_check_part, function, axes),
    )


def _number(size: Size) -> int:
    """Return a size as a number, for some batch size."""
    return size if isinstance(size, int) else int(size.subs(dict.fromkeys(size.free_symbols, _BATCH)))


def _sizes_of_axes(call: Call, function: _Function) -> dict[int, Size] | None:
    """Return axis -> size, for the axes of operands and results; None where a symbolic dimension is made of several axes."""
    sizes: dict[int, Size] = {}
    shapes = (*(operand.shape for operand in call.operands), *call.results)
    for shape, tensor in zip(shapes, (*function.inputs, *function.outputs), strict=True):
        for size, dimension in zip(shape, tensor, strict=True):
            if len(dimension) == 1:
                if sizes.setdefault(dimension[0], size) != size:
                    return None
            elif not isinstance(size, int):
                return None
            else:
                for axis in dimension:
                    if sizes.setdefault(axis, function.axes.sizes[axis]) != function.axes.sizes[axis]:
                        return None
    return sizes


@dataclass(frozen=True, repr=False)
class _Function:
    """The joint graph of a call, with its axes.

    Attributes:
        overload: what is called.
        operands: on what.
        joint: its graph.
        axes: of the graph.
    """

    overload: OpOverload
    operands: tuple[Spec, ...]
    joint: Joint
    axes: Axes

    @classmethod
    def traced(cls, overload: OpOverload, operands: tuple[Spec, ...]) -> _Function:
        joint = joint_of_function(overload, operands)
        return cls(overload, operands, joint, find_axes(joint.graph, _with_gradients(joint)))

    @property
    def inputs(self) -> tuple[TensorAxes, ...]:
        return tuple(self.axes.of(node.name) for node in self.joint.inputs)

    @property
    def outputs(self) -> tuple[TensorAxes, ...]:
        return tuple(self.axes.of(node.name) for node in self.joint.outputs)

    def name_of(self, axis: int) -> str:
        """Return the name that most rules give an axis, of those with a meaning."""
        names = [(count, name) for name, count in self.axes.roles[axis].items() if not name.startswith(ANY_DIMENSION) and name != "rows"]
        return max(names)[1] if names else ANY_DIMENSION

    def with_sizes(self, sizes: Mapping[int, int]) -> _Function:
        """Return the same call on tensors whose axes have other sizes."""
        operands = tuple(
            (tuple(math.prod(sizes[axis] for axis in dimension) for dimension in tensor), dtype)
            for tensor, (_, dtype) in zip(self.inputs, self.operands, strict=True)
        )
        return _Function.traced(self.overload, operands)


def _with_gradients(joint: Joint) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs of a value and its gradient: of inputs and of results."""
    results = dict(zip(joint.stage.outputs, joint.outputs, strict=True))
    inputs = [(node, joint.gradients[node.name]) for node in joint.inputs if node.name in joint.gradients]
    return [*inputs, *((results[name], node) for name, node in zip(joint.outputs_with_gradient, joint.gradient_placeholders, strict=True))]


# -- one axis cut --------------------------------------------------------------------------------------------------------------------


_State = Literal["part", "same", "partial sum"]
"""A rank's share of a value: its part along the axis, the value, or a summand of the value."""


class _CannotCutError(Exception):
    """The axis cannot be cut."""


def _reduction_if_cut(function: _Function, axis: int) -> Reduction | None:
    """Return how results of parts are combined where the axis is cut: None where all have it; ``"whole"`` where it cannot be cut."""
    try:
        states = _states(function, axis)
    except _CannotCutError:
        return "whole"
    joint = function.joint
    results = {states[node] for node in joint.outputs}
    if len(results) > 1 or "same" in results or not _calls_the_same_at_other_sizes(function, axis):
        return "whole"
    for node in joint.inputs:
        gradient = joint.gradients.get(node.name)
        expected = "part" if states[node] == "part" else "partial sum"
        if gradient is not None and states[gradient] != expected:
            return "whole"
    return None if "part" in results else "sum"


def _states(function: _Function, axis: int) -> dict[fx.Node, _State]:
    """Return a rank's part of each value of the joint graph.

    Raises:
        _CannotCutError: what a rank computes from its parts is neither a part of the value nor a summand.
    """
    states: dict[fx.Node, _State] = {}
    for node in function.joint.graph.nodes:
        if node.op == "placeholder":
            states[node] = "part" if _has(function.axes.of(node.name), axis) else "same"
        elif node.op == "call_function" and is_item(node):
            states[node] = states[node.args[0]]
        elif node.op == "call_function" and node.name in function.axes.tensors:
            states[node] = _state_of_call(function.axes, node, axis, states)
    return states


def _has(tensor: TensorAxes, axis: int) -> bool:
    return any(axis in dimension for dimension in tensor)


def _state_of_call(axes: Axes, node: fx.Node, axis: int, states: Mapping[fx.Node, _State]) -> _State:
    operands = axes.operands[node.name]
    loops = axes.loops.get(node.name)
    if loops is None:
        if any(states[operand] != "same" for operand in operands) or any(_has(tensor, axis) for tensor in axes.tensors[node.name]):
            raise _CannotCutError
        return "same"
    cut = [factor for factor, under in enumerate(axes.factors[node.name]) if axis in under]
    parts = {place for place, operand in enumerate(operands) if states[operand] == "part"}
    summands = frozenset(place for place, operand in enumerate(operands) if states[operand] == "partial sum")
    if any(axis in axes.under(node.name, window) for window in loops.windows):
        raise _CannotCutError
    if not cut:
        return _state_without_cut(loops, parts, summands)
    if len(cut) > 1 or summands or parts != set(loops.running[cut[0]]) - _broadcast(axes, operands, axis):
        raise _CannotCutError
    return _state_with_cut(loops, cut[0])


def _broadcast(axes: Axes, operands: Sequence[fx.Node], axis: int) -> set[int]:
    """Return operands of size one where other operands have the axis: every part reads them."""
    return {place for place, operand in enumerate(operands) if not _has(axes.of(operand.name), axis)}


def _state_without_cut(loops: Loops, parts: set[int], summands: frozenset[int]) -> _State:
    """Return the state of a result whose call does not loop over the axis."""
    if parts:
        raise _CannotCutError
    if not summands:
        return "same"
    if summands not in loops.linear:
        raise _CannotCutError
    return "partial sum"


def _state_with_cut(loops: Loops, factor: int) -> _State:
    """Return the state of a result whose call loops over the axis."""
    reduction = loops.factors[factor].reduction
    if reduction is None:
        return "part"
    if reduction != "sum" or loops.added:
        raise _CannotCutError
    return "partial sum"


# -- parts call what the whole calls -------------------------------------------------------------------------------------------------


def _calls_the_same_at_other_sizes(function: _Function, axis: int) -> bool:
    """Return whether forward and backward call the same where an axis has one step, and where it has twice as many."""
    sizes = {each: _number(size) for each, size in enumerate(function.axes.sizes)}
    return all(_calls_the_same(function, {**sizes, axis: size}, frozenset({axis})) for size in (1, 2 * sizes[axis]))


def _calls_the_same(function: _Function, sizes: Mapping[int, int], cut: frozenset[int]) -> bool:
    """Return whether forward and backward call the same for other sizes of the axes in ``cut``, with the sizes that rules would pass."""
    try:
        twin = function.with_sizes(sizes)
    except TraceError:
        return False
    nodes, twins = list(function.joint.graph.nodes), list(twin.joint.graph.nodes)
    if len(nodes) != len(twins):
        return False
    numbers = {node: index for graph in (nodes, twins) for index, node in enumerate(graph)}
    pairs = zip(nodes, twins, strict=True)
    return all(node.target == other.target and _same_arguments(function.axes, node, other, numbers, sizes, cut) for node, other in pairs)


def _same_arguments(
    axes: Axes, node: fx.Node, other: fx.Node, numbers: Mapping[fx.Node, int], sizes: Mapping[int, int], cut: frozenset[int]
) -> bool:
    """Return whether two calls have the same arguments, except sizes that follow the cut."""
    form = functools.partial(argument_key, node_key=numbers.__getitem__)
    if not isinstance(node.target, OpOverload):
        return form(node.args) == form(other.args)
    arguments, others = bound_arguments(node), bound_arguments(other)
    loops = axes.loops.get(node.name)
    if loops is not None and loops.localize is not None:
        part = _part_of(axes, node, other, sizes, cut)
        arguments.update(loops.localize(part))
        others.update({name: _without_minus_one(others[name], part.results[0]) for name in others if others[name] != arguments[name]})
    return form(arguments) == form(others)


def _without_minus_one(value: Any, shape: Sequence[Size]) -> Any:
    """Return a shape with the size for ``-1``; any other argument unchanged."""
    if not isinstance(value, list) or len(value) != len(shape) or value.count(-1) != 1:
        return value
    return [size if each == -1 else each for each, size in zip(value, shape, strict=True)]


def _part_of(axes: Axes, node: fx.Node, other: fx.Node, sizes: Mapping[int, int], cut: frozenset[int]) -> LocalCall:
    """Return the sizes of a call that is the part of another one."""
    factors = axes.factors[node.name]
    return LocalCall(
        arguments=bound_arguments(node),
        operands=tuple(tuple(operand.meta["val"].shape) for operand in tensor_operands(other)),
        results=tuple(tuple(value.shape) for value in _tensors(other.meta["val"])),
        factors=tuple(math.prod(sizes[axis] for axis in under) for under in factors),
        cut=frozenset(index for index, under in enumerate(factors) if cut & set(under)),
    )


def _tensors(value: Any) -> Sequence[Tensor]:
    return (value,) if isinstance(value, Tensor) else value


def _check_part(function: _Function, axes: Sequence[int], part: LocalCall) -> Mapping[str, Any]:
    """Raise TraceError where a part of a call calls something else than the whole; no argument depends on sizes."""
    sizes = {axis: _number(size) for axis, size in enumerate(function.axes.sizes)}
    local = {axis: _number(size) for axis, size in zip(axes, part.factors, strict=True)}
    cut = frozenset(axes[factor] for factor in part.cut)
    if cut and not _calls_the_same(function, {**sizes, **{axis: local[axis] for axis in cut}}, cut):
        shapes, name = ", ".join(str(tuple(shape)) for shape in part.operands), operator_of(function.overload).name
        raise TraceError(
            f"the custom autograd function {name} calls other operations for a part of its arguments, {shapes}",
            remedy="let its forward and backward call the same operations, with the same numbers, for all sizes of their arguments",
        )
    return {}
