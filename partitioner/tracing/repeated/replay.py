"""Trace modules that do the very same once, and write the graph of all of them.

    exported                                            written out

    border([x], "blocks.0")                             x_1 = block 0 of x, its weights
    x_1 = block 0 of x, its weights                     x_2 = block 1 of x_1, its weights
    border([x_1], "blocks.0")                           x_3 = block 2 of x_2, its weights
    border([x_1], "blocks.1")
    x_2 = aten.clone(x_1)
    border([x_2], "blocks.1")
    border([x_2], "blocks.2")
    x_3 = aten.clone(x_2)
    border([x_3], "blocks.2")

Which modules do so is seen in a rehearsal. The graph is, node for node, what a trace of all of them gives. Where it could be anything else,
because what is between two borders reads more than weights and arguments of its own, writes in place, or calls a graph, the model is traced
as it is.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from partitioner.tracing.repeated.find import Copies, StandIn, intercepted
from passes.graph.aliasing import OWN_MEMORY, MemoryOf, memory_keys, mutated_arguments, new_memory
from passes.graph.symbolic_sizes import size_of
from passes.ir.torch_private import OpOverload, tree_flatten, tree_leaves, tree_unflatten
from passes.normalize.symbolic_batch import READS

__all__ = ["UnlikeError", "traced_once", "write_copies"]

torch.library.define("partitioner::border", "(Tensor[] values, str module) -> ()")
torch.library.impl("partitioner::border", "CompositeExplicitAutograd", lambda _values, _module: None)
torch.library.register_fake("partitioner::border", lambda _values, _module: None)

border = torch.ops.partitioner.border.default
"""Stands in front of what a module computes, with its tensors, and behind it, with those that it made."""

fx.node.has_side_effect(border)


class UnlikeError(Exception):
    """A module cannot be written as a copy of another."""


@contextlib.contextmanager
def traced_once(model: nn.Module, copies: Sequence[Copies]) -> Iterator[None]:
    """While it lasts, all copies but one of each kind give what they would give without computing it."""
    stand_ins: dict[str, StandIn] = {path: each.result for each in copies for path in each.others}
    results = {path: each.result for each in copies for path in (each.template, *each.others)}

    def call(path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given, _ = tree_flatten((args, kwargs))
        border([leaf for leaf in given if isinstance(leaf, Tensor)], path)
        if path in stand_ins:
            leaves = stand_ins[path](given)
            result = tree_unflatten(leaves, stand_ins[path].tree)
        else:
            result = forward(*args, **kwargs)
            leaves, _ = tree_flatten(result)
        border([leaf for leaf, (how, _) in zip(leaves, results[path].leaves, strict=True) if how == "like"], path)
        return result

    with intercepted({path: model.get_submodule(path) for path in results}, call):
        yield


def write_copies(program: ExportedProgram, copies: Sequence[Copies]) -> None:
    """Write out what stood for copies, in place.

    Raises:
        UnlikeError: one cannot be written.
    """
    graph = program.graph
    borders: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is border:
            borders.setdefault(str(node.args[1]), []).append(node)
    state = {str(spec.target): spec.arg.name for spec in program.graph_signature.input_specs if spec.target is not None}
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    tensors = {name: placeholders[placeholder] for name, placeholder in state.items()}
    for each in copies:
        template = _Block(each.template, borders, tensors)
        template.check()
        for path in each.others:
            _write(template, _Block(path, borders, tensors))
    for several in borders.values():
        for node in several:
            graph.erase_node(node)
    for node in graph.nodes:
        if "stack_trace" in node.meta and node.meta["stack_trace"] is not None:
            node.meta["stack_trace"] = _OWN_FRAMES.sub("", node.meta["stack_trace"])


_OWN_FRAMES = re.compile(rf'  File "{re.escape(__file__)}", line \d+, in [^\n]*\n(?:    [^\n]*\n)*')
"""The frames of ``traced_once`` in a stack trace."""


class _Block:
    """What stands between the two borders of a module.

    Args:
        borders: by path.
        tensors: parameter or buffer -> its placeholder.
    """

    def __init__(self, path: str, borders: Mapping[str, Sequence[fx.Node]], tensors: Mapping[str, fx.Node]) -> None:
        if len(borders.get(path, ())) != 2:
            raise UnlikeError(f"{path} is not called once")
        self.path = path
        self.begin, self.end = borders[path]
        self.inputs: list[fx.Node] = list(self.begin.args[0])  # type: ignore[arg-type]
        self.outputs: list[fx.Node] = list(self.end.args[0])  # type: ignore[arg-type]
        self.state = {name.removeprefix(f"{path}."): node for name, node in tensors.items() if name.startswith(f"{path}.")}
        self.nodes: list[fx.Node] = []
        node = self.begin.next
        while node is not self.end:
            self.nodes.append(node)
            node = node.next

    def check(self) -> None:
        """Raise UnlikeError unless all that the module does is to compute its results from its tensors and its weights."""
        inside, given = set(self.nodes), {*self.inputs, *self.state.values()}
        for node in self.nodes:
            if node.op != "call_function" or not (isinstance(node.target, OpOverload) or _is_number(node.target)):
                raise UnlikeError(f"{node} is no operation")
            if node.target is border:
                raise UnlikeError(f"{node} belongs to another module")
            if mutated_arguments(node):
                raise UnlikeError(f"{node} writes in place")
            others = [each for each in node.all_input_nodes if each not in inside and each not in given]
            if not all(_is_size(each) for each in (others if node.target not in READS else ())):
                raise UnlikeError(f"{node} reads what is outside of its module")
            if node not in self.outputs and not (_is_size(node) or inside.union({self.end}).issuperset(node.users)):
                raise UnlikeError(f"{node} is read outside of its module")


def _write(template: _Block, block: _Block) -> None:
    """Write what a template computes in the place of what stands for another module's."""
    pairs = [*zip(template.inputs, block.inputs, strict=True), *((node, block.state[name]) for name, node in template.state.items())]
    results = [*zip(template.outputs, block.outputs, strict=True)]
    _check_alike([*pairs, *results])
    if template.begin.meta.get("stack_trace") != block.begin.meta.get("stack_trace"):
        raise UnlikeError(f"{block.path} is called from another line")
    if [*map(template.inputs.index, template.inputs)] != [*map(block.inputs.index, block.inputs)]:
        raise UnlikeError(f"{block.path} is given one tensor twice where {template.path} is given two")
    nodes, values, memory = dict(pairs), dict(results), _Memory([*pairs, *results])
    graph = block.end.graph
    with graph.inserting_before(block.end):
        for node in template.nodes:
            if _is_size(node):
                nodes[node] = node  # each size is counted once, where it is first asked for
                continue
            copy = nodes[node] = graph.node_copy(node, lambda each: nodes.get(each, each))
            stack = _renamed(node.meta.get("nn_module_stack", {}), template.path, block.path)
            own: dict[str, Any] = {"val": values[node].meta["val"]} if node in values else {OWN_MEMORY: memory.of(node)}
            copy.meta = {**node.meta, "nn_module_stack": stack, **own}
    for theirs, stand_in in results:
        stand_in.replace_all_uses_with(nodes[theirs])
    for node in reversed(block.nodes):
        graph.erase_node(node)
    block.end.args = ([], block.path)


def _check_alike(pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    for one, other in pairs:
        if _layouts(one) != _layouts(other):
            raise UnlikeError(f"{one} and {other} lie in memory in another way")


def _layouts(node: fx.Node) -> list[Any]:
    """Sizes and types of a node's tensors, sizes as expressions in the batch."""
    return [
        (tuple(map(size_of, (*leaf.shape, *leaf.stride(), leaf.storage_offset()))), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in tree_leaves(node.meta["val"])
    ]


class _Memory:
    """In which memory the values of a copy lie: they share fake tensors with those of the template, and no memory.

    Args:
        pairs: what the template reads, and what the copy reads in its place; results likewise.
    """

    def __init__(self, pairs: Sequence[tuple[fx.Node, fx.Node]]) -> None:
        keys = ((one, other) for pair in pairs for one, other in zip(*map(memory_keys, pair), strict=True))
        self._known: dict[Hashable, Hashable] = {theirs: own for (_, theirs), (_, own) in keys}

    def of(self, node: fx.Node) -> MemoryOf:
        """In which a copy of a node's value lies."""
        return MemoryOf(node.meta["val"], tuple(self._known.setdefault(key, new_memory()) for _, key in memory_keys(node)))


_ROOT = "L__self__"
"""What the keys of ``meta["nn_module_stack"]`` have in front of paths."""


def _is_number(target: Any) -> bool:
    """Whether a function takes items out of tuples, or computes sizes: one of Python's own operators."""
    return getattr(target, "__module__", "") == operator.getitem.__module__


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _renamed(stack: Mapping[str, Any], path: str, other: str) -> dict[str, Any]:
    """Where a node comes from, one module's path in the place of another's."""

    def name(text: str, prefix: str = "") -> str:
        whole = prefix + path
        return prefix + other + text.removeprefix(whole) if text == whole or text.startswith(f"{whole}.") else text

    return {name(key, _ROOT): (name(where), kind) for key, (where, kind) in stack.items()}
