"""Fuse pointwise operations into kernels: values inside a kernel are neither written nor read.

    unfused                                    fused
    gelu     reads a, writes b                 gelu, mul, add   reads a, c and d, writes the sum
    mul      reads b and c, writes d'
    add      reads d' and d, writes the sum

Each node keeps its place in the program and costs its own reads from memory and writes to it, the first of a kernel for the
start. torch.compile ("compiled") fuses pointwise operations with each other and into normalisations and softmax. Kernels written by
hand ("hand"), as in Megatron-LM, fuse pointwise operations with each other (bias-GELU, bias-dropout-add), those before a softmax
into it, and those after its backward into that (megatron/fused_kernels, scaled_masked_softmax.h); the dropout of a softmax is
another kernel (megatron/model/transformer.py, CoreAttention).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import fx

from cost_models.ops.cost import tensor_shapes
from cost_models.ops.work import Work
from passes.graph.schemas import packet
from passes.ir.tensor_spec import Size

aten = torch.ops.aten

Fusion = Literal["none", "hand", "compiled"]
"""Kinds of fusion; see the module."""


def fused(works: Mapping[fx.Node, Work], fusion: Fusion) -> dict[fx.Node, Work]:
    """Return the works of the nodes of one graph, after fusion.

    Args:
        works: node -> its work, in the order of the graph; views and what is no operation have none (``launches`` is 0).
        fusion: what becomes one kernel.
    """
    if fusion == "none":
        return dict(works)
    kernels = _Kernels(works, fusion)
    for node in works:
        kernels.place(node)
    return {node: kernels.work(node) for node in works}


class _Kernels:
    """Assignment of nodes to kernels.

    A node joins the kernels of its arguments, and makes one of them, unless an argument depends on such a kernel from outside: a kernel
    starts when all that it reads is there. Sets of kernels are numbers whose bits are kernels.

    _ancestors    node -> the kernels that it depends on, as bits
    _waits        for each kernel, the kernels that must end before it starts, as bits
    """

    def __init__(self, works: Mapping[fx.Node, Work], fusion: Fusion) -> None:
        self._works = works
        self._fusion = fusion
        self._kernel: dict[fx.Node, int] = {}
        self._ancestors: dict[fx.Node, int] = {}
        self._members: list[list[fx.Node]] = []
        self._elements: list[Size] = []
        self._bits: list[int] = []
        self._waits: list[int] = []
        self._place = {node: place for place, node in enumerate(works)}

    def place(self, node: fx.Node) -> None:
        """Assign a node to a kernel; earlier nodes are already assigned."""
        arguments = [argument for argument in node.all_input_nodes if argument in self._works]
        ancestors = 0
        for argument in arguments:
            ancestors |= self._ancestors[argument]
        if self._works[node].launches and self._is_fusible(node):
            kernel = self._new(node)
            for argument in arguments:
                if not self._is_border(node, argument):
                    self._join(kernel, argument, arguments)
            self._waits[kernel] |= self._outside(arguments, {kernel})
            ancestors |= self._bits[kernel]
        self._ancestors[node] = ancestors

    def work(self, node: fx.Node) -> Work:
        """Return the work of a node inside its kernel."""
        work, kernel = self._works[node], self._kernel.get(node)
        members = self._members[kernel] if kernel is not None else []
        if len(members) < 2:
            return work
        place = members.index(node)
        read_before = {source for member in members[:place] for source in map(_viewed, member.all_input_nodes)}
        inside = set(members[:place])
        read = [each for each in node.all_input_nodes if _viewed(each) not in inside and _viewed(each) not in read_before]
        values = [user for user in node.users if user.target is operator.getitem] or [node]
        written = [value for value in values if any(reader not in members for reader in _readers(value, self._works))]
        size = _bytes(read) + _bytes(written)
        return Work(0, size, 0 if place else 1, work.family)

    def _new(self, node: fx.Node) -> int:
        kernel = len(self._members)
        self._kernel[node] = kernel
        self._members.append([node])
        self._elements.append(tensor_shapes(node.meta["val"])[0].numel)
        self._bits.append(1 << kernel)
        self._waits.append(0)
        return kernel

    def _join(self, kernel: int, argument: fx.Node, arguments: Sequence[fx.Node]) -> None:
        """Merge the kernel of a new node with that of its argument, if neither depends on the other."""
        other = self._kernel.get(_viewed(argument))
        if other is None or other == kernel or self._elements[other] != self._elements[kernel]:
            return
        both = self._bits[kernel] | self._bits[other]
        if (self._waits[kernel] | self._waits[other] | self._outside(arguments, {kernel, other})) & both:
            return
        for member in self._members[other]:
            self._kernel[member] = kernel
        self._members[kernel] = sorted([*self._members[other], *self._members[kernel]], key=self._place.__getitem__)
        self._bits[kernel] = both
        self._waits[kernel] |= self._waits[other]

    def _outside(self, arguments: Sequence[fx.Node], kernels: set[int]) -> int:
        """Return the kernels, as bits, on which arguments computed outside of ``kernels`` depend."""
        outside = 0
        for argument in arguments:
            if self._kernel.get(_viewed(argument)) not in kernels:
                outside |= self._ancestors[argument]
        return outside

    def _is_border(self, node: fx.Node, argument: fx.Node) -> bool:
        """Return whether hand-written kernels end between the two: after a softmax, or before its backward."""
        reads_softmax = "softmax" in str(_viewed(argument).target) and "backward" not in str(_viewed(argument).target)
        return self._fusion == "hand" and (reads_softmax or ("softmax" in str(node.target) and "backward" in str(node.target)))

    def _is_fusible(self, node: fx.Node) -> bool:
        family = self._works[node].family
        return family == "pointwise" or (family == "normalisation" and (self._fusion == "compiled" or "softmax" in str(node.target)))


def _viewed(node: fx.Node) -> fx.Node:
    """Return the node from which views and getitems take their elements."""
    while node.target is operator.getitem or packet(node.target) in _VIEWS:
        node = node.all_input_nodes[0]
    return node


_VIEWS = frozenset(
    {aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten, aten.alias, aten.detach}  # noqa: SLF001
)


def _readers(node: fx.Node, works: Mapping[fx.Node, Work]) -> Iterable[fx.Node]:
    """Yield the readers of a value, also through views of it."""
    for user in node.users:
        if user in works and not works[user].launches and user.op == "call_function":
            yield from _readers(user, works)
        else:
            yield user


def _bytes(nodes: Iterable[fx.Node]) -> Size:
    return sum((shape.bytes for node in nodes for shape in tensor_shapes(node.meta.get("val"))), start=0)
