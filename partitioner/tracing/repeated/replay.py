"""Trace one of several modules that compute the same, and copy its part of the graph for the others.

    exported                                            after write_copies

    border([x], "blocks.0")                             x_1 = block 0 of x, its weights
    x_1 = block 0 of x, its weights                     x_2 = block 1 of x_1, its weights
    border([x_1], "blocks.0")                           x_3 = block 2 of x_2, its weights
    border([x_1], "blocks.1")
    x_2 = aten.clone(x_1)
    border([x_2], "blocks.1")
    border([x_2], "blocks.2")
    x_3 = aten.clone(x_2)
    border([x_3], "blocks.2")

``find_copies`` finds these modules. The graph is, node for node, that of a trace of all of them. ``write_copies`` refuses nodes between two
borders that read more than the module's weights and arguments, write to these, or call a graph: then the model is traced whole.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from partitioner.tracing.repeated.call_log import StandIn, intercept_calls
from partitioner.tracing.repeated.find import Copies
from partitioner.tracing.repeated.unread_attributes import record_reads
from passes.graph.aliasing import OWN_MEMORY, MemoryOf, memory_keys, mutated_arguments, new_memory
from passes.graph.provenance import checkpoint_of, mark_checkpoint
from passes.graph.symbolic_sizes import size_of
from passes.ir.torch_private import OpOverload, tree_flatten, tree_leaves, tree_unflatten
from passes.normalize.symbolic_batch import READS

torch.library.define("partitioner::border", "(Tensor[] values, str module) -> ()")
torch.library.impl("partitioner::border", "CompositeExplicitAutograd", lambda _values, _module: None)
torch.library.register_fake("partitioner::border", lambda _values, _module: None)

border = torch.ops.partitioner.border.default
"""Marks the nodes of a module: stands before them, with the module's arguments, and after them, with its new result tensors."""

fx.node.has_side_effect(border)


class NotCopyableError(Exception):
    """The nodes of a module cannot be a copy of another's."""


@contextlib.contextmanager
def trace_copies_once(model: nn.Module, copies: Sequence[Copies]) -> Iterator[None]:
    """While active, run stand-ins in place of all copies but the templates, and put borders around each copy in the trace.

    Raises:
        NotCopyableError: at the end, if an attribute was read in which the copies differ.
    """
    stand_ins: dict[str, StandIn] = {path: group.stand_in for group in copies for path in (group.template, *group.others)}
    templates = {path: group.template for group in copies for path in (group.template, *group.others)}
    results: dict[str, list[Any]] = {}  # of templates

    def call(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments, _ = tree_flatten((args, kwargs))
        border([leaf for leaf in arguments if isinstance(leaf, Tensor)], path)
        if path == templates[path]:
            result = forward(*args, **kwargs)
            leaves, _ = tree_flatten(result)
            results[path] = leaves
        else:
            leaves = stand_ins[path](arguments, results[templates[path]])
            result = tree_unflatten(leaves, stand_ins[path].tree)
        border([leaf for leaf, (kind, _) in zip(leaves, stand_ins[path].leaves, strict=True) if kind == "like"], path)
        return result

    unread = frozenset().union(*(group.unread for group in copies))
    with intercept_calls({path: model.get_submodule(path) for path in stand_ins}, call), record_reads(unread) as read:
        yield
    if read:
        kind, name = min(read, key=str)
        raise NotCopyableError(f"{kind.__name__}.{name} is read, which is not the same in all copies")


def write_copies(program: ExportedProgram, copies: Sequence[Copies]) -> None:
    """Replace the nodes of each stand-in by a copy of its template's nodes, in place.

    Raises:
        NotCopyableError: a module cannot be a copy of its template.
    """
    graph = program.graph
    borders: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            argument.users.setdefault(node)  # torch.export forgets users of nodes beside a region of autocast or no_grad
        if node.target is border:
            borders.setdefault(str(node.args[1]), []).append(node)
    state_placeholders = {str(spec.target): spec.arg.name for spec in program.graph_signature.input_specs if spec.target is not None}
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    state = {name: placeholders[placeholder] for name, placeholder in state_placeholders.items()}
    for group in copies:
        template = _Block(group.template, borders, state)
        template.check()
        _name_modules_from_root(template)
        for path in group.others:
            _write_copy(template, _Block(path, borders, state))
    for pair in borders.values():
        for node in pair:
            graph.erase_node(node)


class _Block:
    """The nodes between the two borders of a module.

    Args:
        borders: path of a module -> its borders.
        state: name of a parameter or buffer in the model -> its placeholder.
    """

    def __init__(self, path: str, borders: Mapping[str, Sequence[fx.Node]], state: Mapping[str, fx.Node]) -> None:
        if len(borders.get(path, ())) != 2:
            raise NotCopyableError(f"{path} is not called once")
        self.path = path
        self.begin, self.end = borders[path]
        self.inputs: list[fx.Node] = list(self.begin.args[0])  # type: ignore[arg-type]
        self.outputs: list[fx.Node] = list(self.end.args[0])  # type: ignore[arg-type]
        self.state = {name.removeprefix(f"{path}."): node for name, node in state.items() if name.startswith(f"{path}.")}
        self.nodes: list[fx.Node] = []
        node = self.begin.next
        while node is not self.end:
            self.nodes.append(node)
            node = node.next

    def check(self) -> None:
        """Raise NotCopyableError unless the nodes only compute the module's results from its arguments, its weights, and sizes."""
        inside, own_inputs = set(self.nodes), {*self.inputs, *self.state.values()}
        own_memory = {key for value in own_inputs for _, key in memory_keys(value)}
        for node in self.nodes:
            if node.op != "call_function" or not (isinstance(node.target, OpOverload) or _is_python_operator(node.target)):
                raise NotCopyableError(f"{node} is no operation")
            if node.target is border:
                raise NotCopyableError(f"{node} belongs to another module")
            if not own_memory.isdisjoint(key for written in mutated_arguments(node) for _, key in memory_keys(written)):
                raise NotCopyableError(f"{node} writes to an input of its module")
            outside = [argument for argument in node.all_input_nodes if argument not in inside and argument not in own_inputs]
            if node.target not in READS and not all(map(_is_size, outside)):
                raise NotCopyableError(f"{node} reads what is outside of its module")
            has_outside_users = not {*inside, self.end}.issuperset(node.users)
            if has_outside_users and node not in self.outputs and not _is_size(node):
                raise NotCopyableError(f"{node} is read outside of its module")


def _write_copy(template: _Block, block: _Block) -> None:
    """Replace a block's nodes by copies of the template's, which read the block's inputs and weights."""
    inputs = [*zip(template.inputs, block.inputs, strict=True), *((node, block.state[name]) for name, node in template.state.items())]
    results = [*zip(template.outputs, block.outputs, strict=True)]
    _check_copyable(template, block, [*inputs, *results])
    copies, values, memory = dict(inputs), dict(results), _Memory([*inputs, *results])
    graph = block.end.graph
    with graph.inserting_before(block.end):
        for node in template.nodes:
            if _is_size(node):
                copies[node] = node  # each size is counted once, where it is first asked for
                continue
            copy = copies[node] = graph.node_copy(node, lambda argument: copies.get(argument, argument))
            own: dict[str, Any] = {"val": values[node].meta["val"]} if node in values else {OWN_MEMORY: memory.of_copy(node)}
            copy.meta = {**node.meta, **_provenance(node, template, block), **own}
            if (checkpoint := checkpoint_of(node)) is not None:
                mark_checkpoint(copy, checkpoint_of(block.begin) or f"{checkpoint} of {block.path}")
    for template_result, stand_in_result in results:
        stand_in_result.replace_all_uses_with(copies[template_result])
    for node in reversed(block.nodes):
        graph.erase_node(node)
    block.end.args = ([], block.path)


def _check_copyable(template: _Block, block: _Block, pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Raise NotCopyableError where a block's call differs from the template's: ``pairs`` are the inputs and results of both."""
    for template_node, node in pairs:
        if _layouts(template_node) != _layouts(node):
            raise NotCopyableError(f"{template_node} and {node} differ in memory order")
    if [*map(template.inputs.index, template.inputs)] != [*map(block.inputs.index, block.inputs)]:
        raise NotCopyableError(f"{block.path} is given one tensor twice where {template.path} is given two")


def _layouts(node: fx.Node) -> list[Any]:
    """Return sizes, strides and types of a node's tensors, sizes as expressions in the batch."""
    return [
        (tuple(map(size_of, (*leaf.shape, *leaf.stride(), leaf.storage_offset()))), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in tree_leaves(node.meta["val"])
    ]


class _Memory:
    """Memory keys of copied nodes, which have the template's fake tensors but not its memory; ``pairs`` as in ``_check_copyable``."""

    def __init__(self, pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
        keys = (tensors for pair in pairs for tensors in zip(*map(memory_keys, pair), strict=True))
        self._copy_keys: dict[Hashable, Hashable] = {template_key: copy_key for (_, template_key), (_, copy_key) in keys}

    def of_copy(self, node: fx.Node) -> MemoryOf:
        """Return the memory of the copy of a template's node: aliases share a key, as in the template."""
        return MemoryOf(node.meta["val"], tuple(self._copy_keys.setdefault(key, new_memory()) for _, key in memory_keys(node)))


_ROOT = "L__self__"
"""Prefix of the paths in the keys of ``meta["nn_module_stack"]``."""


def _is_python_operator(target: Any) -> bool:
    """Return whether a function is from Python's ``operator``: it takes an item out of a tuple, or computes a size."""
    return getattr(target, "__module__", "") == operator.getitem.__module__


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _name_modules_from_root(template: _Block) -> None:
    """Write the paths of modules in the provenance of a block's nodes from the root of the model.

    Where a model has one module under several names, ``torch.export`` names the modules that a block calls from the block.
    """
    n_around, path = len(template.begin.meta.get("nn_module_stack", {})), template.path
    stacks = {node: [*node.meta.get("nn_module_stack", {}).items()] for node in template.nodes}
    if all(name.startswith(f"{path}.") for stack in stacks.values() for _, (name, _) in stack[n_around:]):
        return
    for node, stack in stacks.items():
        within = {key.replace(_ROOT, f"{_ROOT}{path}.", 1): (f"{path}.{name}", kind) for key, (name, kind) in stack[n_around:]}
        node.meta["nn_module_stack"] = {**dict(stack[:n_around]), **within}


def _provenance(node: fx.Node, template: _Block, block: _Block) -> dict[str, Any]:
    """Return where the copy of a template's node comes from: after the call of its own block, the modules and lines of the template."""
    within = [*node.meta.get("nn_module_stack", {}).items()][len(template.begin.meta.get("nn_module_stack", {})) :]
    stack = {
        _renamed(key, template.path, block.path, _ROOT): (_renamed(path, template.path, block.path), kind) for key, (path, kind) in within
    }
    lines = node.meta.get("stack_trace")
    around, own_around = (each.begin.meta.get("stack_trace") or "" for each in (template, block))
    return {
        "nn_module_stack": {**block.begin.meta.get("nn_module_stack", {}), **stack},
        "stack_trace": None if lines is None else own_around + lines.removeprefix(around),
    }


def _renamed(text: str, path: str, new_path: str, prefix: str = "") -> str:
    """Return the path of a module, or of one in it, with another path of the module."""
    old = prefix + path
    return prefix + new_path + text.removeprefix(old) if text == old or text.startswith(f"{old}.") else text
