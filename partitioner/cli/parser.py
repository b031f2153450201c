"""The parser of the command line. It imports nothing that runs a command, and so no PyTorch: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

import partitioner
from partitioner.cli.options import CODES, FORMATS, Commands, add_command, add_json, numbers
from partitioner.cli.partition_options import add_partition_options
from passes.ir.errors import ConfigError, did_you_mean


def option_flags(help_text: str) -> list[str]:
    """Return the options that the help of a command lists."""
    lines = re.findall(r"^  (-.*?)(?:   .*)?$", help_text, re.MULTILINE)
    return [flag for line in lines for flag in re.findall(r"--[\w-]+", line)]


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for arguments that it cannot read, and suggests a command or choice with a similar name."""

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        meant = did_you_mean(found[1], re.findall(r"[\w-]+", found[2]), str) if found else ""
        raise ConfigError(f"{self.prog}: {message}", remedy=f"{meant}{self.prog} --help lists what it takes")


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="partitioner",
        description="Partition a PyTorch model over devices, and see what comes out.",
        epilog="partitioner COMMAND --help shows the options of a command, and an example.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {partitioner.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_partition_commands(commands)
    _add_sweep_commands(commands)
    return parser


def _add_partition_commands(commands: Commands) -> None:
    """Add the commands on one model to a parser."""
    plan = _add_model_command(
        commands, "plan", "partition_commands:plan", "plan a model and explain the plan", "net.py:factory --devices 4 --json plan.json"
    )
    add_json(plan, "the plan, for --plan,")
    inspect = _add_model_command(
        commands, "inspect", "partition_commands:inspect", "show the programs of the ranks", "net.py:factory --devices 2 --rank 1"
    )
    inspect.add_argument("--rank", type=int, metavar="N", help="one rank alone (default: all)")
    formats = "text: the programs (default); dot, svg: a drawing of the\nmodel over its ranks; html: a page with all there is to see"
    inspect.add_argument("--format", choices=FORMATS, help=formats)
    inspect.add_argument("--output", metavar="FILE", help="write a file; its suffix sets the format")
    example = "net.py:factory --devices 4 --cluster h100:1x4 --timeline step.svg"
    simulate = _add_model_command(
        commands, "simulate", "partition_commands:simulate", "run a step on a clock: time, memory, communication, timeline", example
    )
    timeline = "also write the timeline: .svg a picture, .json for\nhttps://ui.perfetto.dev"
    simulate.add_argument("--timeline", metavar="FILE", help=timeline)
    inference = "latency and throughput in evaluation mode, instead of\na step; a model that generates continues prompts"
    simulate.add_argument("--inference", action="store_true", help=inference)
    simulate.add_argument("--batches", type=numbers, metavar="N,N", help="with --inference: rows of each batch (default: 1,8,64)")
    simulate.add_argument("--prompt", type=int, metavar="N", help="with --inference: tokens that are given (default: 128)")
    simulate.add_argument("--new-tokens", type=int, metavar="N", help="with --inference: tokens that are generated (default: 128)")
    add_json(simulate, "the numbers")
    codes = "exit code: 0 equal, 1 not everything is equal, 2 the request was wrong or cannot be met"
    text = "compare the partitioned model with the original"
    check = _add_model_command(commands, "check", "partition_commands:check", text, "net.py:factory --devices 4", codes)
    add_json(check, "the result")


_FACTORY = """net.py:factory, or package.module:factory: a function that returns
(model, args) or (model, args, kwargs); with arguments:
"net.py:factory(depth=8)"; or transformers:CONFIG.json, a model
of transformers from its configuration, on the meta device"""


def _add_model_command(commands: Commands, name: str, run: str, text: str, example: str, codes: str = CODES) -> argparse.ArgumentParser:
    """Add a command on a model, with the options that say how the model is partitioned."""
    command = add_command(commands, name, run, text, example, codes)
    command.add_argument("factory", metavar="FACTORY", help=_FACTORY)
    group = command.add_argument_group("arguments of the factory")
    group.add_argument("--batch", type=int, metavar="N", help="batch=N, for transformers:CONFIG.json and factories that take it")
    group.add_argument("--sequence", type=int, metavar="N", help="sequence=N, likewise")
    add_partition_options(command)
    return command


def _add_sweep_commands(commands: Commands) -> None:
    """Add the commands on many placements to a parser."""
    codes = "exit code: 0 it worked, 1 no placement could be planned, 2 the request was wrong,\n130 it was interrupted"
    text = "plan and simulate every placement of a grid"
    command = add_command(commands, "sweep", "sweep_commands:run_sweep", text, "sweep.toml --store runs.db", codes)
    file = 'a TOML file: devices = [2, 4], modes = ["data"], and\nbelow [models], net = "net.py:factory"; see the docs'
    command.add_argument("file", metavar="SWEEP.toml", help=file)
    command.add_argument("--store", required=True, metavar="FILE", help="where rows are kept as they are found (SQLite)")
    command.add_argument("--resume", action="store_true", help="go on with a sweep that the store has a part of")
    command.add_argument("--retry-failures", action="store_true", help="evaluate failed placements again")
    command.add_argument("--measure", action="store_true", help="also run every placement on this machine, under torchrun")
    command.add_argument("--workers", type=int, metavar="N", help="processes that plan (default: one for each core)")
    command.add_argument("--samples", type=int, metavar="N", help="take so many placements by chance (default: all)")
    command.add_argument("--seed", type=int, metavar="N", help="of the chance (default: 0)")
    add_json(command, "the rows")
    report = add_command(commands, "report", "sweep_commands:report", "show what a sweep found", "runs.db --html out.html")
    report.add_argument("store", metavar="STORE", help="a file that a sweep wrote")
    report.add_argument("--html", metavar="FILE", help="write a page: best placements, pictures, all rows")
    report.add_argument("--csv", metavar="FILE", help="write the rows as CSV")
    report.add_argument("--parquet", metavar="FILE", help="write the rows as Parquet (needs pyarrow)")
    text = "one row, by its key; with --json its plan, for the --plan\nof other commands"
    report.add_argument("--plan", metavar="KEY", help=text)
    report.add_argument("--title", metavar="TEXT", help="of the page (default: the name of the store)")
    add_json(report, "the rows")
