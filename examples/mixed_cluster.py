"""Plan one model on two kinds of GPUs: a node of H100s beside a node of V100s. The faster ones get more of the layers.

    python examples/mixed_cluster.py
    python examples/mixed_cluster.py --layers 8 --width 1024

The planner decides what stands where: which dimension of the mesh runs along the slow link between the nodes, and how many layers each kind
of device holds, in its own memory. Beside the plan stands the same mesh with equal layers everywhere. Nothing runs: the model is on meta.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from cost_models.hardware.clusters import Cluster, Level, Link
from cost_models.hardware.units import format_bytes, format_seconds
from partitioner import Constraints
from partitioner.planner.plan import PlanProblem
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.describe import words_of
from partitioner.reports.module_names import module_range
from partitioner.reports.tables.table import align
from partitioner.tracing.trace import trace
from passes.ir.mesh import pipelines

NODE = 4


def mixed() -> Cluster:
    """Four H100s and four V100s, each node with its own links inside and one link of 100 Gbit/s between the two."""
    devices = [*Cluster.preset("h100", 1, NODE).devices, *Cluster.preset("v100", 1, NODE).devices]
    return Cluster(devices, [Level(NODE, Link(latency=3e-6, bandwidth=150e9)), Level(2 * NODE, Link(latency=10e-6, bandwidth=12.5e9))])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args(argv)

    width = options.width
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True) for _ in range(options.layers)]
        model, sequences = nn.Sequential(*layers).half(), torch.zeros(64, 1024, width, dtype=torch.float16)
    cluster = mixed()
    graph = trace(model, (sequences,), {}, training=True)
    modules = frozenset(name for name, _ in model.named_modules())
    request = PlanRequest("auto", tuple(f"cuda:{rank}" for rank in range(2 * NODE)), modules=modules)
    problem = PlanProblem(graph, cluster, request, None, None)
    plan = problem.solve()

    print(f"{words_of(plan)}: {format_seconds(plan.step_time)} a step\n{plan.prediction.searched}\n")
    rows = [("stage", "ranks", "devices", "modules", "parameters", "forward", "memory")]
    places = pipelines(plan.grid)
    for index, stage in enumerate(plan.stages):
        ranks = [ranks[place] for ranks in places for place in stage.ranks]
        kinds = dict.fromkeys(cluster.devices[rank].name for rank in ranks)
        memory = format_bytes(max(plan.memory[rank] for rank in ranks))
        size, forward = f"{stage.parameter_count:,}", format_seconds(stage.forward_time)
        rows.append((str(index), ", ".join(map(str, ranks)), ", ".join(kinds), module_range(stage.modules), size, forward, memory))
    print("\n".join(align(rows, "><<<>>>")))

    count = len(plan.stages)
    equal = {str(options.layers * index // count): "beginning" for index in range(1, count)}
    pinned = dataclasses.replace(
        request,
        mode="pipeline" if count > 1 else "model",
        schedule=plan.schedule if count > 1 else None,
        stages_per_rank=count // len(places[0]),
        n_microbatches=plan.n_microbatches,
        recompute=plan.recompute,
        constraints=Constraints(split_spec=equal or None),
    )
    other = dataclasses.replace(problem, mesh=plan.grid, request=pinned).solve()
    print(
        f"\nequal layers on the same mesh: {format_seconds(other.step_time)} a step, {other.step_time / plan.step_time:.2f} times as long"
    )


if __name__ == "__main__":
    main()
