"""How many tokens each expert of a mixture computed, from what the ranks of a recorded run saw."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from passes.ir.mesh import Mesh

__all__ = ["Chosen", "ExpertLoad", "expert_loads", "expert_table"]


@dataclass(frozen=True)
class Chosen:
    """One rank's part of a mixture.

    Attributes:
        mixture: its name in the model.
        counts: number of tokens of each expert that the rank has.
        cuts: (name of a mesh dimension, its size, what it cuts), outermost first (``passes.rules.ops.grouped_mm.PRODUCT_CUTS``).
    """

    mixture: str
    counts: tuple[int, ...]
    cuts: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class ExpertLoad:
    """The load of the experts of one mixture, of all ranks together.

    Attributes:
        module: that has the experts; a second mixture of one module, or a second call of it, has a number: ``"mlp (2)"``.
        tokens: number of tokens of each expert; a token that chose two experts counts for both.
    """

    module: str
    tokens: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """How many times more tokens the busiest expert had than the mean one: 1 if all had as many."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens) if any(self.tokens) else 1.0


def expert_loads(chosen: Mapping[int, Iterable[Chosen]], mesh: Mesh) -> tuple[ExpertLoad, ...]:
    """Add up what the ranks computed: tokens of ranks that share the batch, and experts of ranks that share these, once each.

    Args:
        chosen: rank -> what it computed.
        mesh: of the plan.
    """
    by_place: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for rank, of_rank in sorted(chosen.items()):
        coordinate = mesh.coordinate(rank)
        for each in of_rank:
            if any(cut == "nothing" and coordinate[name] for name, _, cut in each.cuts):
                continue
            place = tuple(coordinate[name] for name, _, cut in each.cuts if cut == "experts")
            counts = by_place.setdefault(each.mixture, {}).setdefault(place, [0] * len(each.counts))
            counts[:] = [one + other for one, other in zip(counts, each.counts, strict=True)]
    return tuple(
        ExpertLoad(module, tuple(itertools.chain.from_iterable(places[place] for place in sorted(places))))
        for module, places in by_place.items()
    )


def expert_table(loads: Iterable[ExpertLoad]) -> str:
    """Format the loads as a table: a line a mixture."""
    rows: list[tuple[str, ...]] = [("mixture", "experts", "tokens", "mean", "least", "most", "most / mean")]
    for load in loads:
        mean = sum(load.tokens) / len(load.tokens)
        counts = (len(load.tokens), sum(load.tokens), f"{mean:.1f}", min(load.tokens), max(load.tokens), f"{load.imbalance:.2f}")
        rows.append((load.module or "the model itself", *map(str, counts)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    numbers = [[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)] for row in rows]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *cells]) for row, cells in zip(rows, numbers, strict=True))
