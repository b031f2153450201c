"""One step of a Mixtral, a mixture of experts, cut inside its layers over two devices.

    python examples/mixtral_experts.py
    python examples/mixtral_experts.py --devices 4

The library's block visits an expert only if some token chose it: a question to the values of a tensor, which no traced graph can ask.
Here every expert computes every token, and what a token did not choose is weighed by zero: the same numbers. Heads, the insides of the
experts and the vocabulary are cut; what is computed whole on every device is told under NOTES.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from partitioner import partition

WORDS, LENGTH, ROWS = 64, 8, 4


class AllExperts(nn.Module):
    """The mixture without a question to values. It takes over the weights of the library's block, under the same names."""

    def __init__(self, block: MixtralSparseMoeBlock) -> None:
        super().__init__()
        self.gate, self.experts, self.top_k = block.gate, block.experts, block.top_k

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden.flatten(0, 1)
        logits = self.gate(tokens)
        chosen, experts = torch.topk(logits.softmax(dim=1, dtype=torch.float), self.top_k, dim=-1)
        chosen = (chosen / chosen.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        weights = torch.zeros_like(logits).scatter(1, experts, chosen)
        result = torch.stack([expert(tokens) * weights[:, [index]] for index, expert in enumerate(self.experts)]).sum(dim=0)
        return result.view(hidden.shape), logits


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    original = transformers.MixtralForCausalLM(config).train()
    model = copy.deepcopy(original)
    for layer in model.model.layers:
        layer.block_sparse_moe = AllExperts(layer.block_sparse_moe)
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    pm = partition(model, options.devices, "tensor", example_kwargs=inputs)
    print(f"{pm}\n\n{pm.explain()}")

    expected = original(**inputs).loss
    expected.backward()
    loss = pm.train_step(**inputs)
    gradients = pm.full_gradients()
    differences = [abs(loss.item() - expected.item())]
    for name, parameter in original.named_parameters():
        found, exact = gradients[name], parameter.grad
        assert found is not None
        differences.append((found - (0 if exact is None else exact)).abs().max().item())
    print(f"\nloss {loss.item():.6f}, of the library's model on one device {expected.item():.6f}")
    print(f"largest difference {max(differences):.1e} over the loss and all gradients")


if __name__ == "__main__":
    main()
