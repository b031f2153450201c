"""Generation over two processes beside transformers' own in one process: time of a token, tokens a second, equal tokens.

    python -m benchmarks.decode            # starts two processes with one thread each, gloo

GPT-2, Llama and Qwen3-MoE of eight layers, from config: prompts of 16 tokens, 16 new tokens, batches of 1 and 8. In one process the model
has one thread; over two, "pipeline" halves the layers, of which one process computes at a time, and "tensor" halves each product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.rounds import Measured, measure, ratio, run_tables, table
from partitioner import Constraints, PartitionedModel, partition

PROMPT, NEW = 16, 16
"""Tokens."""

WIDTH, LAYERS, VOCABULARY = 512, 8, 8192

_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=8, vocab_size=VOCABULARY))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**_SIZES))


def qwen3_moe() -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * WIDTH, "head_dim": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **experts))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "GPT-2": (gpt2, "transformer.h.4"),
    "Llama": (llama, "model.layers.4"),
    "Qwen3-MoE": (qwen3_moe, "model.layers.4"),
}
"""Model -> what makes it, and the layer at which the second stage begins."""


def _generating(model: Any, prompt: Tensor | list[Tensor]) -> Callable[[], Any]:
    return lambda: model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)


def _in_one_process(step: Callable[[], object]) -> Callable[[], object]:
    """Return a call that generates on the first process; the other waits."""
    return lambda: step() if dist.get_rank() == 0 else None


def _parts(model: nn.Module, prompt: Tensor, mode: str, layer: str) -> PartitionedModel:
    stages: dict[str, Any] = {"schedule": "1F1B", "constraints": Constraints(split_spec={layer: "beginning"})}
    return partition(model, ["cpu"] * 2, mode, example_inputs=(prompt,), progress=False, **(stages if mode == "pipeline" else {}))


def _row(name: str, batch: int, found: dict[str, Measured]) -> tuple[str, ...]:
    per_token = [f"{each.wall / NEW * 1e3:.1f}" for each in found.values()]
    throughput = [f"{batch * NEW / each.wall:,.0f}" for each in found.values()]
    ratios = [ratio(found[mode], found["one process"]) for mode in found if mode != "one process"]
    return (f"{name}, batch {batch}", *per_token, *throughput, *ratios)


def generation(rounds: int) -> None:
    rows = []
    for name, (make, layer) in MODELS.items():
        torch.manual_seed(0)
        model = make().eval()
        prompts = {batch: torch.randint(1, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(1)) for batch in (1, 8)}
        split = {mode: _parts(model, prompts[8], mode, layer) for mode in ("pipeline", "tensor")}
        for batch, prompt in prompts.items():
            expected = _generating(model, prompt)()
            ours = {mode: _generating(pm, prompt) for mode, pm in split.items()}
            assert all(torch.equal(step(), expected) for step in ours.values()), f"other tokens than those of {name}"
            rows.append(_row(name, batch, measure({"one process": _in_one_process(_generating(model, prompt)), **ours}, rounds, 1)))
    head = ("ms a token", "one process", "pipeline", "tensor", "tokens/s, one", "pipeline", "tensor", "pipeline / one", "tensor / one")
    table(f"Generation: {LAYERS} layers of width {WIDTH}, prompts of {PROMPT} tokens, {NEW} new ones; tokens are equal", head, rows)


if __name__ == "__main__":
    run_tables("benchmarks.decode", __doc__, {"generation": generation}, None)
