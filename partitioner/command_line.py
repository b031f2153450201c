"""The command line: ``partitioner plan``, ``inspect`` and ``check`` on a model that a file makes.

    partitioner plan    net.py:factory --devices 4 --cluster h100:1x4 --json plan.json
    partitioner inspect net.py:factory --devices 2 --rank 1
    partitioner check   net.py:factory --devices 4 --mode data=2,tensor=2

``factory()`` returns ``(model, args)`` or ``(model, args, kwargs)``. Exit codes: 0 it worked; 1 a check did not find everything equal;
2 the request was wrong or cannot be met.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from partitioner.api import partition
from partitioner.factory import Made, call_factory
from partitioner.model import PartitionedModel
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.mesh import Mesh, pipelines
from passes.ir.plan import Plan

__all__ = ["main"]

_EXIT_CODES = "exit code: 0 it worked, 2 the request was wrong or cannot be met"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: its words; None takes the process's.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except PartitionError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as head, has seen enough. What is still to be flushed goes nowhere, so that Python does not complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="partitioner",
        description="Partition a PyTorch model over devices, and see what comes out.",
        epilog="partitioner COMMAND --help shows the options of a command, and an example.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser
    plan = _command(add, "plan", _plan, "plan a model and explain the plan", "net.py:factory --devices 4 --json plan.json")
    plan.add_argument("--json", metavar="FILE", help="also write the plan to a file, for --plan")
    inspect = _command(add, "inspect", _inspect, "print the programs of the ranks", "net.py:factory --devices 2 --rank 1")
    inspect.add_argument("--rank", type=int, metavar="N", help="one rank alone (default: all)")
    codes = "exit code: 0 equal, 1 not everything is equal, 2 the request was wrong or cannot be met"
    _command(add, "check", _check, "compare the partitioned model with the original", "net.py:factory --devices 4", codes)
    return parser


def _command(
    add: Callable[..., argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    example: str,
    codes: str = _EXIT_CODES,
) -> argparse.ArgumentParser:
    """A command with the options that all have."""
    command = add(
        name,
        help=text,
        description=f"{text.capitalize()}.",
        epilog=f"example: partitioner {name} {example}\n{codes}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    command.set_defaults(run=run)
    factory = "a file and a function in it that returns (model, args)\nor (model, args, kwargs)"
    command.add_argument("factory", metavar="FILE.py:FACTORY", help=factory)
    command.add_argument("--devices", type=int, required=True, metavar="N", help="how many devices")
    modes = (
        "auto (default): the better of pipeline and model; pipeline,\nmodel, data, fsdp, zero1, zero2, tensor or sequence over all\n"
        "devices; or a mesh, outermost first: data=2,tensor=2"
    )
    command.add_argument("--mode", metavar="MODE", help=modes)
    schedules = "GPipe, 1F1B, Interleaved1F1B, ZB1P, ZBV or DualPipeV\n(default: planned)"
    command.add_argument("--schedule", metavar="NAME", help=schedules)
    command.add_argument("--microbatches", type=int, metavar="N", help="microbatches a step (default: planned)")
    cluster = "hardware to plan for: kind, nodes and devices in each,\nas h100:1x4 (default: what is here)"
    command.add_argument("--cluster", metavar="CLUSTER", help=cluster)
    command.add_argument("--memory-limit", metavar="SIZE", help="per device, as 16GiB (default: what the device has)")
    plan = "lower this plan, which plan --json wrote, instead of\nmaking one"
    command.add_argument("--plan", metavar="FILE", help=plan)
    command.add_argument("--debug", action="store_true", help="show where in the code an error came from")
    return command


def _plan(arguments: argparse.Namespace) -> int:
    pm = _partition(call_factory(arguments.factory), arguments)
    print(pm.explain())
    if arguments.json:
        _write(arguments.json, pm.plan.to_json() + "\n")
        print(f"\nplan written to {arguments.json}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    pm = _partition(call_factory(arguments.factory), arguments)
    ranks = range(pm.plan.n_ranks) if arguments.rank is None else [arguments.rank]
    codes = {rank: pm.graph(rank).code.strip() for rank in ranks}
    print("\n\n\n".join(f"{_heading(pm.plan, rank)}\n{code}" for rank, code in codes.items()))
    return 0


def _heading(plan: Plan, rank: int) -> str:
    """A comment that says whose program follows."""
    place = next(ranks.index(rank) for ranks in pipelines(Mesh(plan.mesh)) if rank in ranks)
    stages = [str(index) for index, stage in enumerate(plan.stages) if stage.rank == place]
    return f"# rank {rank} of {plan.n_ranks}, on {plan.devices[rank]}: stage{'s' if len(stages) > 1 else ''} {' and '.join(stages)}"


def _check(arguments: argparse.Namespace) -> int:
    made = call_factory(arguments.factory)
    report = _partition(made, arguments).check(*(made.args or ()), **made.kwargs)
    print(report)
    return 0 if report else 1


def _partition(made: Made, arguments: argparse.Namespace) -> PartitionedModel:
    plan = None
    if arguments.plan is not None:
        decided = [name for name in ("mode", "schedule", "microbatches", "cluster", "memory_limit") if getattr(arguments, name) is not None]
        if decided:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in decided)
            raise ConfigError(f"--plan gives a whole plan, which leaves nothing for {options} to decide", remedy=f"leave out {options}")
        plan = Plan.from_json(_read(arguments.plan))
    return partition(
        made.model,
        devices=arguments.devices,
        mode=_mode(arguments.mode or "auto"),
        example_inputs=made.args,
        example_kwargs=made.kwargs,
        schedule=arguments.schedule,
        n_microbatches=arguments.microbatches,
        cluster=arguments.cluster,
        memory_limit=arguments.memory_limit,
        plan=plan,
    )


def _mode(text: str) -> str | Mapping[str, int]:
    """``"tensor"`` as it is; ``"data=2,tensor=2"`` as a mesh."""
    if "=" not in text:
        return text
    mesh: dict[str, int] = {}
    for dimension in text.split(","):
        name, _, size = dimension.partition("=")
        if not name or not size.isdecimal() or name in mesh:
            raise ConfigError(f"--mode {text} is no mesh", remedy="name each dimension once with its size: --mode data=2,tensor=2")
        mesh[name] = int(size)
    return mesh


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the plan file {path} cannot be read: {reason}", remedy="partitioner plan ... --json FILE writes one") from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the plan cannot be written to {path}: {error.strerror}", remedy="name a file in a folder that is there"
        ) from error
