"""Two texts side by side, with what they share left out: two ranks' programs, two plans.

        class Rank0TrainStep(torch.nn.Module):       |      class Rank1TrainStep(torch.nn.Module):
        ... 12 lines alike
        keep_first_mb0 = p_last_bias                 <
                                                     >      keep_first_mb0 = torch.zeros_like(p_last_bias)

``|`` stands between lines that differ, ``<`` and ``>`` beside those of one side alone.
"""

from __future__ import annotations

import difflib
import html
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cost_models.hardware.units import format_bytes, format_flops, format_seconds
from partitioner.planner.search.describe import recomputed_regions
from partitioner.reports.module_names import module_range, rank_list
from passes.ir.mesh import mesh_words
from passes.ir.plan import Plan

__all__ = ["Difference", "Pair", "difference_of", "plan_lines"]

_CONTEXT = 2
"""Equal lines that are shown around a difference."""


_STYLE = """
.difference td { text-align: left; white-space: pre-wrap }
.difference mark { background: #f4c95d66; color: inherit }
"""


@dataclass(frozen=True)
class Pair:
    """Two lines side by side; None stands for a line that only the other text has."""

    left: str | None
    right: str | None

    @property
    def mark(self) -> str:
        """``"|"`` between lines that differ, ``"<"`` or ``">"`` beside a line of one text alone, ``" "`` between equal lines."""
        if self.left is None:
            return ">"
        if self.right is None:
            return "<"
        return " " if self.left == self.right else "|"


@dataclass(frozen=True)
class Difference:
    """Two texts, line by line; true if they differ. It prints for a terminal, and notebooks show the HTML.

    Attributes:
        pairs: all lines, in order.
    """

    pairs: tuple[Pair, ...]

    def __bool__(self) -> bool:
        return any(pair.mark != " " for pair in self.pairs)

    def text(self, width: int = 160) -> str:
        """Return the two texts as columns for a terminal.

        Args:
            width: letters of a line. Longer lines are truncated so that their first difference remains visible.
        """
        if not self:
            return "no difference"
        column = (width - 3) // 2
        lines = []
        for item in self._abridged():
            if isinstance(item, int):
                lines.append(f"... {item} line{'s' if item > 1 else ''} alike")
            else:
                left, right = _truncate_pair(item, column)
                lines.append(f"{left:<{column}} {item.mark} {right}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def html(self) -> str:
        """Return the two texts as an HTML table, letters that differ inside a line highlighted."""
        rows = []
        for item in self._abridged():
            if isinstance(item, int):
                rows.append(f'<tr class="alike"><td colspan="2">{item} lines alike</td></tr>')
            else:
                kind = "same" if item.mark == " " else "differs"
                cells = "".join(f"<td><code>{side}</code></td>" for side in _highlight_pair(item))
                rows.append(f'<tr class="{kind}">{cells}</tr>')
        return f'<table class="difference">{"".join(rows)}</table>'

    def _repr_html_(self) -> str:
        return f"<style>{_STYLE}</style>{self.html()}"

    def _abridged(self) -> Iterator[Pair | int]:
        """Yield the lines around differences; in place of the equal lines between them, yield their number."""
        differing = [index for index, pair in enumerate(self.pairs) if pair.mark != " "]
        near = {other for index in differing for other in range(index - _CONTEXT, index + _CONTEXT + 1)}
        for is_near, group in itertools.groupby(enumerate(self.pairs), lambda item: item[0] in near):
            pairs = [pair for _, pair in group]
            if is_near or len(pairs) == 1:
                yield from pairs
            else:
                yield len(pairs)


def difference_of(left: Sequence[str], right: Sequence[str]) -> Difference:
    """Align the lines of two texts by their longest matching blocks (``difflib``)."""
    pairs: list[Pair] = []
    for kind, start, end, other_start, other_end in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if kind == "equal":
            pairs += [Pair(line, line) for line in left[start:end]]
        else:
            pairs += [Pair(*lines) for lines in itertools.zip_longest(left[start:end], right[other_start:other_end])]
    return Difference(tuple(pairs))


def _truncate_pair(pair: Pair, width: int) -> tuple[str, str]:
    """Return both lines in at most ``width`` letters each, from the same letter on, so that their first difference is visible."""
    left, right = pair.left or "", pair.right or ""
    equal = (letter == other for letter, other in zip(left, right, strict=False))
    common = len(list(itertools.takewhile(bool, equal)))
    start = max(0, common - width // 2) if pair.mark == "|" and common > width - 12 else 0
    return _truncate(left, start, width), _truncate(right, start, width)


def _truncate(line: str, start: int, width: int) -> str:
    shown = line[start:] if not start else f"…{line[start + 1 :]}"
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"


def _highlight_pair(pair: Pair) -> tuple[str, str]:
    """Return both lines as HTML, the letters that differ in ``<mark>``."""
    left, right = pair.left or "", pair.right or ""
    if pair.mark != "|":
        return html.escape(left), html.escape(right)
    sides: tuple[list[str], list[str]] = ([], [])
    for kind, start, end, other_start, other_end in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for side, text in zip(sides, (left[start:end], right[other_start:other_end]), strict=True):
            side.append(html.escape(text) if kind == "equal" or not text else f"<mark>{html.escape(text)}</mark>")
    return "".join(sides[0]), "".join(sides[1])


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan as lines, one decision or prediction each, so that two plans can be compared."""
    lines = [
        f"mesh          {mesh_words(plan.grid, plan.replicas)}",
        f"devices       {', '.join(plan.devices)}",
        f"axes          {', '.join(f'{axis} over {over}' for axis, over in plan.axes) or 'none is cut'}",
        f"schedule      {plan.schedule}",
        f"batch         {plan.batch_size}",
        f"microbatches  {plan.n_microbatches}",
        f"recompute     {recomputed_regions(plan) or plan.recompute}",
        *([f"sums in       {plan.reduce_dtype}"] if plan.reduce_dtype else []),
        f"step time     {format_seconds(plan.step_time)}",
        f"bound by      {plan.prediction.bound_by}",
    ]
    for index, stage in enumerate(plan.stages):
        lines += [
            f"stage {index}       {rank_list(stage.ranks)}, {module_range(stage.modules)}",
            f"  parameters  {stage.parameter_count:,}, {format_bytes(stage.parameter_bytes)}",
            f"  forward     {format_flops(stage.flops)}, {format_seconds(stage.forward_time)}, sends {format_bytes(stage.send_bytes)}",
            f"  backward    {format_seconds(stage.backward_time)}, keeps {format_bytes(stage.activation_bytes)}",
        ]
    lines += [f"peak memory   rank {rank}: {format_bytes(peak)}" for rank, peak in enumerate(plan.memory)]
    return lines + [f"note          {note}" for note in plan.notes]
