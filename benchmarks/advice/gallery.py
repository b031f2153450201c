"""Tables of the answers: one for a case, and the page "which mesh for which model"."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.advice.cases import Case
from cost_models.hardware.units import format_bytes, format_seconds
from partitioner.experiments.results.row import Row

_PAGE = """# Which mesh for which model

The plans of `mode="auto"` for models that people train, beside meshes typed by hand. Every step is simulated from the emitted programs. A
ratio of 1.00 says that no mesh by hand has a shorter step. Planning and simulating took the seconds of one core in the last column.
`python -m benchmarks.advice --gallery docs/which-mesh.md` writes this page.

"""


def ratio(rows: Sequence[Row]) -> float:
    """Return the step of ``"auto"``, the first row, relative to the best of the others: 1 if none of them fits, infinite if it does not."""
    chosen, *typed = rows
    steps = [row.step_time for row in typed if row.step_time is not None]
    if chosen.step_time is None:
        return float("inf")
    return chosen.step_time / min(steps, default=chosen.step_time)


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
    heads = ("model, batch", "cluster", "mesh", "step", "MFU", "memory", "best by hand", "ratio", "found in")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---:|---:|---:|---|---:|---:|"]
    for case, (chosen, *typed) in answers:
        best = min((row for row in typed if row.step_time is not None), key=lambda row: row.step_time or 0.0, default=None)
        cells = [
            case.name,
            case.cluster,
            chosen.mesh or "none fits",
            _step(chosen),
            "" if chosen.mfu is None else f"{chosen.mfu:.0%}",
            "" if chosen.peak_memory is None else format_bytes(chosen.peak_memory),
            "none fits" if best is None else f"{best.mesh}, {_step(best)}",
            f"{ratio((chosen, *typed)):.2f}",
            f"{chosen.seconds:.0f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    sections = [f"## {case.name} on {case.cluster}\n\n{_reason(rows[0])}\n\n```text\n{row_table(rows)}\n```" for case, rows in answers]
    return _PAGE + "\n".join(lines) + "\n\n" + "\n\n".join(sections) + "\n"


def _step(row: Row) -> str:
    return "" if row.step_time is None else format_seconds(row.step_time)


def _reason(chosen: Row) -> str:
    """Return why a plan was chosen, or why there is none, in a sentence."""
    if chosen.step_time is None:
        return chosen.reason.splitlines()[0]
    over = f" Its simulated peak exceeds the memory limit by {format_bytes(chosen.over_limit)}." if chosen.over_limit else ""
    following = f" Next: {chosen.runner_up}." if chosen.runner_up else ""
    return f"`{chosen.mesh}`: {chosen.bound_by}.{following}{over}"
