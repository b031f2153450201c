"""Bytes sent and saved by a training step of a language model that returns its loss, counted from the programs.

    python -m benchmarks.own_losses                               # ten models on 4 and 8 ranks; minutes
    python -m benchmarks.own_losses --models GPT-2 --ranks 4      # two lines

tensor       bytes that a rank sends to the next one of a ring, beside Megatron's formula: four sums of activations a layer, those after
             the embedding and of its gradient, and three numbers a token for a loss over a cut vocabulary (Shoeybi et al., "Megatron-LM",
             2019). A sum that is a reduce_scatter and an all_gather, with the sequence cut between (Korthikanti et al., 2022), is as much
sequence     the same with attention that gathers, beside keys and values of every attention, their gradients, and those of all parameters
activations  the most that a rank keeps, as a multiple of one device's divided by the number of ranks: 1.0 is the ideal. Attention that
             gathers has all keys and values of a layer at once on every rank, which the other ways have not
"""

from __future__ import annotations

import argparse
import copy
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from partitioner import Constraints, PartitionedModel, partition
from passes.ir.comm.primitives import COLLECTIVES, all_gather, all_reduce, all_to_all, reduce_scatter

ROWS, LENGTH, VOCABULARY, WIDTH, FFN, LAYERS, HEADS = 8, 256, 2048, 256, 1024, 2, 8
ELEMENT = 4
"""Bytes of a number in float32."""

WAYS = ("gather", "ulysses", "ring")
"""To share attention over a sequence."""

_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}
_COMMON = {"intermediate_size": FFN, **_SIZES}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": VOCABULARY}
_GPT2_WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _model(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of transformers from its configuration."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        return model

    return make


MODELS = {
    "GPT-2": _model("GPT2LMHeadModel", "GPT2Config", loss_type="ForCausalLM", **_GPT2, **_GPT2_WITHOUT_DROPOUT),
    "Llama": _model("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=HEADS, **_COMMON),
    "Qwen2": _model("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=HEADS, **_COMMON),
    "Qwen3": _model("Qwen3ForCausalLM", "Qwen3Config", num_key_value_heads=HEADS, head_dim=WIDTH // HEADS, **_COMMON),
    "Mistral": _model("MistralForCausalLM", "MistralConfig", num_key_value_heads=HEADS, **_COMMON),
    "Phi": _model("PhiForCausalLM", "PhiConfig", resid_pdrop=0.0, embd_pdrop=0.0, **_COMMON),
    "GPT-NeoX": _model("GPTNeoXForCausalLM", "GPTNeoXConfig", **_COMMON),
    "OPT": _model("OPTForCausalLM", "OPTConfig", dropout=0.0, ffn_dim=FFN, word_embed_proj_dim=WIDTH, **_SIZES),
    "BERT": _model("BertForMaskedLM", "BertConfig", **_NO_DROPOUT, **_COMMON),
    "RoBERTa": _model("RobertaForMaskedLM", "RobertaConfig", max_position_embeddings=LENGTH + 2, **_NO_DROPOUT, **_COMMON),
}


@dataclass(frozen=True)
class Counted:
    """One model on some ranks, in bytes a step and rank.

    Attributes:
        tensor: what is given to collectives in tensor mode.
        megatron: by the formula.
        sequence: what is given to collectives in sequence mode.
        context: by the formula.
        activations: mode, or way to share attention over a sequence -> the most that a rank keeps, over one device's divided by the
            number of ranks.
    """

    tensor: int
    megatron: int
    sequence: int
    context: int
    activations: dict[str, float]


def counted(make: Callable[[], nn.Module], ranks: int) -> Counted:
    """Partition a model in tensor, sequence and data mode, and count from its programs."""
    torch.manual_seed(0)
    model, tokens = make().train(), torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    inputs = {"input_ids": tokens, "labels": tokens}

    def made(mode: str, count: int, attention: str | None = None) -> PartitionedModel:
        constraints = None if attention is None else Constraints(attention=attention)
        return partition(copy.deepcopy(model), count, mode, example_kwargs=inputs, recompute="none", constraints=constraints)

    in_sequence = {attention: made("sequence", ranks, attention) for attention in WAYS}
    parameters = sum(parameter.numel() for parameter in model.parameters()) * ELEMENT
    activation = ROWS * LENGTH * WIDTH * ELEMENT
    one_device = _kept(made("model", 1))
    sums = (4 * LAYERS + 2) * activation + 3 * ROWS * LENGTH * ELEMENT
    return Counted(
        tensor=_sent(made("tensor", ranks)),
        megatron=2 * sums * (ranks - 1) // ranks,
        sequence=_sent(in_sequence["gather"]),
        context=(4 * LAYERS * activation + 2 * parameters) * (ranks - 1) // ranks,
        activations={mode: _kept(pm) / one_device * ranks for mode, pm in {**in_sequence, "data": made("data", ranks)}.items()},
    )


def _sent(pm: PartitionedModel) -> int:
    """Return the bytes that the first rank sends in the collectives of a step, each over a ring."""
    program, sent = pm.graph(0).graph, Fraction(0)
    for node in program.nodes:
        if node.target in COLLECTIVES:
            n_ranks = len(node.kwargs.get("group", node.args[-1]))
            sent += node.meta["bytes"] * (n_ranks - 1) * _TIMES[node.target](n_ranks)
    return int(sent)


_TIMES: Mapping[Any, Callable[[int], Fraction]] = {
    all_reduce: lambda n: Fraction(2, n),
    reduce_scatter: lambda n: Fraction(1, n),
    all_to_all: lambda n: Fraction(1, n),
    all_gather: lambda _: Fraction(1),
}
"""Collective -> how often the bytes that it is given go to the next rank, for each of the other ranks."""


def _kept(pm: PartitionedModel) -> int:
    return max(memory.highest["activations"][0] for memory in pm.simulate().memory)


def _line(name: str, ranks: int, found: Counted) -> str:
    mib = [f"{size / 2**20:8.2f}" for size in (found.tensor, found.megatron, found.sequence, found.context)]
    kept = " ".join(f"{found.activations[mode]:8.2f}" for mode in (*WAYS, "data"))
    return f"{name:10} {ranks:5}  {mib[0]} {mib[1]}    {mib[2]} {mib[3]}    {kept}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL", help="default: all")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8], metavar="N", help="default: 4 8")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    columns = " ".join(f"{mode:>8}" for mode in (*WAYS, "data"))
    print(f"{'':16}  {'tensor, MiB':>17}    {'sequence, MiB':>17}    {'activations x n: sequence by':>{len(columns) - 9}} ")
    print(f"{'model':10} {'ranks':>5}  {'sent':>8} {'Megatron':>8}    {'sent':>8} {'formula':>8}    {columns}")
    for name in options.models:
        for ranks in options.ranks:
            print(_line(name, ranks, counted(MODELS[name], ranks)), flush=True)


if __name__ == "__main__":
    main()
