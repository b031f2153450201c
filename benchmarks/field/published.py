"""Plans of Llama 3.1 405B on 8,192 and 16,384 H100s beside the published figures (arXiv 2407.21783, table 4).

    python -m benchmarks.field --parts published            # minutes: 126 layers are traced and planned; none is run

The published mesh and schedule: tensor and sequence parallelism in a node (the axes sequence, heads, ffn and vocab are named), 16 ranks of
a pipeline with interleaved 1F1B, and the batch over the others, which store parts of parameters, gradients and optimizer state, and gather
parameters once a step: ``zero1``. Parameters are float32, products are bfloat16 (``precision="bf16-mixed"``), and gradients are summed in
float32. The number of stages of a rank is not published: the table has 4 and 8. The planner chooses what is recomputed, under 80 GB a
device. Each plan's programs are also simulated.

Model FLOPs of a token are 6 for each parameter, and 12 * layers * width * sequence for attention, as the paper counts them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

from benchmarks.rounds import table
from cost_models.hardware.clusters import Cluster
from partitioner import Constraints, PartitionedModel, partition

LAYERS, WIDTH, PARAMETERS = 126, 16384, 405.85e9
AXES = ("sequence", "heads", "ffn", "vocab")
LIMIT = "80GB"
STAGES_PER_RANK = (4, 8)


@dataclass(frozen=True)
class Row:
    """A published run.

    Attributes:
        tensor, pipeline, data: lengths of the mesh dimensions.
        batch_per_data_rank: sequences of a step.
        sequence: tokens of each.
        tflops: model TFLOP/s of a device.
    """

    devices: int
    tensor: int
    pipeline: int
    data: int
    batch_per_data_rank: int
    sequence: int
    tflops: float

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.data * self.batch_per_data_rank * self.sequence

    def tflops_of(self, step_time: float) -> float:
        """Return the model TFLOP/s of a device in a step of so many seconds."""
        flops_of_token = 6 * PARAMETERS + 12 * LAYERS * WIDTH * self.sequence
        return self.tokens * flops_of_token / step_time / self.devices / 1e12


def rows() -> list[Row]:
    """Return the published runs."""
    path = Path(__file__).parents[1] / "published" / "llama3_405b_h100.json"
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def partitioned(row: Row, stages_per_rank: int) -> PartitionedModel:
    """Return the model of a run; each microbatch is one sequence."""
    model, tokens = _llama(row)
    cluster = Cluster.preset("h100", nodes=row.devices // 8, devices_per_node=8)
    return partition(
        model,
        row.devices,
        {"zero1": row.data, "pipeline": row.pipeline, "tensor": row.tensor},
        example_kwargs={"input_ids": tokens, "labels": tokens},
        n_microbatches=row.batch_per_data_rank,
        schedule="Interleaved1F1B",
        stages_per_device=stages_per_rank,
        cluster=cluster,
        memory_limit=LIMIT,
        precision="bf16-mixed",
        constraints=Constraints(axes=dict.fromkeys(AXES, "tensor")),
        progress=False,
    )


def _llama(row: Row) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=53248,
            num_attention_heads=128,
            num_key_value_heads=8,
            vocab_size=128256,
            num_hidden_layers=LAYERS,
            max_position_embeddings=row.sequence,
            use_cache=False,
            attn_implementation="sdpa",
        )
        model = transformers.LlamaForCausalLM(config).train()
        return model, torch.zeros(row.data * row.batch_per_data_rank, row.sequence, dtype=torch.int64)


def _lines() -> Iterator[list[str]]:
    for row in rows():
        for stages_per_rank in STAGES_PER_RANK:
            pm = partitioned(row, stages_per_rank)
            plan, simulated = pm.plan, pm.simulate()
            steps = (plan.step_time, simulated.step_time)
            yield [
                f"{row.devices:,}",
                str(stages_per_rank),
                " / ".join(f"{step:.2f}" for step in steps),
                " / ".join(f"{row.tokens / step / row.devices:.0f}" for step in steps),
                " / ".join(f"{row.tflops_of(step):.0f}" for step in steps),
                f"{row.tflops:.0f}",
                " / ".join(f"{row.tflops_of(step) / row.tflops - 1:+.1%}" for step in steps),
                f"{max(plan.memory) / 1e9:.1f} / {max(simulated.peak_memory) / 1e9:.1f}",
                str(plan.recompute),
            ]


def main(_: Sequence[str] = ()) -> None:
    """Print the table."""
    head = ("devices", "stages a rank", "step, s", "tokens/s a device", "TFLOP/s", "published", "error", "GB", "recompute")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table(f"Llama 3.1 405B on H100s under {LIMIT}, planned / simulated", head, list(_lines()))


if __name__ == "__main__":
    main()
