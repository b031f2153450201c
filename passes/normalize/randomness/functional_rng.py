"""Separate random masks from the ops that apply them, so that a sharded model draws the same numbers as the whole one.

Before:                                             After:

    y = dropout(x, p)                                   mask = dropout_mask(shape of x, p)       drawn whole, the same on every rank
                                                        y = x * mask * (1 / (1 - p))             sharded; slices its shard of the mask

    y = attention(q, k, v, dropout_p=p)                 scores = softmax(q @ k.T * scale)
                                                        y = scores * dropout_mask(...) * (1 / (1 - p)) @ v

The backward saves the mask, one byte an element, or draws it again from the saved generator state:

    forward     mask, state = dropout_mask_with_state(shape, p)      draws as dropout_mask does
    backward    mask = dropout_mask_again(state, shape, p)           the same mask; the generator stays unchanged

A mask is where ``aten.dropout`` of ones of that shape is not zero: the very numbers of one device for the same seed. (Fused attention
kernels of accelerators draw in an order of their own, which nothing else reproduces.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.fake_tensors import FakeTensorCache, fake_mode
from passes.graph.lazy_graph_module import rewritten
from passes.graph.schemas import bound_arguments, draws
from passes.graph.symbolic_sizes import emit_size, size_of
from passes.ir.graph import ModelGraph

aten = torch.ops.aten


def split_randomness(graph: ModelGraph) -> ModelGraph:
    """Return the graph with dropout, and attention with dropout, written as a separate mask and a product with it."""
    writers = {node: write for node in graph.graph.nodes if (write := _writer(node)) is not None}
    if not writers:
        return graph
    target = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    with fake_mode(graph.graph):
        fakes = FakeTensorCache()
        for node in graph.graph.nodes:
            write = writers.get(node)
            copies[node] = (
                target.node_copy(node, copies.__getitem__) if write is None else write(_Emitter(graph, target, copies, node, fakes))
            )
    return rewritten(graph, target, {node.name: copy.name for node, copy in copies.items()})


class _Emitter:
    """Writes the calls that replace one node."""

    def __init__(self, graph: ModelGraph, target: fx.Graph, copies: dict[fx.Node, fx.Node], node: fx.Node, fakes: FakeTensorCache) -> None:
        self.graph = graph
        self.target = target
        self.node = node
        self._fakes = fakes
        self.arguments = {name: fx.map_arg(value, copies.__getitem__) for name, value in bound_arguments(node).items()}
        self._batch = next((copy for copy in copies.values() if copy.name == "batch"), None)

    def call(self, function: Callable[..., Any], /, *args: Any, name: str = "", **kwargs: Any) -> fx.Node:
        """Write a call with the metadata of the replaced node, and its own fake value."""
        label = name or f"{self.node.name}_{getattr(function, '__name__', 'size').partition('.')[0]}"
        node = self.target.create_node("call_function", function, args, kwargs, name=label)
        node.meta = {key: value for key, value in self.node.meta.items() if key != "val"}
        self._fakes.describe(node)
        return node

    def emit_dropout(self, like: fx.Node, p: float, name: str) -> fx.Node:
        """Write the dropout of a value: its product with a mask, scaled by 1 / (1 - p)."""
        value = like.meta["val"]
        sizes = [emit_size(self.target, size_of(size), self.graph.batch, self._batch) for size in value.shape]  # type: ignore[arg-type]
        mask = self.call(dropout_mask, sizes, p, value.dtype, value.device, name=f"{self.node.name}_mask")
        kept = self.call(aten.mul.Tensor, like, mask, name=f"{self.node.name}_kept")
        return self.call(aten.mul.Tensor, kept, 1.0 / (1.0 - p) if p < 1 else 0.0, name=name)


def _writer(node: fx.Node) -> Callable[[_Emitter], fx.Node] | None:
    if node.target is aten.dropout.default and draws(node) and bound_arguments(node)["train"]:
        return _dropout
    if node.target is aten.scaled_dot_product_attention.default and draws(node):
        return _attention
    return None


def _dropout(write: _Emitter) -> fx.Node:
    x = write.arguments["input"]
    return write.emit_dropout(x, write.arguments["p"], write.node.name)


def _attention(write: _Emitter) -> fx.Node:
    """Attention as its definition says, with its dropout between softmax and values."""
    query, key, value, mask = (write.arguments[name] for name in ("query", "key", "value", "attn_mask"))
    if write.arguments["enable_gqa"] and key.meta["val"].shape[-3] != query.meta["val"].shape[-3]:
        times = query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
        key, value = (write.call(aten.repeat_interleave.self_int, each, times, -3) for each in (key, value))
    scale = write.arguments["scale"] or 1.0 / math.sqrt(query.meta["val"].shape[-1])
    scores = write.call(aten.matmul.default, query, write.call(aten.transpose.int, key, -2, -1))
    scores = write.call(aten.mul.Tensor, scores, scale)
    if write.arguments["is_causal"]:
        queries, keys = query.meta["val"].shape[-2], key.meta["val"].shape[-2]
        device = query.meta["val"].device
        mask = write.call(aten.tril.default, write.call(aten.ones.default, [queries, keys], dtype=torch.bool, device=device))
    if mask is not None and mask.meta["val"].dtype is torch.bool:
        scores = write.call(aten.masked_fill.Scalar, scores, write.call(aten.logical_not.default, mask), -math.inf)
    elif mask is not None:
        scores = write.call(aten.add.Tensor, scores, mask)
    weights = write.call(aten.softmax.int, scores, -1)
    weights = write.emit_dropout(weights, write.arguments["dropout_p"], f"{write.node.name}_weights")
    return write.call(aten.matmul.default, weights, value, name=write.node.name)


# -- masks of dropout as operators -------------------------------------------------------------------------------------------------


_MASK = "SymInt[] size, float p, ScalarType dtype, Device device"
_DRAWS = (torch.Tag.nondeterministic_seeded,)

torch.library.define("partitioner::dropout_mask", f"({_MASK}) -> Tensor", tags=_DRAWS)
torch.library.define("partitioner::dropout_mask_with_state", f"({_MASK}) -> (Tensor, Tensor)", tags=_DRAWS)
torch.library.define("partitioner::dropout_mask_again", f"(Tensor state, {_MASK}) -> Tensor")

dropout_mask = torch.ops.partitioner.dropout_mask.default
"""Elements that dropout keeps."""

dropout_mask_with_state = torch.ops.partitioner.dropout_mask_with_state.default
"""The same, and the state that the generator had before."""

dropout_mask_again = torch.ops.partitioner.dropout_mask_again.default
"""The mask that was drawn from a state."""

_STATE_BYTES = {"cpu": 5056, "cuda": 16}
"""Of PyTorch's generators: a Mersenne twister; a seed and an offset (Philox)."""


def state_bytes(device: torch.device) -> int:
    """Return the size of the state of a device's generator."""
    return _STATE_BYTES.get(device.type, _STATE_BYTES["cpu"])


def _draw(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.dropout(torch.ones(size, dtype=dtype, device=device), p, train=True) != 0


def _draw_with_state(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return _draw(size, p, dtype, device), state


def _redraw(state: Tensor, size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask that was drawn in a state of the random generator."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cuda":
            torch.cuda.set_rng_state(state.cpu(), device)
        else:
            torch.set_rng_state(state.cpu())
        return _draw(size, p, dtype, device)


def _shape(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG001  the operator's own names
    return torch.empty(size, dtype=torch.bool, device=device)


def _shapes(size: Any, p: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return _shape(size, p, dtype, device), torch.empty(state_bytes(device), dtype=torch.uint8)


def _fake_redraw(state: Tensor, size: Any, p: float, dtype: torch.dtype, device: torch.device) -> Tensor:  # noqa: ARG001
    """Return an empty mask of the shape that ``_redraw`` returns."""
    return _shape(size, p, dtype, device)


for _operator, _run, _fake in (
    (dropout_mask, _draw, _shape),
    (dropout_mask_with_state, _draw_with_state, _shapes),
    (dropout_mask_again, _redraw, _fake_redraw),
):
    torch.library.impl(_operator.name(), "CompositeExplicitAutograd", _run)
    torch.library.register_fake(_operator.name(), _fake)
