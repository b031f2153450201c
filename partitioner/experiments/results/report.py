"""The report of a sweep: a page in a single file, which opens in a browser without a network."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from cost_models.hardware.units import format_seconds
from cost_models.text_files import write_text
from partitioner.experiments.results.plots import PLOTS, pareto_front
from partitioner.experiments.results.results import Results, cell, columns_of, heading
from partitioner.experiments.results.row import Row
from partitioner.reports.page.frame import framed, page_file, tiles_html
from passes.ir.errors import ConfigError

__all__ = ["report_html", "write_report"]

_FOOTER = "Times and memory are those of the simulated programs, unless a column says measured."
_NUMBERS = frozenset({"devices", "n_microbatches", "step_time", "measured_step_time", "bubble_fraction", "peak_memory", "communication"})


def write_report(results: Results, path: str | Path, title: str = "Placements") -> None:
    """Write the report of a sweep to a file; see ``report_html``.

    Raises:
        ConfigError: there are no rows, or the file cannot be written.
    """
    write_text(path, report_html(results, title), "the report")


def report_html(results: Results, title: str = "Placements") -> str:
    """The report as a single HTML file: best placements, pictures of each model on each machine, every row, failures by reason.

    Raises:
        ConfigError: there are no rows.
    """
    if not results.table:
        raise ConfigError("there is nothing to report: the sweep has no rows", remedy="run the sweep first")
    done = sorted((row for row in results.table if row.ok), key=lambda row: row.key)
    header = f"<h1>{escape(title)}</h1><p>{escape(_headline(results))}</p>{_tiles(results)}"
    sections = [("Best", _best(done)), *_pictures(done), ("Placements", _table(done)), ("Failures", _failures(results.failures))]
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
    """The rows of each model on each machine."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.model, row.cluster), []).append(row)
    return dict(sorted(found.items()))


def _best(rows: Sequence[Row]) -> str:
    """The fastest placement for each number of devices, of each model on each machine."""
    lines: list[Row] = []
    for group in _groups(rows).values():
        ordered = sorted(group, key=lambda row: (row.devices, row.step_time or 0.0, row.key))
        lines += [next(each) for _, each in itertools.groupby(ordered, key=lambda row: row.devices)]
    return _html(lines, "fastest") if lines else ""


def _pictures(rows: Sequence[Row]) -> list[tuple[str, str]]:
    found = []
    for (model, cluster), group in _groups(rows).items():
        pictures = "".join(f'<div class="picture">{picture}</div>' for plot in PLOTS.values() if (picture := plot(group)))
        front = pareto_front(group)
        told = f"{len(front)} of {len(group)} placements are on the front: for each other, one of them is as fast and as small."
        found.append((f"{model} on {cluster}", f'<div class="pictures">{pictures}</div><p class="footnote">{escape(told)}</p>'))
    return found


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    search = '<div class="search"><input id="search" type="search" placeholder="gpt pipeline 8 ..." aria-label="search the placements">'
    ordered = sorted(rows, key=lambda row: (row.model, row.cluster, row.step_time or 0.0, row.key))
    return f'{search}<span id="count" class="lead"></span></div>{_html(ordered, "all", sortable=True)}'


def _html(rows: Sequence[Row], name: str, *, sortable: bool = False) -> str:
    """A table; what it sorts by is the number, not its text."""
    names = columns_of(rows)
    kinds = ["number" if column in _NUMBERS else "text" for column in names]
    button = ("<button>", "</button>") if sortable else ("", "")
    head = "".join(f'<th class="{kind}">{button[0]}{heading(each)}{button[1]}</th>' for each, kind in zip(names, kinds, strict=True))
    lines = []
    for row in rows:
        cells = "".join(
            f'<td class="{kind}" data-value="{escape(str(getattr(row, each)))}">{escape(cell(row, each))}</td>'
            for each, kind in zip(names, kinds, strict=True)
        )
        lines.append(f'<tr title="{escape(row.bound_by)}">{cells}</tr>')
    return f'<div class="wide"><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _failures(rows: Sequence[Row]) -> str:
    """Reasons, the commonest first, each with the placements that it stopped."""
    counted = Counter(row.reason for row in rows)
    parts = []
    for reason, count in counted.most_common():
        which = "".join(
            f"<li>{escape(f'{row.model}, {row.mode} on {row.devices} x {row.cluster}')}</li>" for row in rows if row.reason == reason
        )
        first = escape(reason.splitlines()[0])
        parts.append(f"<details><summary>{count} &times; {first}</summary><pre>{escape(reason)}</pre><ul>{which}</ul></details>")
    return "".join(parts)
