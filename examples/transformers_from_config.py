"""Pipeline models of the transformers library as they are: no change to their code, no list of what is supported.

    python examples/transformers_from_config.py                    # all six
    python examples/transformers_from_config.py --only llama t5 --devices 2 --schedule ZBV

Each model is built small from its configuration, takes labels and returns its loss. It is partitioned, trained for one step, and
every gradient is compared with that of the unpartitioned model. (ResNet normalises over the batch, so it runs in one microbatch.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from partitioner import partition

WORDS, LENGTH, ROWS = 128, 16, 8
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def architectures() -> Mapping[str, tuple[nn.Module, Mapping[str, Any]]]:
    """Return name -> model and keyword inputs."""
    tokens = torch.randint(2, WORDS, (ROWS, LENGTH))
    images = {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.randint(10, (ROWS,))}
    text = {"input_ids": tokens, "labels": tokens}
    masked = {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(tokens.shape) > 0.3, -100)}
    gpt2 = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=48, n_head=4, n_layer=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    llama = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    bert = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96, **NO_DROPOUT
    )
    t5 = transformers.T5Config(
        vocab_size=WORDS, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    vit = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8,
        num_labels=10, **NO_DROPOUT,
    )  # fmt: skip
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=10)
    return {
        "gpt2": (transformers.GPT2LMHeadModel(gpt2), text),
        "llama": (transformers.LlamaForCausalLM(llama), text),
        "bert": (transformers.BertForMaskedLM(bert), masked),
        "t5": (transformers.T5ForConditionalGeneration(t5), text),
        "vit": (transformers.ViTForImageClassification(vit), images),
        "resnet": (transformers.ResNetForImageClassification(resnet), images),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="gpt2 llama bert t5 vit resnet")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--schedule", default="1F1B")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    print("model     parameters   stages   messages   partition in       loss   gradient difference")
    overall = 0.0
    for name, (model, inputs) in architectures().items():
        if options.only and name not in options.only:
            continue
        model.train()
        start = time.perf_counter()
        pm = partition(
            model, options.devices, "pipeline", example_kwargs=inputs,
            n_microbatches=1 if name == "resnet" else 4, schedule=options.schedule,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        loss = pm.train_step(**inputs)
        model(**inputs).loss.backward()
        exact = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
        gradients = ((key, gradient) for key, gradient in pm.full_gradients().items() if gradient is not None)
        largest = max((gradient - exact[key]).abs().max().item() for key, gradient in gradients)
        overall = max(overall, largest)
        sends = sum(node.name.startswith("send") for graph in pm.graphs for node in graph.graph.nodes)
        print(
            f"{name:9s}{sum(p.numel() for p in model.parameters()):11,d}{len(pm.plan.stages):9d}{sends:11d}"
            f"{seconds:13.1f} s{loss.item():13.6f}{largest:17.1e}"
        )
    print(f"\nlargest difference {overall:.1e} over all gradients of all models")


if __name__ == "__main__":
    main()
