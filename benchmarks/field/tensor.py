"""Bytes of tensor parallelism beside Megatron's formula, parameters of a rank, and seconds beside the model's own ``tp_plan``.

The bytes are counted from the programs of a training step, on the meta device; nothing is computed. In all lines a collective of k ranks
counts without its factor (k-1)/k: an all_reduce of n bytes is 2 n, an all_gather or reduce_scatter that gives or takes n bytes is n.

    T   tokens                          h   width of the residual stream                L   layers
    e   bytes of a number in products: 4 in float32, 2 in bfloat16 and under autocast
    E   bytes of a number of the embedding, which autocast does not cast: 2 in bf16-true, else 4

    forward      2 T h E                 rows of the embedding, each of the rank that has them
                 2 L  2 T h e            after attention and after the perceptron
                 3  2 T 4                maxima, sums and labels' logits of a loss over a sharded vocabulary
    backward     2 L  2 T h e            before the perceptron and before attention
                 2 T h e                 before the head

With sequence parallelism each all_reduce of activations is a reduce_scatter and an all_gather (Korthikanti et al. 2022): as many bytes.
The gradients of copied parameters, of which each rank then has those of its own positions, are summed besides. Norms are less than 0.1 %
and left out; BERT has a copied matrix before its head, C = h h. Its table of positions, too, is one whose rows are looked up: another
reduce_scatter and all_gather, of one sample, where the table of two kinds of tokens is too short to be sharded and summed with it.

    sequence     2 C g                   g: bytes of a number of a gradient: 2 in bf16-true, else 4
                 2 T/rows h E            positions

Fewer heads of keys than ranks (Qwen2 7B over 8) are copied: each rank computes all of them, and the gradients of their two projections, of
width a, are summed once a step.

    copies       2 L  2 h a g

With sequence parallelism each rank computes the keys and values of its own positions alone, which is 1/k of the work, repeats them for all
H heads of queries, of width d, and exchanges positions for heads; backward, the first rank sends the gradients of its heads.

    exchanges    2 L  T (H d / k + ceil(H / k) d) e

Parameters of a rank are those of the first one, divided by 1/k of all: norms, and the matrix before BERT's head, are copied, as in
Megatron. The plan has ``heads``, ``ffn`` and ``vocab`` sharded, and ``sequence`` where it is sharded. The last columns have predicted
milliseconds: of the plan without constraints, and of one by the patterns that transformers ships with the model.

The planner shards these projections by the width of a head instead, and gathers: more bytes in less time. The columns of bytes are of
the copies.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.field.models import LAYERS, MODELS, ROWS, FieldModel
from benchmarks.rounds import table
from cost_models.hardware.clusters import Cluster
from partitioner import Constraints, PartitionError
from partitioner.experiments.models.factory import FactoryResult
from partitioner.experiments.models.subject import Subject
from partitioner.options.precision import autocast_of, true_dtype
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.specialize.simulate_plan import timed_programs
from partitioner.tracing.trace import trace
from passes.ir.comm.primitives import COLLECTIVES, all_gather, all_reduce
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan
from passes.ir.program import Program

RANKS = (2, 4, 8)
PRECISIONS = (None, "bf16-true", "bf16-mixed")
NAMES = ("heads", "ffn", "vocab")
CLUSTER = Cluster.preset("h100", devices_per_node=8)


@dataclass(frozen=True)
class Counted:
    """One plan.

    Attributes:
        n_bytes: that a rank's collectives move, without the factor (k-1)/k.
        n_parameters: elements that the first rank stores.
    """

    plan: Plan
    n_bytes: float
    n_parameters: int


def traced(model: FieldModel, precision: str | None) -> Subject:
    """Return a model of the field on the meta device, traced in training mode."""
    with torch.device("meta"):
        module, inputs = model.make().train(), dict(model.inputs)
    dtype = true_dtype(precision)
    module = module if dtype is None else module.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = trace(module, (), inputs, True, autocast=autocast_of(precision, module, CLUSTER))
    return Subject(model.name, FactoryResult(module, (), inputs), graph, "", frozenset(name for name, _ in module.named_modules()))


def formula_bytes(model: FieldModel, precision: str | None, count: int, *, in_sequence: bool) -> float:
    """Return the bytes of the formula of this module."""
    product, stored = 4 if precision is None else 2, 2 if precision == "bf16-true" else 4
    tokens, hidden = ROWS * model.sizes.length, model.sizes.hidden
    total: float = 2 * tokens * (hidden * (stored + (4 * LAYERS + 1) * product) + 3 * 4)
    if in_sequence and model.has_matrix_before_head:
        total += 2 * hidden * hidden * stored
    if (sizes := model.sizes).key_heads < count:
        total += 2 * LAYERS * 2 * hidden * sizes.key_heads * sizes.head * stored
        if in_sequence:
            total += 2 * LAYERS * tokens * sizes.head * (sizes.heads / count + math.ceil(sizes.heads / count)) * product
    if in_sequence and 0 < model.n_kinds < count:
        total += 2 * model.sizes.length * hidden * stored
    return total


def counted(subject: Subject, count: int, *, in_sequence: bool) -> Counted:
    """Plan and lower Megatron's tensor parallelism over some ranks, with or without sequence parallelism; count its bytes."""
    names = (*NAMES, "sequence") if in_sequence else NAMES
    plan = planned(subject, count, Constraints(axes=dict.fromkeys(names, "tensor")))
    chosen = tuple(each for each in plan.axes if each[0].partition("[")[0] in names)  # the planner adds others where that is faster
    plan = dataclasses.replace(plan, axes=chosen)
    program = timed_programs(subject.traced, plan).programs[0]
    of_parameters = (node for node in program.module.graph.nodes if node.op == "get_attr" and node.target in subject.graph.parameters)
    return Counted(plan, sent_bytes(program, count), sum(node.meta["val"].numel() for node in of_parameters))


def planned(subject: Subject, count: int, constraints: Constraints) -> Plan:
    """Return the plan of a step over some ranks, whatever memory it needs."""
    request = PlanRequest(
        mode="model",
        devices=("meta",) * count,
        recompute="none",
        memory_limit="64TiB",
        constraints=constraints,
        modules=subject.modules,
    )
    return plan_mesh(subject.graph, CLUSTER.first(count), request, None, Mesh((("tensor", count),)))


def sent_bytes(program: Program, count: int) -> float:
    """Return the bytes of a program's collectives over some ranks, without the factor (k-1)/k."""
    times = {all_reduce: 2.0, all_gather: float(count)}  # what a gather takes is a part
    collectives = [node for node in program.module.graph.nodes if node.target in COLLECTIVES]
    return sum(int(node.meta["bytes"]) * times.get(node.target, 1.0) for node in collectives)


def tp_plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the patterns of tensor parallelism that transformers ships with a model; empty: none."""
    found: dict[str, Any] = dict(getattr(model, "_tp_plan", None) or {})
    return {pattern: style for pattern, style in found.items() if isinstance(style, str)}


def main(names: Sequence[str] = (), ranks: Sequence[int] = RANKS) -> None:
    """Print the table.

    Args:
        names: parts of the names of models; empty: all.
    """
    head = ("model", "precision", "ranks", "bytes / formula", "with sequence", "parameters n / all", "ms", "ms by tp_plan")
    chosen = [model for model in MODELS if not names or any(name in model.name for name in names)]
    rows = [row for model in chosen for precision in PRECISIONS for row in rows_of(model, precision, ranks)]
    table("Tensor parallelism beside Megatron's formula: two layers, 2 x 4,096 tokens, H100", head, rows)


def rows_of(model: FieldModel, precision: str | None, ranks: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a model in one precision."""
    subject = traced(model, precision)
    module = subject.made.model
    n_elements = sum(parameter.numel() for parameter in module.parameters())
    for count in ranks:
        both = [counted(subject, count, in_sequence=in_sequence) for in_sequence in (False, True)]
        formulas = [formula_bytes(model, precision, count, in_sequence=in_sequence) for in_sequence in (False, True)]
        free, patterns = planned(subject, count, Constraints()), tp_plan_of(module)
        yield (
            model.name,
            precision or "float32",
            str(count),
            *(f"{each.n_bytes / formula:.3f}" for each, formula in zip(both, formulas, strict=True)),
            f"{both[0].n_parameters * count / n_elements:.3f}",
            f"{free.step_time * 1e3:.1f}",
            seconds_by(subject, count, patterns),
        )


def seconds_by(subject: Subject, count: int, patterns: Mapping[str, str]) -> str:
    """Return the milliseconds of a step by patterns; a dash where there are none or they do not fit."""
    if not patterns:
        return "-"
    try:
        return f"{planned(subject, count, Constraints(tp_plan=patterns)).step_time * 1e3:.1f}"
    except PartitionError:
        return "-"
