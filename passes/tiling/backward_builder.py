"""Write the training graphs of a tiled stage: copy the template graph of a kind of tiles for each of them, and add up gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.aliasing import OWN_MEMORY, memory_keys, new_memory
from passes.graph.fake_tensors import FakeTensorCache
from passes.graph.symbolic_sizes import size_of
from passes.tiling.steps import TILE

aten = torch.ops.aten


def copy_template(target: fx.Graph, template: fx.Graph, arguments: Sequence[Any], label: str) -> list[fx.Node]:
    """Append the nodes of a template to a graph; views become reshapes, because strides of arguments may differ.

    Args:
        arguments: for each placeholder of the template, a node of the target.
        label: the tile that the copies belong to, suffix of their names; empty: none.

    Returns:
        The copies of the template's outputs, flat.
    """
    copies: dict[fx.Node, Any] = {}
    memory: dict[Any, Any] = {}
    placeholders = [node for node in template.nodes if node.op == "placeholder"]
    for node, argument in zip(placeholders, arguments, strict=True):
        copies[node] = argument
        for (_, template_key), (_, target_key) in zip(memory_keys(node), memory_keys(argument), strict=True):
            memory.setdefault(template_key, target_key)
    for node in template.nodes:
        if node.op != "call_function":
            continue
        positional, keywords = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        function = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target  # noqa: SLF001
        name = f"{node.name}_{label}" if label else node.name
        copies[node] = target.create_node("call_function", function, positional, keywords, name=name)
        keys = tuple(memory.setdefault(key, new_memory()) for _, key in memory_keys(node))
        copies[node].meta = {**node.meta, OWN_MEMORY: keys, **({TILE: label} if label else {})}
    results = template.output_node().args[0]
    assert isinstance(results, Sequence)
    return [copies[node] for part in results for node in (part if isinstance(part, list | tuple) else [part]) if isinstance(node, fx.Node)]


class GradientWriter:
    """Adds up gradients of values in a graph.

    The first gradient of a value may alias memory that others read: the first sum allocates, later ones add in place.

    Args:
        size: emits a symbolic size as an argument of a call.
        device: of the tensors that it allocates.

    Attributes:
        gradients: value of the tiled graph -> the node of its gradient so far.
    """

    def __init__(self, target: fx.Graph, size: Callable[[Any], Any], device: torch.device) -> None:
        self.target, self._size, self._device = target, size, device
        self._fake_values = FakeTensorCache(pieces_are_alike=True)
        self._owned: set[fx.Node] = set()
        self.gradients: dict[fx.Node, fx.Node] = {}

    def call(self, function: Any, arguments: tuple[Any, ...], name: str, /, **keywords: Any) -> fx.Node:
        """Write a call, with its fake tensor."""
        node = self.target.create_node("call_function", function, arguments, keywords, name=name)
        self._fake_values.describe(node)
        return node

    def add(self, value: fx.Node, gradient: fx.Node) -> None:
        """Add to the gradient of a value."""
        total = self.gradients.get(value)
        if total is None:
            self.gradients[value] = gradient
        elif value in self._owned:
            self.call(aten.add_.Tensor, (total, gradient), f"{total.name}_more")
        else:
            self.gradients[value] = self.call(aten.add.Tensor, (total, gradient), f"{value.name}_gradient_sum")
            self._owned.add(value)

    def add_piece(self, value: fx.Node, slices: Sequence[tuple[int, int, int]], gradient: fx.Node) -> None:
        """Add the gradient of a slice of a value to the gradient of the value, in place.

        Args:
            slices: (dimension, start, stop) of each sliced dimension.
        """
        part = self.part(self._owned_gradient(value), slices, f"{value.name}_gradient_part")
        self.call(aten.add_.Tensor, (part, gradient), f"{value.name}_gradient_more")

    def part(self, whole: fx.Node, slices: Sequence[tuple[int, int, int]], name: str) -> fx.Node:
        """Write the slice of a value: one slice call for each (dimension, start, stop)."""
        for dimension, start, stop in slices:
            whole = self.call(aten.slice.Tensor, (whole, dimension, start, stop), name)
        return whole

    def _owned_gradient(self, value: fx.Node) -> fx.Node:
        """Return the gradient of a value in memory of its own: zeros if there is no gradient yet, a copy if it may alias another value."""
        if value not in self._owned:
            gradient = self.gradients.get(value)
            if gradient is None:
                fake: Tensor = value.meta["val"]
                shape = [self._size(size_of(size)) for size in fake.shape]
                self.gradients[value] = self.call(
                    aten.zeros.default, (shape,), f"{value.name}_gradient", dtype=fake.dtype, device=self._device
                )
            else:
                self.gradients[value] = self.call(
                    aten.clone.default, (gradient,), f"{value.name}_gradient_copy", memory_format=torch.contiguous_format
                )
            self._owned.add(value)
        return self.gradients[value]

    def results(self, values: Sequence[fx.Node], placeholders: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the gradients of values, contiguous, each in memory that is shared with no other and no placeholder.

        Args:
            placeholders: of the graph; their memory belongs to the caller.
        """
        used_memory = {key for node in placeholders for _, key in memory_keys(node)}
        gradients = []
        for value in values:
            gradient = self.gradients[value]
            keys = {key for _, key in memory_keys(gradient)}
            if keys & used_memory or not gradient.meta["val"].is_contiguous():
                gradient = self.call(aten.clone.default, (gradient,), f"{value.name}_gradient_own", memory_format=torch.contiguous_format)
                keys = {key for _, key in memory_keys(gradient)}
            used_memory |= keys
            gradients.append(gradient)
        return gradients
