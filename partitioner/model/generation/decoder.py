"""Decode with a partitioned model: programs of a chunk of tokens, and the cache of keys and values that they extend.

    prompt of 11 tokens          chunk 0..15 (5 of them unused)        cache of 64 positions
    each further token           chunk of one

One program serves all chunks of one size for caches of one length. Sizes and lengths are powers of two, so that few programs serve all
prompts; a cache that is full is copied into a longer one. Each rank holds its own part of the cache: the heads of its attention, the
layers of its stages, the rows of its batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from partitioner.model.calls import Calls
from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.generation.cached_forward import cached_tensors, trace_cached_forward
from partitioner.model.generation.same_weights import lower_with_weights, plan_with_weights
from partitioner.model.generation.static_cache_check import check_static_cache
from partitioner.runtime.arguments import BoundInputs
from partitioner.runtime.executor import ProgramSet
from partitioner.runtime.state.parameters import check_values
from partitioner.specialize.arguments import TracedArguments
from partitioner.specialize.programs import Programs
from partitioner.specialize.request import Request
from partitioner.specialize.trace import Trace
from partitioner.specialize.transfer import stored_as_in
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.ir.program import at_batch
from passes.spmd.shard_stages import StoredLayouts

_SHORTEST_CACHE = 64
_LONGEST_CHUNK = 512
_LENGTH_DIMENSION = 2


@dataclass(frozen=True)
class _Programs:
    """The programs of one chunk size and one cache length."""

    graph: ModelGraph
    plan: Plan
    table: Programs
    calls: Calls


@dataclass
class Decoding:
    """One batch of sequences that are decoded together.

    Attributes:
        length: positions of the cache.
        caches: rank of this process -> placeholder -> its part of keys or values.
        used: positions that hold a token, or padding before one.
    """

    length: int
    caches: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    used: int = 0


class Decoder:
    """Lowers and runs the forwards that decode.

    Args:
        trace: of the partitioned model, whose tensors the programs read.
        limit: the most positions that the model takes; None: any number.
    """

    def __init__(self, trace: Trace, limit: int | None) -> None:
        self._trace = trace
        self.limit = limit
        with trace.tracing.structure.restored():
            self._layers = cached_tensors(trace.original, trace.graph.autocast)
        self._programs: dict[tuple[int, int], _Programs] = {}
        self._checked: set[int] = set()  # lengths of caches
        self._stored: StoredLayouts | None = None

    @property
    def n_row_parts(self) -> int:
        """Into how many parts the mesh cuts the batch."""
        return self._trace.programs.rows.count

    def begin(self, length: int) -> Decoding:
        """Return an empty cache for sequences of so many tokens; one that is too short grows."""
        check_values(self._trace.state)
        self._trace.state.refresh()
        return Decoding(self._cache_length(length))

    def _cache_length(self, length: int) -> int:
        """Return a power of two that is long enough, or the most positions of the model."""
        padded = max(_SHORTEST_CACHE, 1 << (length - 1).bit_length())
        return padded if self.limit is None else min(padded, self.limit)

    def extend(self, decoding: Decoding, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """Run the forward of further tokens; return the logits of the last one, (batch, 1, vocabulary), on every rank.

        Args:
            input_ids: (batch, tokens).
            attention_mask: (batch, tokens up to here), 0 for padding.
            position_ids: (batch, tokens).
        """
        end = decoding.used + input_ids.shape[1]
        if end > decoding.length:
            self._grow(decoding, end)
        logits: Tensor | None = None
        first = decoding.used
        for start, count, size in _chunks(first, end, decoding.length):
            columns = slice(start - first, start - first + count)
            ids, positions = (_padded(tensor[:, columns], size) for tensor in (input_ids, position_ids))
            logits = self._run(decoding, ids, attention_mask, positions, start, count)
            decoding.used = start + count
        assert logits is not None
        return logits

    def _run(self, decoding: Decoding, ids: Tensor, attention_mask: Tensor, positions: Tensor, start: int, count: int) -> Tensor:
        """Run one chunk, of which ``count`` tokens count; return the logits."""
        batch, size = ids.shape
        programs = self._programs_for(size, decoding.length)
        mask = attention_mask.new_ones(batch, decoding.length)  # of later positions: the model leaves them out, as they are in the future
        mask[:, : min(attention_mask.shape[1], start + count)] = attention_mask[:, : start + count]
        places = torch.arange(start, start + size, device=ids.device)
        last = torch.tensor([count - 1], device=ids.device)
        leaves = (leaf.placeholder for leaf in programs.graph.inputs if not leaf.resident)
        tensors = dict(zip(leaves, (ids, mask, positions, places, last), strict=True))
        request = programs.table.request(batch)
        sharded = programs.table.sharded(request)
        if not decoding.caches:
            decoding.caches = {rank: dict(self._empty(programs.table, request, rank, batch)) for rank in self._trace.runtime.local_ranks}
        inputs = BoundInputs({name: tensor for name, tensor in tensors.items() if name is not None}, batch, frozenset(), {})
        results = programs.calls.run(sharded, programs.table.get(request), inputs, decoding.caches)
        (logits,) = results[self._trace.runtime.local_ranks[0]]
        assert isinstance(logits, Tensor)
        return logits

    def _empty(self, table: Programs, request: Request, rank: int, batch: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a rank's part of each tensor of the cache that its stages extend, all zeros."""
        device = self._trace.runtime.devices[rank]
        sharded = table.sharded(request)
        graph, read = sharded.part(rank), table.get(replace(request, n_microbatches=1)).programs[rank].placeholders
        values = {node.name: node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"}
        for name in graph.resident:
            if name in read:
                shape = [at_batch(size_of(size), batch // sharded.rows.count) for size in values[name].shape]
                yield name, torch.zeros(shape, dtype=values[name].dtype, device=device)

    def _grow(self, decoding: Decoding, length: int) -> None:
        """Copy the cache into a longer one."""
        decoding.length = self._cache_length(length)
        for tensors in decoding.caches.values():
            for name, tensor in tensors.items():
                shape = list(tensor.shape)
                shape[_LENGTH_DIMENSION] = decoding.length
                tensors[name] = tensor.new_zeros(shape)
                tensors[name].narrow(_LENGTH_DIMENSION, 0, tensor.shape[_LENGTH_DIMENSION]).copy_(tensor)

    def reorder(self, decoding: Decoding, rows: Tensor) -> None:
        """Let row ``i`` of the cache become the present row ``rows[i]``."""
        for tensors in decoding.caches.values():
            for name, tensor in tensors.items():
                tensors[name] = tensor.index_select(0, rows.to(tensor.device))

    # -- programs ------------------------------------------------------------------------------------------------------------------

    def forwards(self, start: int, end: int, length: int, batch: int) -> Iterator[ProgramSet]:
        """Yield the programs that extend caches for ``length`` tokens from ``start`` to ``end`` tokens, in the order in which they run.

        Args:
            batch: rows.
        """
        positions = self._cache_length(length)
        for _, _, size in _chunks(start, end, positions):
            table = self._programs_for(size, positions).table
            yield table.get(table.request(batch))

    def _programs_for(self, size: int, length: int) -> _Programs:
        """Return the programs of a chunk size and a cache length, lowered when first used."""
        if (size, length) not in self._programs:
            self._programs[size, length] = self._lower(size, length)
        return self._programs[size, length]

    def _lower(self, size: int, length: int) -> _Programs:
        trace = self._trace
        inputs = trace.programs.rows.inputs
        batch = 3 * self.n_row_parts  # no power of two, as chunks and caches are

        def traced_for(rows: int | None) -> ModelGraph:
            with trace.tracing.structure.restored():
                return trace_cached_forward(trace.original, self._layers, batch, size, length, trace.graph.autocast, rows)

        if length not in self._checked:
            with trace.tracing.structure.restored():
                check_static_cache(trace.original, length, trace.graph.autocast)
            self._checked.add(length)
        graph = traced_for(None)
        first = trace.programs.sharded(trace.programs.request(trace.plan.batch_size))
        plan = plan_with_weights(graph, first, trace.plan)
        stored = stored_as_in(trace.cuts.plan_cut, trace.graph, graph) if self._stored is None else self._stored
        table = lower_with_weights(graph, plan, stored, trace, traced_for, inputs)
        if self._stored is None:  # all programs then keep the cache in the layout of the first
            self._stored = table.sharded(table.request(batch)).cut.stored
        arguments, left = TracedArguments(trace.original, graph, trace.dtype), LeftAttributes(trace.original)
        calls = Calls(arguments, graph, trace.runtime, trace.state, table.rows, left, trace.dtype)
        return _Programs(graph, plan, table, calls)


def _chunks(start: int, end: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield first position, tokens and size of the chunks of some positions; sizes are powers of two, and end in the cache.

    >>> list(_chunks(0, 11, 64)), list(_chunks(0, 11, 11))
    ([(0, 11, 16)], [(0, 8, 8), (8, 2, 2), (10, 1, 1)])
    """
    while start < end:
        size = min(_LONGEST_CHUNK, 1 << (end - start - 1).bit_length())
        while start + size > length:
            size //= 2
        count = min(size, end - start)
        yield start, count, size
        start += count


def _padded(tensor: Tensor, size: int) -> Tensor:
    """Return (batch, tokens) with the last token repeated up to a number of tokens."""
    missing = size - tensor.shape[1]
    return torch.cat([tensor, tensor[:, -1:].expand(-1, missing)], 1) if missing > 0 else tensor
