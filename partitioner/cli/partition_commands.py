"""The commands on one model: ``plan``, ``inspect``, ``simulate``, ``check``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cost_models.text_files import read_text, write_text
from partitioner.api import partition
from partitioner.cli.options import CODES, Commands, add_command, add_json, say, write_json
from partitioner.experiments.run.factory import FactoryResult, call_factory
from partitioner.model.draw import draw
from partitioner.model.partitioned_model import PartitionedModel
from partitioner.options.mode import parse_mode
from passes.ir.errors import ConfigError
from passes.ir.mesh import pipelines
from passes.ir.plan import Plan

__all__ = ["add_partition_commands"]

_FORMATS = ("text", "dot", "svg", "html")
"""Output formats of ``inspect``."""

_DECIDED_BY_PLAN = ("mode", "schedule", "microbatches", "cluster", "memory_limit", "recompute")
"""Options whose values ``--plan`` gives."""


def add_partition_commands(commands: Commands) -> None:
    """Add the commands on one model to a parser."""
    plan = _add_model_command(commands, "plan", _plan, "plan a model and explain the plan", "net.py:factory --devices 4 --json plan.json")
    add_json(plan, "the plan, for --plan,")
    inspect = _add_model_command(commands, "inspect", _inspect, "show the programs of the ranks", "net.py:factory --devices 2 --rank 1")
    inspect.add_argument("--rank", type=int, metavar="N", help="one rank alone (default: all)")
    formats = "text: the programs (default); dot, svg: a drawing of the\nmodel over its ranks; html: a page with all there is to see"
    inspect.add_argument("--format", choices=_FORMATS, help=formats)
    inspect.add_argument("--output", metavar="FILE", help="write a file; its ending tells the format")
    example = "net.py:factory --devices 4 --cluster h100:1x4 --timeline step.svg"
    simulate = _add_model_command(commands, "simulate", _simulate, "run a step on a clock: time, memory, communication, timeline", example)
    timeline = "also write the timeline: .svg a picture, .json for\nhttps://ui.perfetto.dev"
    simulate.add_argument("--timeline", metavar="FILE", help=timeline)
    add_json(simulate, "the numbers")
    codes = "exit code: 0 equal, 1 not everything is equal, 2 the request was wrong or cannot be met"
    text = "compare the partitioned model with the original"
    check = _add_model_command(commands, "check", _check, text, "net.py:factory --devices 4", codes)
    add_json(check, "the result")


def _add_model_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str, codes: str = CODES
) -> argparse.ArgumentParser:
    """Add a command on a model, with the options that say how the model is partitioned."""
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
    """Print the programs of the ranks, or a drawing or page of them, or write it to a file."""
    output_format = _output_format(arguments)
    pm = _partition(call_factory(arguments.factory), arguments)
    if output_format == "html":
        pm.save_report(arguments.output)
    elif arguments.output is None:
        print(_render(pm, output_format, arguments.rank))
    else:
        write_text(arguments.output, _render(pm, output_format, arguments.rank) + "\n", f"the {output_format}")
    if arguments.output is not None:
        print(f"{output_format} written to {arguments.output}")
    return 0


def _render(pm: PartitionedModel, output_format: str, rank: int | None) -> str:
    """Return the programs as text, or a drawing as dot or svg; of one rank, or of all if it is None."""
    if output_format == "text":
        return _programs_text(pm, rank)
    drawing = draw(pm, ranks=None if rank is None else [rank])
    return drawing.dot() if output_format == "dot" else drawing.svg()


def _output_format(arguments: argparse.Namespace) -> str:
    """Return the format given by ``--format``, or else by the extension of the output file."""
    extension = Path(arguments.output).suffix.removeprefix(".") if arguments.output is not None else ""
    output_format: str = arguments.format or (extension if extension in _FORMATS else "text")
    if output_format == "html" and arguments.output is None:
        raise ConfigError("a page needs a file to be written to", remedy="--output model.html")
    if output_format == "html" and arguments.rank is not None:
        raise ConfigError("a page shows all ranks", remedy="leave out --rank")
    return output_format


def _programs_text(pm: PartitionedModel, only_rank: int | None) -> str:
    """Return the code of one rank, or of all, each under its heading."""
    ranks = range(pm.plan.n_ranks) if only_rank is None else [only_rank]
    codes = {rank: pm.graph(rank).code.strip() for rank in ranks}
    return "\n\n\n".join(f"{_heading(pm.plan, rank)}\n{code}" for rank, code in codes.items())


def _heading(plan: Plan, rank: int) -> str:
    """Return a comment such as ``# rank 1 of 2, on cpu: stage 1``."""
    position = next(ranks.index(rank) for ranks in pipelines(plan.grid) if rank in ranks)
    stages = [str(index) for index, stage in enumerate(plan.stages) if position in stage.ranks]
    return f"# rank {rank} of {plan.n_ranks}, on {plan.devices[rank]}: stage{'s' if len(stages) > 1 else ''} {' and '.join(stages)}"


def _simulate(arguments: argparse.Namespace) -> int:
    pm = _partition(call_factory(arguments.factory), arguments)
    simulation = pm.simulate()
    say(arguments, str(simulation))
    if arguments.timeline is not None:
        is_picture = Path(arguments.timeline).suffix == ".svg"
        write_text(arguments.timeline, simulation.timeline.svg() if is_picture else simulation.timeline.to_json(), "the timeline")
        say(arguments, f"timeline written to {arguments.timeline}")
    messages = [{"source": source, "destination": target, "bytes": size} for (source, target), size in simulation.communication.items()]
    numbers: dict[str, Any] = {
        "plan": pm.plan.hash,
        "step_time": simulation.step_time,
        "bubble_fraction": simulation.bubble_fraction,
        "latency": simulation.latency,
        "throughput": simulation.throughput,
        "peak_memory": list(simulation.peak_memory),
        "memory": [dict(memory) for memory in simulation.memory],
        "communication": messages,
    }
    write_json(arguments, "simulation", numbers)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    made = call_factory(arguments.factory)
    report = _partition(made, arguments).check(*(made.args or ()), **made.kwargs)
    say(arguments, str(report))
    write_json(arguments, "result", {"equal": bool(report), "report": str(report).splitlines()})
    return 0 if report else 1


def _partition(made: FactoryResult, arguments: argparse.Namespace) -> PartitionedModel:
    """Partition the model of a factory as the options say."""
    plan = _given_plan(arguments)
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


def _given_plan(arguments: argparse.Namespace) -> Plan | None:
    """Read the plan of ``--plan``; raises ConfigError if options contradict it."""
    if arguments.plan is None:
        return None
    conflicts = [name for name in _DECIDED_BY_PLAN if getattr(arguments, name) is not None]
    # A plan may be simulated on another machine than it was made for.
    if conflicts and (conflicts != ["cluster"] or arguments.command != "simulate"):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in conflicts)
        raise ConfigError(f"--plan gives a whole plan, which leaves nothing for {options} to decide", remedy=f"leave out {options}")
    return Plan.from_json(read_text(arguments.plan, "the plan file", "partitioner plan ... --json FILE writes one"))
