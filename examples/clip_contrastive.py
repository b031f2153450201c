"""One contrastive step of CLIP over two replicas: every image is compared with the texts of both.

    python examples/clip_contrastive.py
    python examples/clip_contrastive.py --devices 4

Each replica encodes its own rows. The loss needs the similarity of each image with each text of the whole batch, so the features of
all replicas are gathered, in the middle of the model, and gradients go back through the gather. Nothing is configured for it: the
mixed samples follow from the model's own code.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from partitioner import partition
from passes.ir.comm.primitives import COLLECTIVES

WORDS, LENGTH, ROWS = 64, 12, 8


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**small, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "bos_token_id": 0, "eos_token_id": WORDS - 1}
    image = {**small, "image_size": 32, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=16)).train()
    tokens = torch.randint(1, WORDS - 1, (ROWS, LENGTH))
    tokens[:, -1] = WORDS - 1
    inputs: dict[str, Any] = {
        "input_ids": tokens,
        "pixel_values": torch.randn(ROWS, 3, 32, 32),
        "attention_mask": torch.ones_like(tokens),
        "return_loss": True,
    }
    pm = partition(model, options.devices, "data", example_kwargs=inputs)
    print(f"{pm}\n\n{pm.explain()}\n\nWhat rank 0 communicates:")
    for node in pm.graph(0).graph.nodes:
        if node.target in COLLECTIVES:
            moved = ", ".join(value.name for value in node.args[0])
            print(f"  {node.target.__name__:15s}{moved if len(moved) < 90 else moved[:87] + '...'}")

    expected = model(**inputs).loss
    expected.backward()
    loss = pm.train_step(**inputs)
    gradients = pm.full_gradients()
    differences = [abs(loss.item() - expected.item())]
    for name, parameter in model.named_parameters():
        found = gradients[name]
        assert (found is None) == (parameter.grad is None), name
        if found is not None and parameter.grad is not None:
            differences.append((found - parameter.grad).abs().max().item())
    print(f"\nloss {loss.item():.6f}, on one device {expected.item():.6f}")
    print(f"largest difference {max(differences):.1e} over the loss and all gradients")


if __name__ == "__main__":
    main()
