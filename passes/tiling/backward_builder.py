"""Writes the graphs of a streamed stage in training: templates written out for the tiles that they stand for, gradients added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY, memory_keys, new_memory
from passes.graph.fake_tensors import FakeTensorCache
from passes.graph.symbolic_sizes import size_of
from passes.tiling.steps import TILE

__all__ = ["GradientWriter", "write_out"]

aten = torch.ops.aten


def write_out(target: fx.Graph, template: fx.Graph, arguments: Sequence[Any], label: str) -> list[fx.Node]:
    """Copy a template into a graph.

    Args:
        arguments: for each placeholder, its node.
        label: what the names of the nodes end with.

    Returns:
        The nodes of its flat output, and of the tuple that ends it.
    """
    copies: dict[fx.Node, Any] = {}
    memory: dict[Any, Any] = {}
    placeholders = [node for node in template.nodes if node.op == "placeholder"]
    for node, argument in zip(placeholders, arguments, strict=True):
        copies[node] = argument
        for (_, inside), (_, outside) in zip(memory_keys(node), memory_keys(argument), strict=True):
            memory.setdefault(inside, outside)
    for node in template.nodes:
        if node.op != "call_function":
            continue
        positional, keywords = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        function = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target  # noqa: SLF001
        name = f"{node.name}_{label}" if label else node.name
        copies[node] = target.create_node("call_function", function, positional, keywords, name=name)
        own = tuple(memory.setdefault(key, new_memory()) for _, key in memory_keys(node))
        copies[node].meta = {**node.meta, OWN_MEMORY: own, **({TILE: label} if label else {})}
    results = template.output_node().args[0]
    assert isinstance(results, Sequence)
    return [copies[node] for part in results for node in (part if isinstance(part, list | tuple) else [part]) if isinstance(node, fx.Node)]


class GradientWriter:
    """Adds up gradients of values in a graph.

    A gradient that came from somewhere may be somebody else's memory, too: the first sum takes new memory, later ones add in place.

    Args:
        target: the graph.
        size: writes a size.
        device: of what it makes.

    Attributes:
        gradients: value of the streamed graph -> the node that has its gradient, as far as it is known.
    """

    def __init__(self, target: fx.Graph, size: Callable[[Any], Any], device: torch.device) -> None:
        self.target, self._size, self._device = target, size, device
        self._known = FakeTensorCache(pieces_are_alike=True)
        self._owned: set[fx.Node] = set()
        self.gradients: dict[fx.Node, fx.Node] = {}

    def call(self, function: Any, arguments: tuple[Any, ...], name: str, /, **keywords: Any) -> fx.Node:
        node = self.target.create_node("call_function", function, arguments, keywords, name=name)
        self._known.describe(node)
        return node

    def add(self, value: fx.Node, gradient: fx.Node) -> None:
        """Add to the gradient of a value."""
        known = self.gradients.get(value)
        if known is None:
            self.gradients[value] = gradient
        elif value in self._owned:
            self.call(aten.add_.Tensor, (known, gradient), f"{known.name}_more")
        else:
            self.gradients[value] = self.call(aten.add.Tensor, (known, gradient), f"{value.name}_gradient_sum")
            self._owned.add(value)

    def add_piece(self, value: fx.Node, slices: Sequence[tuple[int, int, int]], gradient: fx.Node) -> None:
        """Add to the gradient of a part of a value.

        Args:
            slices: dimension, first element and the one behind the last, one after the other.
        """
        place = self.part(self._of_its_own(value), slices, f"{value.name}_gradient_part")
        self.call(aten.add_.Tensor, (place, gradient), f"{value.name}_gradient_more")

    def part(self, whole: fx.Node, slices: Sequence[tuple[int, int, int]], name: str) -> fx.Node:
        """One slice after the other."""
        for dimension, start, stop in slices:
            whole = self.call(aten.slice.Tensor, (whole, dimension, start, stop), name)
        return whole

    def _of_its_own(self, value: fx.Node) -> fx.Node:
        """The gradient of a value in memory that nobody else has."""
        if value not in self._owned:
            known = self.gradients.get(value)
            if known is None:
                fake: Tensor = value.meta["val"]
                shape = [self._size(size_of(size)) for size in fake.shape]
                self.gradients[value] = self.call(
                    aten.zeros.default, (shape,), f"{value.name}_gradient", dtype=fake.dtype, device=self._device
                )
            else:
                self.gradients[value] = self.call(
                    aten.clone.default, (known,), f"{value.name}_gradient_copy", memory_format=torch.contiguous_format
                )
            self._owned.add(value)
        return self.gradients[value]

    def results(self, values: Sequence[fx.Node], given: Sequence[fx.Node]) -> list[fx.Node]:
        """The gradients of values, dense, and in memory of their own.

        Args:
            given: placeholders whose memory is somebody else's.
        """
        taken = {key for node in given for _, key in memory_keys(node)}
        found = []
        for value in values:
            node = self.gradients[value]
            keys = {key for _, key in memory_keys(node)}
            if keys & taken or not node.meta["val"].is_contiguous():
                node = self.call(aten.clone.default, (node,), f"{value.name}_gradient_own", memory_format=torch.contiguous_format)
                keys = {key for _, key in memory_keys(node)}
            taken |= keys
            found.append(node)
        return found
