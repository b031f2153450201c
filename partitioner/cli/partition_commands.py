"""The commands on one model: ``plan``, ``inspect``, ``simulate``, ``check``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cost_models.text_files import read_text, write_text
from partitioner.api import partition
from partitioner.cli.options import CODES, Commands, add_command, add_json, say, write_json
from partitioner.experiments.run.factory import Made, call_factory
from partitioner.model.draw import draw
from partitioner.model.partitioned_model import PartitionedModel
from partitioner.options.mode import parse_mode
from passes.ir.errors import ConfigError
from passes.ir.mesh import pipelines
from passes.ir.plan import Plan

__all__ = ["add_partition_commands"]

_FORMATS = ("text", "dot", "svg", "html")
"""How ``inspect`` shows a model."""

_DECIDED = ("mode", "schedule", "microbatches", "cluster", "memory_limit", "recompute")
"""Options that a whole plan leaves nothing to decide for."""


def add_partition_commands(commands: Commands) -> None:
    """Add them to a parser."""
    plan = _add(commands, "plan", _plan, "plan a model and explain the plan", "net.py:factory --devices 4 --json plan.json")
    add_json(plan, "the plan, for --plan,")
    inspect = _add(commands, "inspect", _inspect, "show the programs of the ranks", "net.py:factory --devices 2 --rank 1")
    inspect.add_argument("--rank", type=int, metavar="N", help="one rank alone (default: all)")
    formats = "text: the programs (default); dot, svg: a drawing of the\nmodel over its ranks; html: a page with all there is to see"
    inspect.add_argument("--format", choices=_FORMATS, help=formats)
    inspect.add_argument("--output", metavar="FILE", help="write a file; its ending tells the format")
    example = "net.py:factory --devices 4 --cluster h100:1x4 --timeline step.svg"
    simulate = _add(commands, "simulate", _simulate, "run a step on a clock: time, memory, communication, timeline", example)
    timeline = "also write the timeline: .svg a picture, .json for\nhttps://ui.perfetto.dev"
    simulate.add_argument("--timeline", metavar="FILE", help=timeline)
    add_json(simulate, "the numbers")
    codes = "exit code: 0 equal, 1 not everything is equal, 2 the request was wrong or cannot be met"
    check = _add(commands, "check", _check, "compare the partitioned model with the original", "net.py:factory --devices 4", codes)
    add_json(check, "the result")


def _add(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str, codes: str = CODES
) -> argparse.ArgumentParser:
    """A command on a model, with the options that say how it is partitioned."""
    command = add_command(commands, name, run, text, example, codes)
    factory = "a file and a function in it that returns (model, args)\nor (model, args, kwargs)"
    command.add_argument("factory", metavar="FILE.py:FACTORY", help=factory)
    command.add_argument("--devices", type=int, required=True, metavar="N", help="how many devices")
    modes = (
        "auto (default): the best that the planner finds; pipeline,\nmodel, data, fsdp, zero1, zero2, tensor, sequence or tile over all\n"
        "devices; or a mesh, outermost first: data=2,tensor=2"
    )
    command.add_argument("--mode", metavar="MODE", help=modes)
    schedules = "GPipe, 1F1B, Interleaved1F1B, ZB1P, ZBV or DualPipeV\n(default: planned)"
    command.add_argument("--schedule", metavar="NAME", help=schedules)
    command.add_argument("--microbatches", type=int, metavar="N", help="microbatches a step (default: planned)")
    command.add_argument("--recompute", metavar="POLICY", help="none, selective or full (default: the cheapest that fits in memory)")
    cluster = "hardware to plan for: kind, nodes and devices in each,\nas h100:1x4 (default: what is here)"
    command.add_argument("--cluster", metavar="CLUSTER", help=cluster)
    command.add_argument("--memory-limit", metavar="SIZE", help="per device, as 16GiB (default: what the device has)")
    command.add_argument("--plan", metavar="FILE", help="lower this plan, which plan --json wrote, instead of\nmaking one")
    return command


def _plan(arguments: argparse.Namespace) -> int:
    pm = _partition(call_factory(arguments.factory), arguments)
    say(arguments, pm.explain())
    write_json(arguments, "plan", pm.plan.to_json())
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    form = _format(arguments)
    pm = _partition(call_factory(arguments.factory), arguments)
    if form == "html":
        pm.save_report(arguments.output)
    elif arguments.output is None:
        print(_shown(pm, form, arguments.rank))
    else:
        write_text(arguments.output, _shown(pm, form, arguments.rank) + "\n", f"the {form}")
    if arguments.output is not None:
        print(f"{form} written to {arguments.output}")
    return 0


def _shown(pm: PartitionedModel, form: str, rank: int | None) -> str:
    """Programs as text, or a drawing."""
    if form == "text":
        return _programs(pm, rank)
    drawing = draw(pm, ranks=None if rank is None else [rank])
    return drawing.dot() if form == "dot" else drawing.svg()


def _format(arguments: argparse.Namespace) -> str:
    """The format asked for: by name, or by the ending of the file."""
    ending = Path(arguments.output).suffix.removeprefix(".") if arguments.output is not None else ""
    form: str = arguments.format or (ending if ending in _FORMATS else "text")
    if form == "html" and arguments.output is None:
        raise ConfigError("a page needs a file to be written to", remedy="--output model.html")
    if form == "html" and arguments.rank is not None:
        raise ConfigError("a page shows all ranks", remedy="leave out --rank")
    return form


def _programs(pm: PartitionedModel, rank: int | None) -> str:
    ranks = range(pm.plan.n_ranks) if rank is None else [rank]
    codes = {each: pm.graph(each).code.strip() for each in ranks}
    return "\n\n\n".join(f"{_heading(pm.plan, each)}\n{code}" for each, code in codes.items())


def _heading(plan: Plan, rank: int) -> str:
    """A comment that says whose program follows."""
    place = next(ranks.index(rank) for ranks in pipelines(plan.grid) if rank in ranks)
    stages = [str(index) for index, stage in enumerate(plan.stages) if place in stage.ranks]
    return f"# rank {rank} of {plan.n_ranks}, on {plan.devices[rank]}: stage{'s' if len(stages) > 1 else ''} {' and '.join(stages)}"


def _simulate(arguments: argparse.Namespace) -> int:
    pm = _partition(call_factory(arguments.factory), arguments)
    simulation = pm.simulate()
    say(arguments, str(simulation))
    if arguments.timeline is not None:
        drawn = Path(arguments.timeline).suffix == ".svg"
        write_text(arguments.timeline, simulation.timeline.svg() if drawn else simulation.timeline.to_json(), "the timeline")
        say(arguments, f"timeline written to {arguments.timeline}")
    numbers: dict[str, Any] = {
        "plan": pm.plan.hash,
        "step_time": simulation.step_time,
        "bubble_fraction": simulation.bubble_fraction,
        "latency": simulation.latency,
        "throughput": simulation.throughput,
        "peak_memory": list(simulation.peak_memory),
        "memory": [dict(memory) for memory in simulation.memory],
        "communication": [{"source": one, "destination": other, "bytes": size} for (one, other), size in simulation.communication.items()],
    }
    write_json(arguments, "simulation", numbers)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    made = call_factory(arguments.factory)
    report = _partition(made, arguments).check(*(made.args or ()), **made.kwargs)
    say(arguments, str(report))
    write_json(arguments, "result", {"equal": bool(report), "report": str(report).splitlines()})
    return 0 if report else 1


def _partition(made: Made, arguments: argparse.Namespace) -> PartitionedModel:
    plan = None
    if arguments.plan is not None:
        decided = [name for name in _DECIDED if getattr(arguments, name) is not None]
        # A plan may be simulated on another machine than it was made for.
        if decided and (decided != ["cluster"] or arguments.command != "simulate"):
            options = ", ".join(f"--{name.replace('_', '-')}" for name in decided)
            raise ConfigError(f"--plan gives a whole plan, which leaves nothing for {options} to decide", remedy=f"leave out {options}")
        plan = Plan.from_json(read_text(arguments.plan, "the plan file", "partitioner plan ... --json FILE writes one"))
    return partition(
        made.model,
        devices=arguments.devices,
        mode=parse_mode(arguments.mode or "auto"),
        example_inputs=made.args,
        example_kwargs=made.kwargs,
        schedule=arguments.schedule,
        n_microbatches=arguments.microbatches,
        recompute=arguments.recompute,
        cluster=arguments.cluster,
        memory_limit=arguments.memory_limit,
        plan=plan,
    )
