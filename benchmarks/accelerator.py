"""A training step on one accelerator: of the model itself, of its program, and as planned; and the memory that both hold.

    python -m benchmarks.accelerator                  # three models in two precisions; half a minute on an H100 or H200
    python -m benchmarks.accelerator --rounds 30

The model and its program alternate, and each figure is a median. `ratio` is the program's time by the model's. Memory is that of a step
after gradients are cleared: planned, and the most that PyTorch's allocator gave out, workspaces of kernels included.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import partition

GPU, GIB = "cuda:0", 2**30
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """A model, and the keyword inputs of a step that returns the loss.

    Attributes:
        model: on the CPU.
        inputs: on the accelerator.
    """

    model: nn.Module
    inputs: Mapping[str, Any]


class _Perceptron(nn.Module):
    """Eight square layers, and the mean square of what they give."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())])

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, width) to a loss."""
        result: Tensor = self.layers(x).float().square().mean()
        return result


def _language(kind: str, config: str, **sizes: Any) -> Setting:
    transformers = importlib.import_module("transformers")
    tokens = torch.randint(30000, (8, 512), device=GPU)
    model = getattr(transformers, kind)(getattr(transformers, config)(use_cache=False, loss_type="ForCausalLM", **sizes))
    return Setting(model, {"input_ids": tokens, "labels": tokens})


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LLAMA = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}

MODELS: Mapping[str, Callable[[], Setting]] = {
    "perceptron, 8 x 4096, 8192 rows": lambda: Setting(_Perceptron(4096), {"x": torch.randn(8192, 4096, device=GPU)}),
    "GPT-2, 12 x 768, 8 x 512 tokens": lambda: _language("GPT2LMHeadModel", "GPT2Config", **_NO_DROPOUT),
    "Llama, 8 x 2048, 8 x 512 tokens": lambda: _language("LlamaForCausalLM", "LlamaConfig", vocab_size=32000, **_LLAMA),
}


def _seconds(step: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def measured(setting: Setting, precision: str, rounds: int) -> tuple[str, ...]:
    """Return a row of the table."""
    pm = partition(setting.model, [GPU], "model", example_kwargs=setting.inputs, precision=precision, optimizer="none")

    def ours() -> None:
        pm.train_step(**setting.inputs)
        pm.zero_grad()

    for _ in range(2):
        ours()
    torch.cuda.reset_peak_memory_stats()
    ours()
    held = torch.cuda.max_memory_allocated()
    model = setting.model.to(GPU)

    def theirs() -> None:
        with torch.autocast("cuda", PRECISIONS[precision], enabled=precision != "32-true"):
            output = model(**setting.inputs)
        (output if isinstance(output, Tensor) else output.loss).backward()
        model.zero_grad()

    steps = {"program": ours, "model": theirs}
    rows = [{name: _seconds(step) for name, step in steps.items()} for _ in range(rounds + 2)][2:]  # the first two rounds warm up
    program, original = (statistics.median(row[name] for row in rows) for name in steps)
    times = [f"{each * 1e3:.2f}" for each in (original, program, pm.plan.step_time)]
    memory = [f"{each / GIB:.2f}" for each in (max(pm.simulate().peak_memory), held)]
    return (*times, f"{program / original:.2f}", *memory)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        parser.exit(1, "PyTorch sees no accelerator\n")
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    line = "{:34}{:12}{:>11}{:>13}{:>13}{:>7}{:>14}{:>10}"
    print(line.format("model", "precision", "model, ms", "program, ms", "planned, ms", "ratio", "planned, GiB", "held, GiB"))
    for name, make in MODELS.items():
        for precision in PRECISIONS:
            print(line.format(name, precision, *measured(make(), precision, rounds)), flush=True)
            gc.collect()  # else the next row would hold what this one held
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
