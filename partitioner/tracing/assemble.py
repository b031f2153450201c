"""Put a ``ModelGraph`` together from an exported program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.multiprocessing.reductions import StorageWeakRef

from partitioner.tracing.errors import refuse_data_dependent, refuse_mixed_products, refuse_sparse
from partitioner.tracing.export.dynamic_batch import Exported
from partitioner.tracing.inputs.flatten import has_own_rules, output_names
from partitioner.tracing.inputs.ties import first_names, merged_parameters
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import Place, TraceError
from passes.ir.graph import SPLITS, Attribute, Base, Edit, Input, ModelGraph, Output, Result, Written
from passes.ir.program import PROGRAM_ARGUMENTS
from passes.ir.torch_private import OpOverload, is_wrapped
from passes.normalize.order import ExportedGraph, Normalizer
from passes.normalize.randomness.draw_order import draws, memory_order

aten = torch.ops.aten


def assemble(model: nn.Module, exported: Exported, training: bool) -> ModelGraph:
    """Return the normal form of an exported program; ``add_outputs`` completes the description of outputs and buffer updates."""
    return Assembly(model, exported, training).at(exported.sizes)


class Assembly:
    """Puts a ``ModelGraph`` together from an exported program, for several choices of its open sizes.

    Args:
        model: the traced model.
        exported: the result of its trace.
        training: the mode that it was traced in.
    """

    def __init__(self, model: nn.Module, exported: Exported, training: bool) -> None:
        refuse_sparse(model, exported.program.graph)
        _erase_checks(exported.program.graph)
        refuse_data_dependent(model, exported.program.graph)
        self._exported, self._training, self._name = exported, training, type(model).__name__
        self._lifted = lifted = read_signature(exported.program)
        self._first = first_names(model)
        self._tied = tied = _tied_placeholders(lifted, self._first) | _registered_constants(model, lifted, self._first)
        self._merged = merged_parameters(model)
        graph, self._renamed = _ordered_graph(exported, lifted)
        module = LazyGraphModule(exported.program.graph_module, graph)
        batch = next(iter(graph.nodes)) if exported.batch is not None else None
        names = {self._renamed[name] for name in lifted.inputs if name is not None}
        others = (tied, names, lifted.buffers, lifted.without_gradient, exported.inputs.autocast)
        self._normalizer = Normalizer(ExportedGraph(module, module.graph, batch, exported.batch, *others))

    def at(self, sizes: Mapping[sympy.Symbol, int]) -> ModelGraph:
        """Return the normal form for these numbers of the open sizes; without open sizes it can be asked for once.

        Raises:
            TraceError: a tensor that is no parameter requires a gradient; a size follows from no size of the inputs; or a product has
                two dtypes.
        """
        exported, lifted, tied, first = self._exported, self._lifted, self._tied, self._first
        normal = self._normalizer.normalize(sizes)
        refuse_mixed_products(normal.graph)
        refuse_learned_constants(lifted)
        return ModelGraph(
            module=LazyGraphModule(nn.Module(), normal.graph, self._name),
            parameters={name: first[target] for name, target in lifted.parameters.items() if name not in tied},
            buffers={name: first[target] for name, target in lifted.buffers.items() if name not in tied},
            constants={name: constant for name, constant in lifted.constants.items() if name not in tied},
            aliases={name: other for name, other in first.items() if name != other},
            inputs=_inputs(exported, lifted, self._renamed, normal.graph),
            input_tree=exported.inputs.tree,
            outputs=_outputs(exported, lifted, self._renamed, normal),
            output_tree=exported.output_tree,
            batch=exported.batch,
            batch_size=exported.layout.size,
            batch_limit=exported.limit,
            training=self._training,
            autocast=exported.inputs.autocast,
            notes=(*exported.notes, *self._merged, *normal.notes),
            gradient_questions=exported.gradient_questions,
            program_state=exported.program_state,
            edits=_edits(exported),
            deciding_buffers=exported.deciding_buffers,
        )


_CHECKS = frozenset(
    {
        *(aten._assert_scalar.default, aten._assert_async.msg, aten._assert_async.default),  # noqa: SLF001
        *(aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default),
    }
)
"""Operations that raise an error where a value is not as it should be, and compute nothing."""


def _erase_checks(graph: fx.Graph) -> None:
    """Erase checks of values, and the numbers that nothing but these reads."""
    pending = [node for node in graph.nodes if node.target in _CHECKS]
    while pending:
        node = pending.pop()
        if not node.users and node.op == "call_function":
            sources = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), bool | int | torch.SymBool | torch.SymInt)]
            graph.erase_node(node)
            pending += sources


def _tied_placeholders(lifted: Lifted, first: Mapping[str, str]) -> dict[str, str]:
    """Return placeholder -> the placeholder to use instead, for tensors with an earlier name in ``first`` (see ``first_names``)."""
    placeholder_of = {target: name for name, target in (*lifted.parameters.items(), *lifted.buffers.items())}
    return {name: placeholder_of[first[target]] for target, name in placeholder_of.items() if first[target] != target}


def _registered_constants(model: nn.Module, lifted: Lifted, first: Mapping[str, str]) -> dict[str, str]:
    """Return placeholder of a constant -> that of the parameter or buffer which it is: code has it in a list, or under another name.

    Raises:
        TraceError: a constant is a part of a parameter that is trained: its gradients would be lost.
    """
    placeholder_of = {target: name for name, target in (*lifted.parameters.items(), *lifted.buffers.items())}
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    held = {StorageWeakRef(tensor.untyped_storage()): name for name, tensor in reversed(tensors.items()) if tensor.numel()}
    found: dict[str, str] = {}
    for placeholder, constant in lifted.constants.items():
        if is_wrapped(constant):  # it has no storage
            continue
        name = held.get(StorageWeakRef(constant.untyped_storage()))
        if name is None:
            continue
        if _layout(constant) == _layout(tensors[name]):
            found[placeholder] = placeholder_of[first[name]]
        elif tensors[name].requires_grad:
            raise TraceError(
                f"the model computes with a part of {name} that it took outside of forward",
                place=Place(module=name.rpartition(".")[0]),
                remedy="take the part in forward: gradients reach the parameter then",
            )
    return found


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _ordered_graph(exported: Exported, lifted: Lifted) -> tuple[fx.Graph, dict[str, str]]:
    """Return a copy of the graph, ``batch`` in front and no placeholders for plain values, and old -> new names of placeholders.

    Calls of ``torch.distributed.pipelining.pipe_split`` compute nothing: nodes of a model that has some hold how many are before them.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    splits = 0 if any(map(_is_pipe_split, exported.program.graph.nodes)) else None
    batch = graph.placeholder("batch") if exported.batch is not None else None
    tensors = {*lifted.parameters, *lifted.buffers, *lifted.constants, *lifted.inputs}
    for node in exported.program.graph.nodes:
        if node.op == "placeholder":
            if node.name not in tensors:
                continue
            copies[node] = graph.placeholder(f"{node.name}_input" if node.name in PROGRAM_ARGUMENTS else node.name)
            copies[node].target = copies[node].name
            copies[node].meta = dict(node.meta)
        elif splits is not None and _is_pipe_split(node):
            splits += 1
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if splits is not None:
                copies[node].meta[SPLITS] = splits
    if batch is not None:
        batch.meta["val"] = _batch_value(exported, copies)
    return graph, {node.name: copy.name for node, copy in copies.items() if node.op == "placeholder"}


def _is_pipe_split(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.name() == "pippy::_pipe_split"


def _batch_value(exported: Exported, copies: Mapping[fx.Node, fx.Node]) -> torch.SymInt:
    """Return the symbolic batch size, as traced in the first input that has it."""
    leaf, dimension = exported.layout.dimensions[0]
    name = exported.program.graph_signature.user_inputs[leaf]
    node = next(node for node in copies if node.name == name)
    value: torch.SymInt = node.meta["val"].shape[dimension]
    return value


def _inputs(exported: Exported, lifted: Lifted, renamed: Mapping[str, str], graph: fx.Graph) -> tuple[Input, ...]:
    """Return the description of each leaf of the inputs, from its placeholder in the graph; ``renamed`` has the names of placeholders."""
    values = {node.name: node.meta.get("val") for node in graph.nodes if node.op == "placeholder"}
    batch_dims, has_draws = dict(exported.layout.dimensions), draws(graph)
    inputs = []
    for index, (name, placeholder) in enumerate(zip(exported.inputs.names, lifted.inputs, strict=True)):
        if placeholder is None:
            inputs.append(Input(name, None, exported.inputs.leaves[index], (), None, None))
            continue
        value = values[renamed[placeholder]]
        shape = tuple(size_of(size) for size in value.shape)
        order = tuple(memory_order(value)) if has_draws else None
        inputs.append(Input(name, renamed[placeholder], None, shape, value.dtype, batch_dims.get(index), order))
    return tuple(inputs)


def _outputs(exported: Exported, lifted: Lifted, renamed: Mapping[str, str], normal: ExportedGraph) -> tuple[Output, ...]:
    """Return names and destinations of the results, in the order of the graph: returned, left, written into inputs; bases of views."""
    names = output_names(exported.output_tree)
    left = [
        Output(edit.name, None, None, "same", None, destination=Attribute(edit.module, str(edit.path[0])))
        for edit in exported.left.edits
        for leaf in edit.leaves
        if isinstance(leaf, Result)
    ]
    returned = [Output(name, None, None, "same", None, argument=normal.arguments.get(place)) for place, name in enumerate(names)]
    of_inputs = {renamed[each]: name for each, name in zip(lifted.inputs, exported.inputs.names, strict=True) if each is not None}
    written = [Output(of_inputs[each], None, None, "same", None, destination=Written(each)) for each in normal.written]
    return (*returned, *left, *written, *(Output("", None, None, "same", None, destination=Base()) for _ in range(normal.n_bases)))


def _edits(exported: Exported) -> tuple[Edit, ...]:
    """Return the edits of attributes that the model makes, with the indices of results in the graph."""
    n_leaves = exported.output_tree.num_leaves

    def placed(leaf: Any) -> Any:
        return Result(leaf.index + n_leaves) if isinstance(leaf, Result) else leaf

    return tuple(replace(edit, leaves=tuple(map(placed, edit.leaves))) for edit in exported.left.edits)


@dataclass(frozen=True)
class Lifted:
    """The role of each placeholder of an exported graph.

    Attributes:
        parameters: placeholder -> name in the model.
        buffers: placeholder -> name in the model.
        constants: placeholder -> tensor.
        inputs: for each leaf of the inputs, its placeholder; None when it is no tensor.
    """

    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    inputs: tuple[str | None, ...]

    @property
    def without_gradient(self) -> frozenset[str]:
        """Placeholders that never require a gradient."""
        return frozenset(self.buffers) | frozenset(self.constants)


def read_signature(program: ExportedProgram) -> Lifted:
    """Return the role of each placeholder of an exported program.

    Raises:
        TraceError: the program holds something that is neither a tensor nor a plain value.
    """
    parameters: dict[str, str] = {}
    buffers: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    inputs: list[str | None] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(None if isinstance(spec.arg, ConstantArgument) else spec.arg.name)
        elif spec.kind is InputKind.PARAMETER:
            parameters[spec.arg.name] = str(spec.target)
        elif spec.kind is InputKind.BUFFER:
            buffers[spec.arg.name] = str(spec.target)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[str(spec.target)]
            assert isinstance(constant, Tensor)
            constants[spec.arg.name] = constant
        else:
            raise TraceError(
                f"the model uses {spec.target}, an object that is no tensor ({spec.kind.name.lower()})",
                remedy="compute with tensors; keep other objects out of forward",
            )
    return Lifted(parameters, buffers, constants, tuple(inputs))


def refuse_learned_constants(lifted: Lifted) -> None:
    """Raise TraceError when a constant requires a gradient: gradients of parameters alone are computed; or has rules of its own."""
    for name, constant in lifted.constants.items():
        if has_own_rules(constant):
            raise TraceError(
                f"the model computes with a {type(constant).__name__} ({name}), a class of tensors that computes by rules of its own",
                remedy="compute with plain tensors",
            )
        if constant.requires_grad:
            raise TraceError(
                f"the model computes with a tensor of shape {tuple(constant.shape)} ({name}) that requires a gradient but is no parameter",
                remedy="make it a parameter, self.weight = nn.Parameter(...), or detach it",
            )
