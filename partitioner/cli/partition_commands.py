"""Run the commands on one model: ``plan``, ``inspect``, ``simulate``, ``check``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_models.text_files import read_text, write_text
from partitioner.api import partition
from partitioner.cli.options import FORMATS
from partitioner.cli.output import say, write_json
from partitioner.cli.partition_options import flags_of, given_constraints, given_options
from partitioner.experiments.models.factory import FactoryResult, call_factory
from partitioner.model.draw import draw
from partitioner.model.partitioned_model import PartitionedModel
from partitioner.options.constraints import Constraints
from passes.ir.errors import ConfigError
from passes.ir.mesh import pipelines
from passes.ir.plan import Plan

_BESIDE_PLAN = ("devices", "training", "optimizer", "precision", "inputs", "batch_dims", "progress")
"""Options that may be given beside ``--plan``; all others decide something that the plan decides already."""

_OF_INFERENCE = ("batches", "prompt", "new_tokens")
"""Options of ``--inference``."""


def plan(arguments: argparse.Namespace) -> int:
    """Plan a model, and explain the plan."""
    pm = _partition(_made(arguments), arguments)
    say(arguments, pm.explain())
    write_json(arguments, "plan", pm.plan.to_json())
    return 0


def inspect(arguments: argparse.Namespace) -> int:
    """Print the programs of the ranks, or a drawing or page of them, or write it to a file."""
    output_format = _output_format(arguments)
    pm = _partition(_made(arguments), arguments)
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
    output_format: str = arguments.format or (extension if extension in FORMATS else "text")
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


def simulate(arguments: argparse.Namespace) -> int:
    """Run a step, or inference, on a clock."""
    if arguments.inference:
        return _simulate_inference(arguments)
    needless = [name for name in _OF_INFERENCE if getattr(arguments, name) is not None]
    if needless:
        raise ConfigError(f"--{needless[0].replace('_', '-')} is for inference", remedy="add --inference")
    pm = _partition(_made(arguments), arguments)
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
        "memory_limit": list(simulation.limits),
        "over_limit": {str(rank): round(excess) for rank, excess in simulation.over_limit.items()},
        "memory": [dict(memory) for memory in simulation.memory],
        "communication": messages,
    }
    write_json(arguments, "simulation", numbers)
    return 0


def _simulate_inference(arguments: argparse.Namespace) -> int:
    """Simulate batches of several sizes in evaluation mode."""
    if arguments.timeline is not None:
        raise ConfigError("--timeline is of a step", remedy="leave out --inference, or --timeline")
    if arguments.training:
        raise ConfigError("--training does not fit --inference, which is in evaluation mode", remedy="leave out one of them")
    made = _made(arguments)
    made.model.eval()
    pm = _partition(made, arguments)
    given = {name: value for name in _OF_INFERENCE if (value := getattr(arguments, name)) is not None}
    table = pm.simulate_inference(**given)
    say(arguments, str(table))
    numbers = [
        {
            "batch": each.rows,
            "first_token": each.first_token,
            "per_token": each.per_token,
            "latency": each.latency,
            "throughput": each.throughput,
            "peak_memory": list(each.peak_memory),
        }
        for each in table.batches
    ]
    write_json(arguments, "simulation", {"plan": pm.plan.hash, "prompt": table.prompt, "batches": numbers})
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Compare the partitioned model with the original."""
    made = _made(arguments)
    report = _partition(made, arguments).check(*(made.args or ()), **made.kwargs)
    say(arguments, str(report))
    write_json(arguments, "result", {"equal": bool(report), "report": str(report).splitlines()})
    return 0 if report else 1


def _made(arguments: argparse.Namespace) -> FactoryResult:
    """Call the factory, with the arguments that options give."""
    given = {name: value for name in ("batch", "sequence") if (value := getattr(arguments, name)) is not None}
    return call_factory(arguments.factory, given)


def _partition(made: FactoryResult, arguments: argparse.Namespace) -> PartitionedModel:
    """Partition the model of a factory as the options say."""
    options, constraints = given_options(arguments), given_constraints(arguments)
    plan = _given_plan(arguments, [*options, *constraints])
    return partition(
        made.model,
        example_inputs=made.args,
        example_kwargs=made.kwargs,
        constraints=Constraints(**constraints) if constraints else None,
        plan=plan,
        **options,
    )


def _given_plan(arguments: argparse.Namespace, given: Sequence[str]) -> Plan | None:
    """Read the plan of ``--plan``; raises ConfigError if options contradict it."""
    if arguments.plan is None:
        return None
    conflicts = [name for name in given if name not in _BESIDE_PLAN]
    # A plan may be simulated on another machine than it was made for.
    if conflicts and (conflicts != ["cluster"] or arguments.command != "simulate"):
        options = ", ".join(flags_of(name)[0] for name in conflicts)
        raise ConfigError(f"--plan gives a whole plan, which leaves nothing for {options} to decide", remedy=f"leave out {options}")
    return Plan.from_json(read_text(arguments.plan, "the plan file", "partitioner plan ... --json FILE writes one"))
