"""Choose an owner rank for each sharded parameter, and list the messages of an optimizer step that updates parameters whole.

weight, rows over ranks 0 and 1, owned by rank 1:

    rank 0    gradient and value of rows 0 to 31 ──>  rank 1 updates all 64 rows
    rank 0    <── new rows 0 to 31                    rank 1

Owners are among the ranks that hold a part, so stages of a pipeline keep their parameters. Equal parts on several ranks (replicas) are
gathered from one of them, and sent back to each.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from partitioner.runtime.collectives.transfers import Transfer
from passes.spmd.shards import Block

What = Literal["gradient", "value", "update"]
"""The contents of a message: a part of the gradient or the value, to the owner; or of the new value, from it."""


@dataclass(frozen=True)
class OwnerMessage(Transfer):
    """A message between the owner of a parameter and a rank that holds a part of it."""

    name: str
    what: What
    block: Block


@dataclass(frozen=True)
class Sharded:
    """A sharded parameter of an optimizer.

    Attributes:
        name: of the model's parameter.
        dtype: of it.
        holders: rank -> the block that it holds.
        cost: of an update of the whole, see ``update_cost``.
    """

    name: str
    dtype: torch.dtype
    holders: Mapping[int, Block]
    cost: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return next(iter(self.holders.values())).shape

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OwnedParameter(Sharded):
    """A sharded parameter with its owner.

    Attributes:
        owner: the rank that updates the whole, and has its state.
        sources: each distinct block, with the rank that the owner gets it from.
    """

    owner: int
    sources: tuple[tuple[Block, int], ...]

    def gathered(self, what: What) -> Iterator[OwnerMessage]:
        """Yield the messages that bring a gradient or a value to the owner."""
        for block, source in self.sources:
            if source != self.owner:
                yield OwnerMessage(source, self.owner, block.part, self.dtype, self.name, what, block)

    def scattered(self) -> Iterator[OwnerMessage]:
        """Yield the messages that bring the new value from the owner to all ranks that hold a part."""
        for rank, block in sorted(self.holders.items(), key=lambda item: item[0]):
            if rank != self.owner:
                yield OwnerMessage(self.owner, rank, block.part, self.dtype, self.name, "update", block)


@dataclass(frozen=True)
class OwnerPlan:
    """Owner ranks of parameters, and communication of a step.

    ``print(plan)`` is a table of the ranks.

    Attributes:
        parameters: the sharded parameters, in the order of the model.
        n_ranks: of the model's plan.
        n_flags: parameters of which each step compares whether they have a gradient on all ranks; see ``flag_bytes``.
    """

    parameters: tuple[OwnedParameter, ...]
    n_ranks: int
    n_flags: int

    @property
    def owners(self) -> dict[str, int]:
        """Parameter -> the rank that updates it."""
        return {parameter.name: parameter.owner for parameter in self.parameters}

    def restricted_to(self, names: Iterable[str]) -> OwnerPlan:
        """Return the plan of a step in which only these parameters have a gradient."""
        chosen = frozenset(names)
        return OwnerPlan(tuple(each for each in self.parameters if each.name in chosen), self.n_ranks, self.n_flags)

    def gathered(self, *kinds: What) -> list[OwnerMessage]:
        """Return the messages to the owners, parameter after parameter."""
        return [message for parameter in self.parameters for what in kinds for message in parameter.gathered(what)]

    def scattered(self) -> list[OwnerMessage]:
        """Return the messages from the owners."""
        return [message for parameter in self.parameters for message in parameter.scattered()]

    @property
    def messages(self) -> list[OwnerMessage]:
        """All messages of a step: gradients and values to the owners, new values from them."""
        return [*self.gathered("gradient", "value"), *self.scattered()]

    @property
    def bytes_between(self) -> dict[tuple[int, int], int]:
        """(source, destination) -> bytes of a step."""
        total: Counter[tuple[int, int]] = Counter()
        for message in self.messages:
            total[message.source, message.destination] += message.n_bytes
        return dict(total)

    @property
    def flag_bytes(self) -> int:
        """Bytes of the vector that every step reduces over all ranks: of two flags a parameter, has and lacks a gradient."""
        return 2 * self.n_flags

    @property
    def total_bytes(self) -> int:
        """Bytes of all messages of a step."""
        return sum(self.bytes_between.values())

    def sent(self, rank: int) -> int:
        """Return the bytes that a rank sends in a step."""
        return sum(size for (source, _), size in self.bytes_between.items() if source == rank)

    def received(self, rank: int) -> int:
        """Return the bytes that a rank receives in a step."""
        return sum(size for (_, destination), size in self.bytes_between.items() if destination == rank)

    def cost(self, rank: int) -> float:
        """Return the cost of the updates of a rank; see ``update_cost``."""
        return sum(parameter.cost for parameter in self.parameters if parameter.owner == rank)

    def whole_bytes(self, rank: int) -> int:
        """Return the bytes of the parameters that a rank owns: it holds whole values, and whole gradients in a step."""
        return sum(parameter.n_bytes for parameter in self.parameters if parameter.owner == rank)

    @property
    def imbalance(self) -> float:
        """The largest cost of a rank over the mean of the ranks that hold any of these parameters; 1.0 is perfect balance."""
        holders = sorted({rank for parameter in self.parameters for rank in parameter.holders})
        costs = [self.cost(rank) for rank in holders]
        return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0

    def __str__(self) -> str:
        total = sum(parameter.cost for parameter in self.parameters)
        rows: list[tuple[str, ...]] = [("rank", "owns", "bytes owned", "share of the work", "bytes sent", "bytes received")]
        for rank in range(self.n_ranks):
            share = f"{self.cost(rank) / total:.1%}" if total else "-"
            count = sum(parameter.owner == rank for parameter in self.parameters)
            counts = (rank, count, self.whole_bytes(rank))
            rows.append((*(f"{each:,}" for each in counts), share, f"{self.sent(rank):,}", f"{self.received(rank):,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(
            [
                f"{len(self.parameters)} sharded parameters, each updated whole by its owner; {self.total_bytes:,} bytes a step",
                *lines,
                f"largest share over the mean: {self.imbalance:.2f}",
            ]
        )


def update_cost(shape: Sequence[int], *, linear: bool) -> float:
    """Return the operations of an update of a parameter, up to a factor: the products of a matrix with its Gram matrix.

    Args:
        shape: of the parameter; dimensions after the first count as columns.
        linear: whether an update reads each element a fixed number of times (Adafactor): then its elements.
    """
    elements = math.prod(shape)
    if linear or len(shape) < 2 or not elements:
        return float(elements)
    return float(elements * min(shape[0], elements // shape[0]))


def choose_owners(parameters: Sequence[Sharded], before: OwnerPlan | None, n_ranks: int) -> OwnerPlan:
    """Return a plan with these parameters, the most expensive assigned first, each to the rank with the least work that holds a part.

    Args:
        parameters: to be assigned.
        before: a plan that keeps its owners, and to which the parameters are added.
    """
    old = before.parameters if before is not None else ()
    work: defaultdict[int, float] = defaultdict(float)
    owned_bytes, sent = Counter[int](), Counter[int]()
    for kept in old:
        work[kept.owner] += kept.cost
        owned_bytes[kept.owner] += kept.n_bytes
    assigned: dict[str, OwnedParameter] = {}
    for parameter in sorted(parameters, key=lambda each: -each.cost):
        owner = min(parameter.holders, key=lambda rank: (work[rank], owned_bytes[rank], rank))
        work[owner] += parameter.cost
        owned_bytes[owner] += parameter.n_bytes
        sources = _sources(parameter, owner, sent)
        assigned[parameter.name] = OwnedParameter(parameter.name, parameter.dtype, parameter.holders, parameter.cost, owner, sources)
    return OwnerPlan((*old, *(assigned[each.name] for each in parameters)), n_ranks, len(old) + len(parameters))


def _sources(parameter: Sharded, owner: int, sent: Counter[int]) -> tuple[tuple[Block, int], ...]:
    """Return each distinct block with the rank that sends it: the owner if it has it, else the holder that has sent least so far."""
    own = parameter.holders[owner]
    if own.is_whole:
        return ((own, owner),)
    ranks_of: dict[Block, list[int]] = {}
    for rank, block in sorted(parameter.holders.items(), key=lambda item: item[0]):
        ranks_of.setdefault(block, []).append(rank)
    sources = []
    for block, ranks in ranks_of.items():
        source = owner if block == own else min(ranks, key=lambda rank: (sent[rank], rank))
        if source != owner:
            sent[source] += math.prod(block.part) * parameter.dtype.itemsize
        sources.append((block, source))
    return tuple(sources)
