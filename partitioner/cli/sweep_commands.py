"""Run the commands on many placements: ``sweep`` and ``report``."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from partitioner.cli.output import say, write_json
from partitioner.experiments.results.report import write_report
from partitioner.experiments.results.results import Results, cell, heading
from partitioner.experiments.results.store import Store
from partitioner.experiments.run.sweep import sweep
from partitioner.experiments.run.sweep_file import read_sweep
from passes.ir.errors import ConfigError


def run_sweep(arguments: argparse.Namespace) -> int:
    """Run the sweep of a file; options of the command line override those of the file."""
    options = read_sweep(arguments.file)
    given = {"measure": arguments.measure or None, "workers": arguments.workers, "n_samples": arguments.samples, "seed": arguments.seed}
    options |= {name: value for name, value in given.items() if value is not None}
    resume = arguments.resume or arguments.retry_failures
    results = sweep(**options, store=arguments.store, resume=resume, retry_failures=arguments.retry_failures)
    say(arguments, str(results))
    say(arguments, f"kept in {arguments.store}; partitioner report {arguments.store} --html out.html draws it")
    write_json(arguments, "rows", results.rows())
    return 0 if any(row.ok for row in results.table) else 1


def _report_plan(results: Results, arguments: argparse.Namespace) -> int:
    """Write the plan of a row, or show the row without ``--json``."""
    plan = results.plan(arguments.plan)
    others = [f"--{name}" for name in ("html", "csv", "parquet") if getattr(arguments, name) is not None]
    if others:
        raise ConfigError(f"--plan is of one row, {others[0]} of all", remedy=f"leave out {others[0]}, or --plan")
    row = next(row for row in results.table if row.key == arguments.plan)
    facts = {name: value for name, value in row.facts().items() if value not in (None, "")}
    say(arguments, "\n".join(f"{heading(name):<20}  {cell(row, name)}" for name in facts))
    write_json(arguments, "plan", plan.to_json())
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Show what a sweep found, or write it to files."""
    with closing(Store(arguments.store, create=False)) as store:
        results = Results(tuple(store.rows()))
    if arguments.plan is not None:
        return _report_plan(results, arguments)
    written = {"html": arguments.html, "csv": arguments.csv, "parquet": arguments.parquet}
    if arguments.html is not None:
        write_report(results, arguments.html, arguments.title or Path(arguments.store).stem)
    if arguments.csv is not None:
        results.to_csv(arguments.csv)
    if arguments.parquet is not None:
        results.to_parquet(arguments.parquet)
    files = [f"{kind} written to {path}" for kind, path in written.items() if path is not None]
    say(arguments, "\n".join(files) or str(results))
    write_json(arguments, "rows", results.rows())
    return 0
