"""The results of a sweep: select, compare, plot and export its rows."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.hardware.units import format_bytes, format_seconds
from cost_models.text_files import write_text
from partitioner.experiments.results.pareto import numbers_of_front, pareto_front
from partitioner.experiments.results.plots import PLOTS
from partitioner.experiments.results.row import FACTS, NUMBERS, RATES, Row
from partitioner.reports.pictures.chart import Picture
from partitioner.reports.tables.table import align, html_table
from passes.ir.arguments.checked import checked_arguments
from passes.ir.errors import ConfigError, did_you_mean
from passes.ir.plan import Plan


def _rate(value: float) -> str:
    """Format a number a second: ``"12,300"``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _options_text(options: str) -> str:
    """Format options of JSON: ``"optimizer=sgd, precision=bf16-mixed"``."""
    given = json.loads(options) if options else {}
    return ", ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in given.items())


FORMATS: dict[str, Callable[[Any], str]] = {
    "step_time": format_seconds,
    "planned_step_time": format_seconds,
    "measured_step_time": format_seconds,
    "seconds": format_seconds,
    "bubble_fraction": lambda part: f"{part:.1%}",
    "peak_memory": format_bytes,
    "over_limit": format_bytes,
    "measured_memory": format_bytes,
    "communication": format_bytes,
    "rows_per_second": _rate,
    "tokens_per_second": _rate,
    "mfu": lambda part: f"{part:.1%}",
    "step_cost": "{:.3g}".format,
    "options": _options_text,
}
"""Column -> function that formats its values, numbers with units."""

_REQUEST = ("model", "devices", "mode")
_PLAN_AND_TIME = ("cluster", "schedule", "n_microbatches", "recompute", "step_time")
_RATES = ("tokens_per_second", "rows_per_second")
_HEADINGS = {"rows_per_second": "rows/s", "tokens_per_second": "tokens/s", "mfu": "MFU"}
_OTHER_NUMBERS = ("bubble_fraction", "peak_memory", "communication")
_MOST_REASONS = 3
"""How many reasons of failures are printed."""

TEXTS = frozenset({"model", "mode", "mesh", "cluster", "schedule", "recompute", "options"})
"""The columns that hold no numbers."""


def cell(row: Row, name: str) -> str:
    """Format a value of a row for a table; missing values are empty."""
    value = getattr(row, name)
    return "" if value is None else FORMATS.get(name, str)(value)


def heading(name: str) -> str:
    """Return the heading of a column: ``"step time"`` for ``"step_time"``."""
    return _HEADINGS.get(name) or name.removeprefix("n_").replace("_", " ")


def columns_of(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the columns of a table of these rows; some only if any row has a value."""
    mesh = ("mesh",) if any(row.mesh and row.mesh not in (row.mode, f"{row.mode}={row.devices}") for row in rows) else ()
    options = ("options",) if any(row.options for row in rows) else ()
    measured = ("measured_step_time",) if any(row.measured_step_time is not None for row in rows) else ()
    rates = next(((name, "mfu") for name in _RATES if any(getattr(row, name) is not None for row in rows)), ())
    cost = ("step_cost",) if any(row.step_cost is not None for row in rows) else ()
    over = ("over_limit",) if any(row.over_limit is not None for row in rows) else ()
    return (*_REQUEST, *mesh, *options, *_PLAN_AND_TIME, *measured, *rates, *cost, *_OTHER_NUMBERS, *over)


@dataclass(frozen=True)
class Results:
    """The results of a sweep.

    Attributes:
        table: the rows, including those that failed.
        left: the number of placements that are not evaluated yet, because the sweep was stopped or still runs.
    """

    table: tuple[Row, ...]
    left: int = 0

    def __len__(self) -> int:
        return len(self.table)

    def rows(self) -> list[dict[str, Any]]:
        """Return every row as a dictionary; times in seconds, sizes in bytes."""
        return [row.facts() for row in self.table]

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that failed, each with its reason."""
        return tuple(row for row in self.table if not row.ok)

    def where(self, **facts: Any) -> Results:
        """Return the rows with these values: ``results.where(model="gpt", devices=8)``.

        Raises:
            ConfigError: rows have no such column.
        """
        unknown = [name for name in facts if name not in FACTS]
        if unknown:
            raise ConfigError(f"rows have no {unknown[0]!r}", remedy=f"choose from {', '.join(FACTS)}")
        return Results(tuple(row for row in self.table if all(getattr(row, name) == value for name, value in facts.items())))

    @checked_arguments()
    def best(self, by: str = "step_time", **facts: Any) -> dict[str, Any]:
        """Return the row with the best number, among those that did not fail: the smallest, of a rate the largest.

        Args:
            by: the name of the number: ``"step_time"``, ``"peak_memory"``, ``"tokens_per_second"``, ...
            facts: compare only rows with these values: ``best(by="step_time", model="gpt", devices=8)``.

        Raises:
            ConfigError: there is no such number, or no row has one.
        """
        if by not in (*NUMBERS, *RATES):
            raise ConfigError(f"placements cannot be compared by {by!r}", remedy=f"choose one of {', '.join((*NUMBERS, *RATES))}")
        sign = -1 if by in RATES else 1
        selected = self.where(**facts)
        rows = [row for row in selected.table if row.ok and getattr(row, by) is not None]
        if not rows:
            reasons = {row.reason.splitlines()[0] for row in selected.failures}
            why = f": {'; '.join(sorted(reasons)[:3])}" if reasons else ""
            raise ConfigError(f"no placement has a {by}{why}", remedy="look at .failures, or ask for other placements")
        return min(rows, key=lambda row: (sign * getattr(row, by), row.key)).facts()

    def pareto(self, **facts: Any) -> Results:
        """Return the Pareto front of each model: the rows that no other row beats in step time and peak memory at once, fastest first.

        The price of a step is a third number if it is known for every row of the model.

        Args:
            facts: compare only rows with these values: ``pareto(model="gpt", cluster="h100:8x8")``.

        Raises:
            ConfigError: rows have no such column.
        """
        done = [row for row in self.where(**facts).table if row.ok]
        groups = [[row for row in done if row.model == model] for model in sorted({row.model for row in done})]
        return Results(tuple(row for group in groups for row in pareto_front(group, numbers_of_front(group))))

    @checked_arguments()
    def plan(self, key: str) -> Plan:
        """Return the plan of a row, for ``partition(model, plan=...)``.

        Raises:
            ConfigError: no row has this key, or it failed.
        """
        row = next((row for row in self.table if row.key == key), None)
        if row is None:
            meant = did_you_mean(key, [row.key for row in self.table], str)
            raise ConfigError(f"no row has the key {key!r}", remedy=f'{meant}pass row["key"] of a row whose status is "ok"')
        if not row.plan:
            raise ConfigError(
                f"the row {key} has no plan: {row.reason.splitlines()[0]}", remedy='pass the key of a row whose status is "ok"'
            )
        return Plan.from_json(row.plan)

    @checked_arguments()
    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the rows as CSV; also write them to ``path`` if given."""
        text = io.StringIO()
        writer = csv.DictWriter(text, FACTS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        return _write_if_named(text.getvalue(), path)

    @checked_arguments()
    def to_jsonl(self, path: str | Path | None = None) -> str:
        """Return the rows as JSON Lines; also write them to ``path`` if given."""
        return _write_if_named("".join(f"{json.dumps(row)}\n" for row in self.rows()), path)

    @checked_arguments()
    def to_parquet(self, path: str | Path) -> None:
        """Write the rows as Parquet; needs ``pip install torch-partitioner[parquet]``.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        try:
            arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError("Parquet needs pyarrow, which is not installed", remedy="pip install 'torch-partitioner[parquet]'") from error
        columns = {name: [row[name] for row in self.rows()] for name in FACTS}
        parquet.write_table(arrow.table(columns), str(path))

    @checked_arguments()
    def plot(self, name: str, **facts: Any) -> Picture:
        """Return a plot as SVG: ``"time"`` and ``"efficiency"`` against devices, ``"memory"`` against microbatches, ``"pareto"``.

        Args:
            facts: plot only rows with these values: ``plot("time", model="gpt", cluster="h100:8x8")``.

        Raises:
            ConfigError: there is no such picture.
        """
        if name not in PLOTS:
            raise ConfigError(f"there is no plot {name!r}", remedy=f"choose one of {', '.join(PLOTS)}")
        return Picture(PLOTS[name]([row for row in self.where(**facts).table if row.ok]))

    def __str__(self) -> str:
        """Return a table of the placements that did not fail, fastest first, the summary, and the most frequent reasons of failures."""
        table = [*align(*self._cells()), ""] if len(self.failures) < len(self.table) else []
        return "\n".join([*table, self.summary(), *self._reasons()])

    def _reasons(self) -> list[str]:
        """Return the most frequent reasons of failures, each with the number of its placements."""
        counts = Counter(row.reason for row in self.failures)
        shown = [f"{count} x {reason}" for reason, count in counts.most_common(_MOST_REASONS)]
        left = len(counts) - len(shown)
        return [*shown, f"and {left} other reason{'s' if left > 1 else ''}, see .failures"] if left else shown

    def _repr_html_(self) -> str:
        return html_table(*self._cells(), caption=self.summary())

    def _cells(self) -> tuple[list[tuple[str, ...]], str]:
        """Return the rows of the table, the heading first, and the alignment of its columns."""
        done = sorted((row for row in self.table if row.ok), key=lambda row: (row.model, row.step_time or 0.0, row.key))
        names = columns_of(done)
        lines = [tuple(heading(name) for name in names)] + [tuple(cell(row, name) for name in names) for row in done]
        return lines, "".join("<" if name in TEXTS else ">" for name in names)

    def summary(self) -> str:
        """Return the numbers of placements in a line: ``"12 placements, 2 failed, 1 left"``."""
        failed = len(self.failures)
        parts = [f"{len(self.table)} placement{'s' if len(self.table) != 1 else ''}"]
        parts += [f"{failed} failed"] if failed else []
        parts += [f"{self.left} left"] if self.left else []
        return ", ".join(parts)


def _write_if_named(text: str, path: str | Path | None) -> str:
    """Write a text to a file if one is named; return the text."""
    if path is not None:
        write_text(path, text, "the table")
    return text
