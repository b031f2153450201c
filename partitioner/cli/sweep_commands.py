"""The commands on many placements: ``sweep`` and ``report``."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from partitioner.cli.options import Commands, add_command, add_json, say, write_json
from partitioner.experiments.results.report import write_report
from partitioner.experiments.results.results import Results
from partitioner.experiments.results.store import Store
from partitioner.experiments.run.sweep import sweep
from partitioner.experiments.run.sweep_file import read_sweep

__all__ = ["add_sweep_commands"]


def add_sweep_commands(commands: Commands) -> None:
    """Add the commands on many placements to a parser."""
    codes = "exit code: 0 it worked, 1 no placement could be planned, 2 the request was wrong,\n130 it was interrupted"
    text = "plan and simulate every placement of a grid"
    command = add_command(commands, "sweep", _sweep, text, "sweep.toml --store runs.db", codes)
    file = 'a TOML file: devices = [2, 4], modes = ["data"], and\nbelow [models], net = "net.py:factory"; see the docs'
    command.add_argument("file", metavar="SWEEP.toml", help=file)
    command.add_argument("--store", required=True, metavar="FILE", help="where rows are kept as they are found (SQLite)")
    command.add_argument("--resume", action="store_true", help="go on with a sweep that the store has a part of")
    command.add_argument("--retry-failures", action="store_true", help="ask again for what failed before")
    command.add_argument("--measure", action="store_true", help="also run every placement on this machine, under torchrun")
    command.add_argument("--workers", type=int, metavar="N", help="processes that plan (default: one for each core)")
    command.add_argument("--samples", type=int, metavar="N", help="take so many placements by chance (default: all)")
    command.add_argument("--seed", type=int, metavar="N", help="of the chance (default: 0)")
    add_json(command, "the rows")
    report = add_command(commands, "report", _report, "show what a sweep found", "runs.db --html out.html")
    report.add_argument("store", metavar="STORE", help="a file that a sweep wrote")
    report.add_argument("--html", metavar="FILE", help="write a page: best placements, pictures, all rows")
    report.add_argument("--csv", metavar="FILE", help="write the rows as CSV")
    report.add_argument("--parquet", metavar="FILE", help="write the rows as Parquet (needs pyarrow)")
    report.add_argument("--title", metavar="TEXT", help="of the page (default: the name of the store)")
    add_json(report, "the rows")


def _sweep(arguments: argparse.Namespace) -> int:
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


def _report(arguments: argparse.Namespace) -> int:
    with closing(Store(arguments.store, create=False)) as store:
        results = Results(tuple(store.rows()))
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
