"""The report of a sweep as an HTML page in a single file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cost_models.hardware.units import format_bytes, format_flops, format_seconds
from cost_models.text_files import write_text
from partitioner.experiments.results.pareto import numbers_of_front
from partitioner.experiments.results.plots import PLOTS, best_at_each
from partitioner.experiments.results.results import TEXTS, Results, cell, columns_of, heading
from partitioner.experiments.results.row import Row
from partitioner.planner.search.describe import recomputed_regions
from partitioner.reports.explain.choices import contenders_section, front_section
from partitioner.reports.module_names import module_range
from partitioner.reports.page.frame import framed, page_file, tiles_html
from passes.ir.errors import ConfigError
from passes.ir.mesh import mesh_words, rank_list
from passes.ir.plan import Plan

_FOOTER = "Times and memory are those of the simulated programs, unless a column says measured."


def write_report(results: Results, path: str | Path, title: str = "Placements") -> None:
    """Write the report of a sweep to a file; see ``report_html``.

    Raises:
        ConfigError: there are no rows, or the file cannot be written.
    """
    write_text(path, report_html(results, title), "the report")


def report_html(results: Results, title: str = "Placements") -> str:
    """Return the report as HTML: best placements, plots of each model on each machine, all rows, failures by reason.

    Raises:
        ConfigError: there are no rows.
    """
    if not results.table:
        raise ConfigError("there is nothing to report: the sweep has no rows", remedy="run the sweep first")
    done = sorted((row for row in results.table if row.ok), key=lambda row: row.key)
    header = f"<h1>{escape(title)}</h1><p>{escape(_headline(results))}</p>{_tiles(results)}"
    sections = [
        ("Best", _best(done)),
        ("Pareto front", _front(results)),
        *_pictures(done),
        ("Placements", _table(done)),
        ("Plans", _plans(done)),
        ("Failures", _failures(results.failures)),
    ]
    package = "partitioner.experiments.results"
    return framed(title, header, sections, _FOOTER, page_file("report.js", package), page_file("report.css", package))


def _headline(results: Results) -> str:
    models, clusters = ({getattr(row, name) for row in results.table} for name in ("model", "cluster"))
    counts = sorted({row.devices for row in results.table})
    devices = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"{', '.join(sorted(models))} on {devices} devices of {', '.join(sorted(clusters))}: {results.summary()}"


def _tiles(results: Results) -> str:
    done = [row for row in results.table if row.ok]
    seconds = sum(row.seconds for row in results.table)
    return tiles_html(
        [
            (str(len(results.table)), "placements"),
            (str(len(done)), "that run"),
            (str(len(results.failures)), "that cannot"),
            (str(len({row.plan_hash for row in done})), "different plans"),
            (format_seconds(seconds / len(results.table)), "to plan and simulate one"),
        ]
    )


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group rows by (model, machine)."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.cluster), []).append(row)
    return dict(sorted(groups.items()))


def _best(rows: Sequence[Row]) -> str:
    """Return the table of the fastest placement for each number of devices, of each model on each machine."""
    fastest: list[Row] = []
    for group in _groups(rows).values():
        fastest += best_at_each(group, lambda row: row.devices, lambda row: row.step_time or 0.0)
    return _html(fastest, "fastest") if fastest else ""


def _front(results: Results) -> str:
    """Return the table of the Pareto front of each model; empty if no placement worked."""
    front = results.pareto()
    if not front.table:
        return ""
    words = "as fast, as small and as cheap" if "step_cost" in numbers_of_front(front.table) else "as fast and as small"
    note = f"{len(front)} of {len(results) - len(results.failures)} placements: for each other, one of them is {words}."
    return f'{_html(front.table, "front")}<p class="footnote">{escape(note)}</p>'


def _pictures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return a section (title, HTML) with the plots of each model on each machine."""
    sections = []
    for (model, cluster), group in _groups(rows).items():
        pictures = "".join(f'<div class="picture">{picture}</div>' for plot in PLOTS.values() if (picture := plot(group)))
        sections.append((f"{model} on {cluster}", f'<div class="pictures">{pictures}</div>'))
    return sections


def _table(rows: Sequence[Row]) -> str:
    """Return the table of all placements, with a search field; empty if there are none."""
    if not rows:
        return ""
    search = '<div class="search"><input id="search" type="search" placeholder="gpt pipeline 8 ..." aria-label="search the placements">'
    ordered = sorted(rows, key=lambda row: (row.model, row.cluster, row.step_time or 0.0, row.key))
    return f'{search}<span id="count" class="lead"></span></div>{_html(ordered, "all", sortable=True)}'


def _html(rows: Sequence[Row], name: str, *, sortable: bool = False) -> str:
    """Return rows as an HTML table with the id ``name``; the script sorts by ``data-value``, which holds plain numbers."""
    columns = {column: "text" if column in TEXTS else "number" for column in columns_of(rows)}
    start, end = ("<button>", "</button>") if sortable else ("", "")
    head = "".join(f'<th class="{kind}">{start}{heading(column)}{end}</th>' for column, kind in columns.items())
    lines = []
    for row in rows:
        cells = "".join(
            f'<td class="{kind}" data-value="{escape(str(getattr(row, column)))}">{_linked(row, column)}</td>'
            for column, kind in columns.items()
        )
        title = "; runner-up: ".join(text for text in (row.bound_by, row.runner_up) if text)
        lines.append(f'<tr title="{escape(title)}">{cells}</tr>')
    return f'<div class="wide"><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _linked(row: Row, column: str) -> str:
    """Return a cell; that of the mode links to the report of the row's plan."""
    text = escape(cell(row, column))
    return f'<a href="#plan-{row.plan_hash}">{text}</a>' if column == "mode" and row.plan else text


def _plans(rows: Sequence[Row]) -> str:
    """Return the reports of the plans of all rows, each once: decisions, predictions, stages, and the plans that were next."""
    with_plan = {row.plan_hash: row for row in sorted(rows, key=lambda row: -(row.step_time or 0.0)) if row.plan}
    parts = []
    for number, row in sorted(with_plan.items(), key=lambda item: (item[1].model, item[1].step_time or 0.0, item[0])):
        plan = Plan.from_json(row.plan)
        tables = [contenders_section(plan), front_section(plan)]
        lines = [*_plan_lines(plan), *(line for table in tables if table is not None for line in ("", *table.lines()))]
        words = f"{row.model}, {mesh_words(plan.grid, plan.replicas)}: {format_seconds(row.step_time or 0.0)} a step"
        report = escape("\n".join(lines))
        parts.append(f'<details><summary>{escape(words)}</summary><pre id="plan-{number}">{report}</pre></details>')
    return "".join(parts)


def _failures(rows: Sequence[Row]) -> str:
    """Return the reasons of failures, the most frequent first, each with its placements."""
    counts = Counter(row.reason for row in rows)
    parts = []
    for reason, count in counts.most_common():
        failed = [f"{row.model}, {row.mode} on {row.devices} x {row.cluster}" for row in rows if row.reason == reason]
        items = "".join(f"<li>{escape(placement)}</li>" for placement in failed)
        first = escape(reason.splitlines()[0])
        parts.append(f"<details><summary>{count} &times; {first}</summary><pre>{escape(reason)}</pre><ul>{items}</ul></details>")
    return "".join(parts)


def _plan_lines(plan: Plan) -> list[str]:
    """Return a plan as lines, one decision or prediction each."""
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
