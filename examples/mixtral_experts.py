"""One step of a Mixtral, a mixture of experts, cut inside its layers over two devices.

    python examples/mixtral_experts.py
    python examples/mixtral_experts.py --devices 4

The library's block visits an expert only if some token chose it. Its loop is traced as one product of all tokens, each with the matrices of
the experts that it chose (``partitioner.grouped_mm`` in the programs), so no expert computes a token that did not choose it. Heads, the
insides of the experts and the vocabulary are cut; replicated computations are listed under NOTES.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from partitioner import partition

WORDS, LENGTH, ROWS = 64, 8, 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).train()
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    pm = partition(model, options.devices, "tensor", example_kwargs=inputs)
    print(f"{pm}\n\n{pm.explain()}")

    expected = model(**inputs).loss
    expected.backward()
    loss = pm.train_step(**inputs)
    gradients = pm.full_gradients()
    differences = [abs(loss.item() - expected.item())]
    for name, parameter in model.named_parameters():
        found, exact = gradients[name], parameter.grad
        assert found is not None
        differences.append((found - (0 if exact is None else exact)).abs().max().item())
    print(f"\nloss {loss.item():.6f}, of the library's model on one device {expected.item():.6f}")
    print(f"largest difference {max(differences):.1e} over the loss and all gradients")


if __name__ == "__main__":
    main()
