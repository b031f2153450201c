"""The report of a check, as a value and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.reports.check.compare import Comparison
from partitioner.reports.tables.table import align
from passes.ir.errors import Place

_SHOWN = 5
"""How many differing values of a part are listed."""


@dataclass(frozen=True)
class Part:
    """Comparisons of one kind.

    Attributes:
        name: ``"outputs"``, ``"gradients, train_step"``.
        comparisons: one a tensor; gradients in the order of the backward.
    """

    name: str
    comparisons: tuple[Comparison, ...]

    @property
    def differing(self) -> tuple[Comparison, ...]:
        """The comparisons whose tensors differ."""
        return tuple(comparison for comparison in self.comparisons if not comparison.equal)


@dataclass(frozen=True)
class Difference:
    """The first value that differs.

    Attributes:
        node: the name of the node that computes it, the same in the model's graph, the stages' graphs and messages.
        place: module, operation and source line.
        stage: the stage that computes it.
        rank: the rank that runs the stage.
        comparison: by how much it differs.
        cause: why it differs, in one sentence; empty if that is not known.
    """

    node: str
    place: Place
    stage: int
    rank: int
    comparison: Comparison
    cause: str = ""

    def lines(self) -> list[str]:
        """Return a line for each known fact: ``"  module      blocks.0.up"``."""
        pairs = [
            ("module", self.place.module or "(the model itself)"),
            ("operation", self.place.operation),
            ("source", self.place.source),
            ("computed by", f"stage {self.stage} on rank {self.rank}"),
            ("difference", str(self.comparison)),
            ("cause", self.cause),
        ]
        return [f"  {name:<11} {text}" for name, text in pairs if text]


@dataclass(frozen=True)
class CheckReport:
    """The result of ``PartitionedModel.check``. True if something was compared and all of it is equal up to rounding.

    Attributes:
        title: the two compared models.
        parts: comparisons by kind, in the order in which they were made.
        first_value: the first node whose value differs, in the order of the graph.
        first_gradient: the node that reads the first parameter or input whose gradient differs, in the order of the backward.
        notes: differences by definition, and values that could not be compared, with the reason.
    """

    title: str
    parts: tuple[Part, ...]
    first_value: Difference | None
    first_gradient: Difference | None
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        compared = any(part.comparisons for part in self.parts)
        return compared and self.first_value is None and not any(part.differing for part in self.parts)

    def __str__(self) -> str:
        lines = [self.title, "", *_summary_table(self.parts)]
        if self.first_value is not None:
            lines += ["", f"the first value that differs, in the order of the graph, is {self.first_value.node}", *self.first_value.lines()]
        else:
            lines += [line for part in self.parts for line in _differing_lines(part)]
            if self.first_gradient is not None:
                what = f"the first gradient that differs, in the order of the backward, is that of {self.first_gradient.node}"
                lines += ["", what, *self.first_gradient.lines()]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        if self:
            return "EQUAL: the partitioned model computes what the original computes"
        if any(part.comparisons for part in self.parts):
            return "DIFFERENT: the partitioned model does not compute what the original computes"
        return "NOT COMPARED: see the notes"


def _differing_lines(part: Part) -> list[str]:
    """List the first differing tensors of a part below a heading; no lines if none differs."""
    listed = part.differing[:_SHOWN]
    n_unlisted = len(part.differing) - len(listed)
    heading = ["", f"{part.name}: {len(part.differing)} differ"] if listed else []
    return [*heading, *(f"  {comparison}" for comparison in listed), *([f"  and {n_unlisted} more"] if n_unlisted else [])]


def _summary_table(parts: Sequence[Part]) -> list[str]:
    """Return a table with a row for each part that has comparisons: their number, the largest error, the largest value, the verdict."""
    rows = [("compared", "tensors", "largest error", "of values up to", "")]
    for part in parts:
        worst = max(part.comparisons, key=lambda comparison: comparison.error, default=None)
        if worst is None:
            continue
        largest = max(comparison.largest for comparison in part.comparisons)
        verdict = f"{len(part.differing)} differ" if part.differing else "equal"
        rows.append((part.name, str(len(part.comparisons)), f"{worst.error:.1e}", f"{largest:.1e}", verdict))
    return align(rows, "<>>><")
