"""Tables of the answers: one for a case, and the page "which mesh for which model"."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.advice.cases import Case
from cost_models.hardware.units import format_bytes, format_seconds
from partitioner.experiments.results.row import Row

__all__ = ["gallery", "ratio", "row_table"]

_PAGE = """# Which mesh for which model

What `mode="auto"` chooses for models that people train, beside meshes that people type for them. Every step is simulated from the emitted
programs. `python -m benchmarks.advice --gallery docs/which-mesh.md` writes this page.

"""


def ratio(rows: Sequence[Row]) -> float:
    """Return the step of ``"auto"``, the first row, relative to the best of the others; infinite if it has none."""
    chosen, *typed = rows
    steps = [row.step_time for row in typed if row.step_time is not None]
    return float("inf") if chosen.step_time is None or not steps else chosen.step_time / min(steps)


def row_table(rows: Sequence[Row]) -> str:
    """Return a line for each row: its mesh, step, rates, memory and how long its plan took."""
    lines = [f"{'mode':34s}{'step':>10s}{'planned':>10s}{'MFU':>7s}{'peak':>10s}{'found in':>10s}  schedule, microbatches, recompute"]
    for row in rows:
        if row.step_time is None or row.peak_memory is None or row.planned_step_time is None:
            lines.append(f"{row.mode:34s}{'-':>10s}{'':>27s}{row.seconds:8.0f} s  {row.reason.splitlines()[0][:70]}")
            continue
        mode = f"auto: {row.mesh}" if row.mode == "auto" else row.mode
        mfu = f"{row.mfu:.0%}" if row.mfu is not None else ""
        steps = f"{format_seconds(row.step_time):>10s}{format_seconds(row.planned_step_time):>10s}"
        how = f"{row.schedule}, {row.n_microbatches}, {row.recompute}"
        lines.append(f"{mode:34s}{steps}{mfu:>7s}{format_bytes(row.peak_memory):>10s}{row.seconds:8.0f} s  {how}")
    return "\n".join([*lines, f"auto / best by hand: {ratio(rows):.3f}"])


def gallery(answers: Sequence[tuple[Case, Sequence[Row]]]) -> str:
    """Return the page: a table of all cases, then a section a case."""
    lines = [
        "| model, batch | cluster | mesh | step | MFU | memory | best by hand | ratio | searched in |",
        "|---|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for case, rows in answers:
        chosen, typed = rows[0], [row for row in rows[1:] if row.step_time is not None]
        assert chosen.step_time is not None
        assert chosen.peak_memory is not None
        best = min(typed, key=lambda row: row.step_time or 0.0)
        assert best.step_time is not None
        cells = [
            case.name,
            case.cluster,
            chosen.mesh,
            format_seconds(chosen.step_time),
            "" if chosen.mfu is None else f"{chosen.mfu:.0%}",
            format_bytes(chosen.peak_memory),
            f"{best.mesh}, {format_seconds(best.step_time)}",
            f"{ratio(rows):.2f}",
            f"{chosen.seconds:.0f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    sections = [f"## {case.name} on {case.cluster}\n\n{_reason(rows[0])}\n\n```text\n{row_table(rows)}\n```" for case, rows in answers]
    return _PAGE + "\n".join(lines) + "\n\n" + "\n\n".join(sections) + "\n"


def _reason(chosen: Row) -> str:
    """Return why a plan was chosen, in a sentence."""
    return f"`{chosen.mesh}`: bound by {chosen.bound_by}; next: {chosen.runner_up}."
