"""Decompose attention whose queries, keys and values are sharded: keys and values go round the ring of ranks, a block at a time.

rank 0   queries 0, keys 0   |  queries 0, keys 3   |  queries 0, keys 2   |  queries 0, keys 1        4 ranks: n = 4 steps
rank 1   queries 1, keys 1   |  queries 1, keys 0   |  queries 1, keys 3   |  queries 1, keys 2
         own                    K, V of the rank before, while the last block is computed

What a row has of the blocks so far is joined with what it has of one more, by the online softmax (Milakov, Gimelshein, 2018; Liu, Zaharia,
Abbeel, "Ring attention with blockwise transformers", 2023):

    result, top, total = join_blocks(result, top, total, *attention_block(query, key, value))

Autograd would keep every block of keys and values. So the steps are written without gradients, and end in an operator of our own,
``finish_attention``, whose backward goes round the ring once more, and adds up the gradients of each block (``attention_block_backward``).
It saves queries, own keys and values, the result, and the tops and totals of its rows.

Keys and values are sent with the gradients that were added to them so far, own ones come last, so that gradients are then at home. Forward,
2 (n - 1) blocks leave a rank, and backward 4 (n - 1). All ranks have parts of one size, and so one graph; which block a rank has at a step
only shows in positions, of which each takes its own.

A causal mask hides half of all that, but each step lasts as long as the rank that is left with work. In zigzag order (Zhu,
"ring-flash-attention", 2024; Brandon et al., "Striped attention", 2023, has another), a rank has an early and a late piece of the sequence:

    rank 0   0 7    |    rank 1   1 6    |    rank 2   2 5    |    rank 3   3 4                     4 ranks: pieces 0 to 7

Of the keys j, 2n - 1 - j of another rank it then needs, at every step, two products of pieces: late queries with early keys, and the early
queries with the early keys if j < r, or the late ones with the late keys if not. Of its own it needs three: 2n + 1 in place of 4n. Queries,
keys and values come into this order before the ring, and the result leaves it afterwards: a ``halo_exchange`` each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.traceback import annotate, get_current_meta

from passes.graph.schemas import bound_arguments, packet
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.functional import GRADIENT, halo_exchange, take
from passes.spmd.decompose.attention_block import attention_block, attention_block_backward, join_blocks, row_totals
from passes.spmd.decompose.builder import PartWriter

aten = torch.ops.aten

RING = "ring"
"""The key in ``meta["custom"]`` that marks messages of a ring, for reports."""

ZIGZAG = "zigzag"
"""The key that marks messages that change between the orders of the sequence."""

Which: TypeAlias = Any
"""The number of a piece; or a node (tensor) that is true on the ranks where it is the first of two, and false where it is the second."""


@dataclass(frozen=True)
class _Visit:
    """Attention of some own queries to the keys of a block.

    Attributes:
        queries, keys: the pieces.
        mask: of these queries and keys; None: none.
        is_causal: whether a query attends to no keys after its own place in the piece.
        counts: a node (tensor) that is true on the ranks where the block counts; None: on all.
    """

    queries: Which
    keys: Which
    mask: Any = None
    is_causal: bool = False
    counts: Any = None


@dataclass(frozen=True)
class _Ring:
    """One attention call on a ring, as forward and backward share it: on nodes that are emitted, or on tensors.

    Attributes:
        call: emits a call, or runs it: ``call(function, *arguments, **keywords)``.
        value_of: gives the tensor that a node stands for; of a tensor, itself.
        mask: of own queries and all keys, boolean or added to scores; None: none.
        is_causal: whether a query attends to no keys after its own position.
        is_zigzag: whether a rank has two pieces of the sequence, an early and a late one; else it has one.
        scale: of the products of queries and keys.
        n_queries, n_keys: number of own queries, and of own keys, in a piece.
        over, count: the mesh dimension, and its ranks.
    """

    call: Callable[..., Any]
    value_of: Callable[[Any], Tensor]
    mask: Any
    is_causal: bool
    is_zigzag: bool
    scale: float
    n_queries: int
    n_keys: int
    over: str
    count: int

    def visits(self, like: Any, step: int) -> list[_Visit]:
        """Return a rank's attention at a step, at which it has the keys of the rank ``step`` before it."""
        if self.is_zigzag and step == 0:
            return [_Visit(0, 0, is_causal=True), _Visit(1, 0), _Visit(1, 1, is_causal=True)]
        if self.is_zigzag:
            is_earlier = self._is_earlier(like, step)
            return [_Visit(1, 0), _Visit(is_earlier, is_earlier)]
        if not self.is_causal:
            return [_Visit(0, 0, None if self.mask is None else self._mask_of_block(like, step))]
        if self.n_queries != self.n_keys:
            return [_Visit(0, 0, self._causal_mask(like, step))]
        return [_Visit(0, 0, counts=self._is_earlier(like, step)) if step else _Visit(0, 0, is_causal=True)]

    def _is_earlier(self, like: Any, step: int) -> Any:
        """Return whether the block of a step comes before this rank's own in the sequence."""
        ranks = self.call(aten.ge.Scalar, self._every(like, self.count), step)
        return self.call(take, ranks, 0, self.over, self.count, [], 0)

    def pieces(self, x: Any) -> list[Any]:
        """Return the pieces of own queries, keys, or of a value with their positions in its last dimension but one."""
        if not self.is_zigzag:
            return [x]
        size = self.value_of(x).shape[-2] // 2
        return [self.call(aten.narrow.default, x, -2, start, size) for start in (0, size)]

    def whole(self, pieces: Sequence[Any], dim: int) -> Any:
        """Return the inverse of ``pieces``."""
        return self.call(aten.cat.default, list(pieces), dim) if len(pieces) > 1 else pieces[0]

    def of(self, pieces: Sequence[Any], which: Which) -> Any:
        """Return a piece."""
        return pieces[which] if isinstance(which, int) else self.call(aten.where.self, which, *pieces)

    def replaced(self, pieces: Sequence[Any], which: Which, piece: Any) -> list[Any]:
        """Return pieces with one replaced."""
        if isinstance(which, int):
            return [piece if place == which else each for place, each in enumerate(pieces)]
        return [self.call(aten.where.self, which, piece, pieces[0]), self.call(aten.where.self, which, pieces[1], piece)]

    def rotated(self, block: Any) -> Any:
        """Send a block to the next rank, and receive that of the rank before."""
        size = int(self.value_of(block).shape[-2])
        starts = [(rank - 1) % self.count * size for rank in range(self.count)]
        return self._exchanged(block, RING, "|".join(f"{start}:{start + size}" for start in starts))

    def in_zigzag(self, x: Any) -> Any:
        """Send the pieces of the sequence to the ranks that have them in zigzag order."""
        last = 2 * self.count - 1
        return self._exchanged(x, ZIGZAG, self._runs((rank, last - rank) for rank in range(self.count)))

    def in_order(self, x: Any) -> Any:
        """Send the pieces back: the inverse of ``in_zigzag``."""
        last = 2 * self.count - 1
        places = [2 * piece if piece < self.count else 2 * (last - piece) + 1 for piece in range(2 * self.count)]
        return self._exchanged(x, ZIGZAG, self._runs(zip(places[::2], places[1::2], strict=True)))

    def _runs(self, pieces: Iterable[tuple[int, int]]) -> str:
        """Return the runs of elements that ranks read (``passes.ir.comm.index_ranges``), from the two pieces of each."""
        size = self.n_queries
        return "|".join(" ".join(f"{piece * size}:{(piece + 1) * size}" for piece in pair) for pair in pieces)

    def _exchanged(self, x: Any, mark: str, wanted: str) -> Any:
        value = self.value_of(x)
        size = int(value.shape[-2])
        arguments = (x, value.dim() - 2, self.over, [size] * self.count, wanted, size, size, 0.0)
        with annotate({mark: True}):
            return self.call(halo_exchange, *arguments)

    def _mask_of_block(self, like: Any, step: int) -> Any:
        """Return the mask of the keys of a step."""
        if self.value_of(self.mask).shape[-1] == 1:
            return self.mask
        return self.call(aten.index_select.default, self.mask, -1, self._positions(like, self.n_keys, step))

    def _causal_mask(self, like: Any, step: int) -> Any:
        """Return where the keys of a step are not after the queries."""
        columns = self.call(aten.unsqueeze.default, self._positions(like, self.n_keys, step), 0)
        return self.call(aten.le.Tensor, columns, self.call(aten.unsqueeze.default, self._positions(like, self.n_queries, 0), 1))

    def _every(self, like: Any, size: int) -> Any:
        return self.call(aten.arange.default, size, device=self.value_of(like).device)

    def _positions(self, like: Any, size: int, step: int) -> Any:
        """Return the positions of the block that this rank has at a step: that of the rank ``step`` before it."""
        every = self._every(like, size * self.count)
        shifted = self.call(aten.roll.default, every, [step * size]) if step else every
        return self.call(take, shifted, 0, self.over, self.count, [], 0)


def can_ring(node: fx.Node, operands: Sequence[fx.Node], with_gradient: Collection[fx.Node]) -> bool:
    """Return whether a call is attention that can be computed block by block: without dropout, or a mask that has a gradient.

    Args:
        operands: its tensors, in the order of the schema.
        with_gradient: values whose gradient may be asked for.
    """
    if packet(node.target) is not aten.scaled_dot_product_attention:
        return False
    arguments, shapes = bound_arguments(node), [tuple(map(size_of, operand.meta["val"].shape)) for operand in operands[:3]]
    same_heads = shapes[0][-3:-2] == shapes[1][-3:-2] or (bool(arguments["enable_gqa"]) and len(shapes[0]) > 3)
    is_batched = len({shape[:-3] for shape in shapes}) == 1 and shapes[1][-3:-2] == shapes[2][-3:-2] and same_heads
    return is_batched and not arguments["dropout_p"] and arguments["attn_mask"] not in with_gradient


def is_causal(node: fx.Node) -> bool:
    """Return whether the mask of an attention call is that of its positions: then zigzag order spares the products that it hides."""
    arguments = bound_arguments(node)
    return bool(arguments["is_causal"]) and arguments["attn_mask"] is None


def products_of_pieces(count: int) -> int:
    """Return how many products of pieces a rank computes in zigzag order, where a ring of ``count`` ranks has 4 for each of its steps."""
    return 2 * count + 1


def ring_attention(write: PartWriter, over: str, count: int, *, is_zigzag: bool) -> fx.Node:
    """Emit attention of own queries, keys and values, with blocks that go round the ranks of a mesh dimension."""

    def call(function: Any, /, *arguments: Any, **keywords: Any) -> fx.Node:
        node, marks = write.call(function, *arguments, **keywords), get_current_meta().get("custom")
        if marks:
            node.meta["custom"] = dict(marks)
        return node

    given = write.arguments
    query, key, value = given["query"], given["key"], given["value"]
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.meta["val"].shape[-1]) if scale is None else scale
    n_queries, n_keys = (int(each.meta["val"].shape[-2]) // (2 if is_zigzag else 1) for each in (query, key))
    rest = (bool(given["is_causal"]), is_zigzag, scale, n_queries, n_keys, over, count)
    ring = _Ring(call, lambda node: node.meta["val"], given["attn_mask"], *rest)
    if is_zigzag:
        query, key, value = (ring.in_zigzag(each) for each in (query, key, value))
    result, *totals = _forward(ring, *(call(aten.detach.default, each) for each in (query, key, value)))
    finished = call(finish_attention, result, call(row_totals, *totals), query, key, value, given["attn_mask"], *rest)
    return ring.in_order(finished) if is_zigzag else finished


def _forward(ring: _Ring, query: Any, key: Any, value: Any) -> list[Any]:
    """Return the result of attention to all blocks, in the dtype of its sums, and the top and total of each row."""
    call, queries = ring.call, ring.pieces(query)
    state: list[list[Any]] = [[None] * len(queries) for _ in range(3)]
    for step in range(ring.count):
        following = (ring.rotated(key), ring.rotated(value)) if step < ring.count - 1 else None
        keys, values = ring.pieces(key), ring.pieces(value)
        for visit in ring.visits(query, step):
            operands = (ring.of(queries, visit.queries), ring.of(keys, visit.keys), ring.of(values, visit.keys))
            found = call(attention_block, *operands, visit.mask, visit.is_causal, ring.scale)
            block = [call(operator.getitem, found, place) for place in range(3)]
            if visit.counts is not None:
                block[1] = call(aten.where.ScalarOther, visit.counts, block[1], -math.inf)
            before = [ring.of(pieces, visit.queries) for pieces in state]
            if before[0] is not None:
                joined = call(join_blocks, *before, *block)
                block = [call(operator.getitem, joined, place) for place in range(3)]
            state = [ring.replaced(pieces, visit.queries, piece) for pieces, piece in zip(state, block, strict=True)]
        if following is not None:
            key, value = following
    return [ring.whole(pieces, dim) for pieces, dim in zip(state, (-2, -1, -1), strict=True)]


# -- the operator that ends a ring -----------------------------------------------------------------------------------------------------

torch.library.define(
    "partitioner::finish_attention",
    "(Tensor result, Tensor totals, Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, bool is_zigzag, float scale, "
    "int n_queries, int n_keys, str over, int count) -> Tensor",
)

finish_attention = torch.ops.partitioner.finish_attention.default
"""Round the result of a ring to the dtype of its operands. The backward is that of the whole ring.

``totals``: ``row_totals`` of the rows; the other arguments are those of ``_Ring``.
"""

RING_STATE = (row_totals, finish_attention)
"""Values of a ring's forward that its backward reads: recomputing them would send the blocks round once more."""


def _finish(result: Tensor, _totals: Tensor, query: Tensor, *_rest: Any) -> Tensor:
    return result.to(query.dtype, copy=True)


def _fake_finish(result: Tensor, _totals: Tensor, query: Tensor, *_rest: Any) -> Tensor:
    return query.new_empty(result.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, totals, query, key, value, mask, *ctx.rest = inputs
    ctx.save_for_backward(output, totals, query, key, value, mask)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of queries, keys and values."""
    result, totals, query, key, value, mask = ctx.saved_tensors

    def call(function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a function; mark halo exchanges as communication of a gradient."""
        if function is not halo_exchange:
            return function(*arguments, **keywords)
        with annotate({GRADIENT: True}):
            return function(*arguments, **keywords)

    ring = _Ring(call, lambda tensor: tensor, mask, *ctx.rest)
    rows = (ring.pieces(grad), ring.pieces(result), ring.pieces(totals))
    return (None, None, *_gradients(ring, rows, query, key, value), None, *(None for _ in ctx.rest))


def _gradients(
    ring: _Ring, of_rows: tuple[list[Tensor], list[Tensor], list[Tensor]], query: Tensor, own_key: Tensor, own_value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, own keys and own values: of others' blocks first, whose gradients so come home at the end.

    Args:
        of_rows: the pieces of gradient and result, and of tops and totals.
    """
    queries = ring.pieces(query)
    of_query, of_key, of_value = (_zeros(ring, each, is_precise=each is query) for each in (query, own_key, own_value))
    key, value = own_key, own_value
    for step in (*range(1, ring.count), 0):
        key, value = (ring.rotated(key), ring.rotated(value)) if step else (own_key, own_value)
        if step != 1:
            of_key, of_value = (ring.pieces(ring.rotated(ring.whole(pieces, -2))) for pieces in (of_key, of_value))
        keys, values = ring.pieces(key), ring.pieces(value)
        for visit in ring.visits(own_key, step):
            rows, block = visit.queries, visit.keys
            grad, result, totals = (ring.of(pieces, rows) for pieces in of_rows)
            top, total = totals.unbind(-1)
            if visit.counts is not None:
                top = torch.where(visit.counts, top, math.inf)
            operands = (ring.of(queries, rows), ring.of(keys, block), ring.of(values, block))
            added = attention_block_backward(grad, result, top, total, *operands, visit.mask, visit.is_causal, ring.scale)
            of_query = ring.replaced(of_query, rows, ring.of(of_query, rows) + added[0])
            of_key = ring.replaced(of_key, block, ring.of(of_key, block) + added[1])
            of_value = ring.replaced(of_value, block, ring.of(of_value, block) + added[2])
    return ring.whole(of_query, -2).to(query.dtype), ring.whole(of_key, -2), ring.whole(of_value, -2)


def _zeros(ring: _Ring, x: Tensor, *, is_precise: bool) -> list[Tensor]:
    """Return zeros for each piece; in the dtype of sums over blocks if they stay on this rank."""
    dtype = torch.promote_types(x.dtype, torch.float32) if is_precise else x.dtype
    return [torch.zeros(piece.shape, dtype=dtype, device=piece.device) for piece in ring.pieces(x)]


torch.library.impl(finish_attention.name(), "CompositeExplicitAutograd", _finish)
torch.library.register_fake(finish_attention.name(), _fake_finish)
torch.library.register_autograd(finish_attention.name(), _backward, setup_context=_setup_context)
