"""The command line: ``partitioner plan``, ``inspect`` and ``check`` on a model that a file makes.

    partitioner plan    net.py:factory --devices 4 --cluster h100:1x4 --json plan.json
    partitioner inspect net.py:factory --devices 2 --rank 1
    partitioner check   net.py:factory --devices 4 --schedule ZB1P

``factory()`` returns ``(model, args)`` or ``(model, args, kwargs)``. Exit codes: 0 it worked; 1 a check found a difference; 2 the request
was wrong or cannot be met.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from partitioner.api import partition
from partitioner.model import PartitionedModel
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.plan import Plan

__all__ = ["main"]


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
    except PartitionError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="partitioner", description="Partition a PyTorch model over devices, and see what comes out.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, run, text, example in (
        ("plan", _plan, "plan a model and explain the plan", "partitioner plan net.py:factory --devices 4 --json plan.json"),
        ("inspect", _inspect, "print the programs of the ranks", "partitioner inspect net.py:factory --devices 2 --rank 1"),
        ("check", _check, "compare the partitioned model with the original", "partitioner check net.py:factory --devices 4"),
    ):
        layout = argparse.RawTextHelpFormatter
        command = commands.add_parser(
            name, help=text, description=f"{text.capitalize()}.", epilog=f"example: {example}", formatter_class=layout
        )
        _common(command)
        command.set_defaults(run=run)
        if name == "plan":
            command.add_argument("--json", metavar="FILE", help="also write the plan to a file")
        if name == "inspect":
            command.add_argument("--rank", type=int, metavar="N", help="one rank alone (default: all)")
    return parser


def _common(command: argparse.ArgumentParser) -> None:
    command.add_argument("factory", metavar="FILE.py:FACTORY", help="a function that returns (model, args) or (model, args, kwargs)")
    command.add_argument("--devices", type=int, required=True, metavar="N", help="how many devices")
    command.add_argument("--mode", default="auto", metavar="MODE", help="auto, pipeline or model (default: auto)")
    command.add_argument("--schedule", metavar="NAME", help="GPipe, 1F1B, Interleaved1F1B, ZB1P, ZBV or DualPipeV (default: planned)")
    command.add_argument("--microbatches", type=int, metavar="N", help="microbatches a step (default: planned)")
    command.add_argument("--cluster", metavar="KIND:NODESxDEVICES", help="hardware to plan for, h100:1x4 (default: what is here)")
    command.add_argument("--memory-limit", metavar="SIZE", help="per device, 16GiB (default: what the device has)")
    command.add_argument("--plan", metavar="FILE", help="lower this plan instead of making one")
    command.add_argument("--debug", action="store_true", help="show where in the code an error came from")


def _plan(arguments: argparse.Namespace) -> int:
    pm = _partition(arguments)
    print(pm.explain())
    if arguments.json:
        Path(arguments.json).write_text(pm.plan.to_json() + "\n", encoding="utf-8")
        print(f"\nplan written to {arguments.json}")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    pm = _partition(arguments)
    ranks = range(arguments.devices) if arguments.rank is None else [arguments.rank]
    for rank in ranks:
        print(pm.graph(rank).code)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    model, args, kwargs = _call_factory(arguments.factory)
    report = _partition_model(model, args, kwargs, arguments).check(*args, **kwargs)
    print(report)
    return 0 if report else 1


def _partition(arguments: argparse.Namespace) -> PartitionedModel:
    model, args, kwargs = _call_factory(arguments.factory)
    return _partition_model(model, args, kwargs, arguments)


def _partition_model(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], arguments: argparse.Namespace) -> PartitionedModel:
    return partition(
        model,
        devices=arguments.devices,
        mode=arguments.mode,
        example_inputs=args,
        example_kwargs=kwargs,
        schedule=arguments.schedule,
        n_microbatches=arguments.microbatches,
        cluster=arguments.cluster,
        memory_limit=arguments.memory_limit,
        plan=None if arguments.plan is None else Plan.from_json(_read(arguments.plan)),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the plan file {path} cannot be read: {error.strerror}", remedy="partitioner plan ... --json FILE writes one"
        ) from error


def _call_factory(text: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    """What ``FILE.py:FACTORY`` names, called."""
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise ConfigError(f"{text!r} names no factory", remedy="write the file and the function in it: net.py:factory")
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}", remedy="write the file and the function in it: net.py:factory")
    specification = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = ", ".join(sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_")))
        raise ConfigError(f"{path} has no function {name!r}", remedy=f"it has {functions or 'none'}")
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module) or not isinstance(made[1], tuple):
        raise ConfigError(
            f"{name}() returned {type(made).__name__}", remedy="return (model, args) or (model, args, kwargs), args being a tuple"
        )
    return made[0], made[1], made[2] if len(made) == 3 else {}
