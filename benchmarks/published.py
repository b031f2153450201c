"""Predictions beside a published table: Megatron-LM on A100s (Korthikanti et al., arXiv 2205.05198, table 5 and figure 1).

    python -m benchmarks.published            # every row; minutes: 96 blocks are traced, cut, differentiated and stepped through
    python -m benchmarks.published --rows 22B --layers 8     # fewer blocks than the row has, for a quick look (not compared)
    python -m benchmarks.published --rows 175B --replicas 16 --policies full          # the same on 1,024 devices, with seconds of each step

A plain PyTorch GPT is traced on the meta device, partitioned as the row says, lowered to programs, and the programs are run on the clock
of ``Cluster.preset("a100-80gb")``. Nothing is fitted to a row. What the prediction rests on, and where it comes from:

    peaks, bandwidths, latencies, tiles     cost_models/presets.toml, each with its source
    fusion="hand"                           the paper's implementation: scale, mask and softmax are a kernel, bias-GELU and
                                            bias-dropout-add are; dropout after the softmax is one of its own
    18 bytes a parameter                    mixed precision with Adam: 2 + 4 (float32 gradient) + 4 (float32 parameter) + 8
    64 bytes moved a parameter              Megatron-LM's step with float32 gradients (megatron/optimizer/optimizer.py): 4 to clear them,
                                            8 to unscale them and look for infinities, 4 for the norm, 8 to clip, as training begins,
                                            28 for Adam (apex FusedAdam: four values read, three written), 6 to write 16-bit parameters;
                                            and 6 for sums: each product of a microbatch adds 8 bytes in float32 (apex
                                            fused_weight_gradient_mlp_cuda), where programs write 2, and from the second on add 6

The published memory is that of the transformer layers of the first stage; embeddings are separate. "kept" is memory between a
forward and its backward, which the paper's formula counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from cost_models.simulator.simulate import simulate_programs
from partitioner import Constraints
from partitioner.experiments.models.subject import trace_subject
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.plan_mesh import plan_mesh
from partitioner.specialize.simulate_plan import Timed, timed_programs
from passes.ir.mesh import Mesh

__all__ = ["SEQUENCE", "Gpt", "Predicted", "Row", "predict", "rows", "simulated", "update_seconds"]

SEQUENCE, VOCABULARY, DROPOUT = 2048, 51200, 0.1
OPTIMIZER_TRAFFIC = 4 + 8 + 4 + 8 + 28 + 6 + 6
"""Bytes that the optimizer's step moves for each parameter; see the module."""

GIB = 2**30

Value = TypeVar("Value")
"""Result of a step."""


class Block(nn.Module):
    """A transformer block with decomposed attention: products, softmax, dropout."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """Attention and a perceptron, each added to its input."""
        batch, length, hidden = x.shape
        fused = self.query_key_value(self.attention_norm(x)).view(batch, length, self.heads, 3, hidden // self.heads)
        query, key, value = fused.permute(3, 0, 2, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1)) / math.sqrt(hidden // self.heads)
        weights = self.dropout(scores.masked_fill(future, -10000.0).softmax(-1))
        x = x + self.dropout(self.projection((weights @ value).transpose(1, 2).reshape(batch, length, hidden)))
        result: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return result


class Gpt(nn.Module):
    """Tokens and the tokens that follow -> loss; the weight of the head is that of the embedding."""

    def __init__(self, layers: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Parameter(torch.empty(SEQUENCE, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("future", torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the mean loss over all tokens."""
        x = self.dropout(self.token(tokens) + self.position)
        for block in self.blocks:
            x = block(x, self.future)
        logits = nn.functional.linear(self.norm(x), self.token.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten())


@dataclass(frozen=True)
class Row:
    """One model of the table.

    Attributes:
        sizes: the columns that say what is run.
        seconds: ``"full"`` and ``"seqsel"`` -> seconds of an iteration.
        memory: GiB by what they are for.
    """

    name: str
    sizes: Mapping[str, int]
    seconds: Mapping[str, float]
    memory: Mapping[str, float]


@dataclass(frozen=True)
class Predicted:
    """Prediction of one row's model under one policy.

    Attributes:
        simulation: forward and backward.
        update: seconds of the optimizer's step.
        took: seconds of the processor that tracing, planning, lowering and simulating took.
        layer_bytes: of the blocks' parameters on a device, which the published bytes are of.
    """

    simulation: Simulation
    update: float
    took: Mapping[str, float]
    layer_bytes: int

    @property
    def seconds(self) -> float:
        """An iteration."""
        return self.simulation.step_time + self.update

    @property
    def state_bytes(self) -> int:
        """Parameters, their gradients and the optimizer's state on the first device: 18 bytes for each 14 of the optimizer's."""
        return self.simulation.memory[0].optimizer // 7 * 9


def rows() -> list[Row]:
    """Return the published table."""
    table = json.loads(Path(__file__).with_suffix("").joinpath("megatron_a100.json").read_text(encoding="utf-8"))
    words = ("name", "iteration_s", "memory_gib")
    return [
        Row(row["name"], {key: row[key] for key in row if key not in words}, row["iteration_s"], row["memory_gib"]) for row in table["rows"]
    ]


def predict(row: Row, policy: str) -> Predicted:
    """Trace, partition, lower and simulate.

    Args:
        policy: ``"none"``, ``"full"``, or ``"seqsel"``: selective recomputation with the sequence cut beside the tensors.
    """
    sizes, took, replicas = row.sizes, _Steps(), row.sizes.get("replicas", 1)
    with torch.device("meta"):
        model = Gpt(sizes["layers"], sizes["hidden"], sizes["heads"]).half()
        tokens = torch.zeros(replicas * sizes["global_batch"], SEQUENCE, dtype=torch.int64)
    tensor, pipeline, interleave = sizes["tensor"], sizes["pipeline"], sizes["interleave"]
    cluster = Cluster.preset("a100-80gb", nodes=replicas * sizes["devices"] // 8, devices_per_node=8)
    cut = dict.fromkeys(("heads", "ffn", "vocab", *(("sequence",) if policy == "seqsel" else ())), "tensor")
    per_stage = sizes["layers"] // (pipeline * interleave)
    stages = {f"blocks.{index * per_stage}": "beginning" for index in range(1, pipeline * interleave)}
    pipelined: dict[str, Any] = {}
    if pipeline > 1:
        pipelined = {"schedule": "Interleaved1F1B", "stages_per_rank": interleave}
        pipelined["n_microbatches"] = sizes["global_batch"] // sizes["microbatch"]
    subject = took.of("trace", lambda: trace_subject(row.name, (model, (tokens, tokens)), training=True))
    dimensions = (("data", replicas), ("pipeline", pipeline), ("tensor", tensor))
    mesh = Mesh(tuple((name, size) for name, size in dimensions if size > 1))
    request = PlanRequest(
        mode="pipeline" if pipeline > 1 else "model",
        devices=("meta",) * mesh.size,
        recompute="selective" if policy == "seqsel" else policy,
        memory_limit="1TiB",  # the plan is the row's, whatever it needs
        constraints=Constraints(axes=cut, split_spec=stages or None),
        modules=subject.modules,
        **pipelined,
    )
    found = took.of("plan", lambda: plan_mesh(subject.graph, cluster, request, None, mesh))
    asked = tuple((name, over) for name, over in found.axes if name in cut or over == "data")  # the planner may cut more than it must
    plan = dataclasses.replace(found, axes=asked)
    timed = took.of("lower", lambda: timed_programs(subject.traced, plan))
    simulation = took.of("simulate", lambda: simulated(timed, cluster, plan.batch_size))
    update = update_seconds(simulation, cluster)
    layer_bytes = sum(
        parameter.numel() * 2 // (tensor if parameter.dim() > 1 else 1) for block in model.blocks for parameter in block.parameters()
    )
    return Predicted(simulation, update, took, layer_bytes // pipeline)


def update_seconds(simulation: Simulation, cluster: Cluster) -> float:
    """Return the seconds of the optimizer's step, on the device that holds most."""
    most = max(memory.optimizer for memory in simulation.memory) // 14
    return OPTIMIZER_TRAFFIC * most / cluster.devices[0].bandwidth


class _Steps(dict[str, float]):
    """Step -> seconds of the processor."""

    def of(self, name: str, step: Callable[[], Value]) -> Value:
        """Do a step."""
        started = time.process_time()
        result = step()
        self[name] = time.process_time() - started
        return result


def simulated(timed: Timed, cluster: Cluster, batch: int) -> Simulation:
    """Simulate a step of some programs as the measured code runs it: mixed precision, kernels fused by hand."""
    return simulate_programs(
        timed.programs,
        cluster,
        Roofline(),
        batch,
        optimizer="adamw",
        n_row_parts=timed.n_row_parts,
        mixed_precision=True,
        representatives=timed.representatives,
        fusion="hand",
    )


def compare(row: Row, policies: Sequence[str] = ("full", "seqsel", "none")) -> Iterator[tuple[str, float, float]]:
    """Yield (name, published, predicted) of a row."""
    for policy in policies:
        found = predict(row, policy)
        memory = found.simulation.memory[0]
        steps = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.took.items())
        print(f"# {row.name} {policy}: {steps}; bubble {found.simulation.bubble_fraction:.1%}", flush=True)
        if policy in row.seconds:
            yield f"{row.name} iteration, {policy} [s]", row.seconds[policy], found.seconds
        if policy == "full":
            yield f"{row.name} state, layers alone [GiB]", row.memory["par_opt"], 9 * found.layer_bytes / GIB
            yield f"{row.name} state, with embeddings [GiB]", row.memory["par_opt"], found.state_bytes / GIB
        key = f"activations_{policy}"
        if key in row.memory:
            yield f"{row.name} activations kept, {policy} [GiB]", row.memory[key], memory.kept / GIB


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Predictions beside a published table.")
    parser.add_argument("--rows", nargs="*", help="names of rows; all where nothing is said")
    parser.add_argument("--layers", type=int, help="blocks instead of the row's")
    parser.add_argument("--policies", nargs="*", default=["full", "seqsel", "none"], help="full, seqsel, none; all where nothing is said")
    parser.add_argument("--replicas", type=int, help="each with the row's devices and batch; not compared")
    arguments = parser.parse_args()
    chosen = [row for row in rows() if not arguments.rows or row.name in arguments.rows]
    if arguments.layers:
        chosen = [Row(row.name, {**row.sizes, "layers": arguments.layers}, row.seconds, row.memory) for row in chosen]
    if arguments.replicas:
        chosen = [Row(row.name, {**row.sizes, "replicas": arguments.replicas}, row.seconds, row.memory) for row in chosen]
    lines = [line for row in chosen for line in compare(row, arguments.policies)]
    print(f"{'':36} {'published':>9} {'predicted':>9}  error")
    for what, published, predicted in lines:
        print(f"{what:36} {published:9.2f} {predicted:9.2f}  {predicted / published - 1:+.1%}")


if __name__ == "__main__":
    main()
