"""Train a small GPT over four pipeline stages, beside the same GPT in one piece.

    python examples/gpt_pipeline.py                       # about a minute on two cores
    python examples/gpt_pipeline.py --schedule ZBV --devices 2 --steps 20

It reads the sources of Python's standard library, byte by byte. The first and the last weight of the model are one, so the first and
the last stage add up its gradient. It prints the stages, the program of one rank, and both losses, step by step.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from partitioner import partition

LENGTH, WIDTH, HEADS, BYTES = 64, 96, 4, 256


class Gpt(nn.Module):
    """Bytes of shape (batch, length) to logits of shape (batch, length, 256)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 50)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)
        self.embedding.weight = self.head.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library(batch_size: int, steps: int) -> Sequence[tuple[Tensor, Tensor]]:
    """Return batches of random pieces of the sources, each with the same piece one byte later."""
    sources = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(sources), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - LENGTH - 1, (steps, batch_size, 1))
    return [(piece[:, :-1], piece[:, 1:]) for piece in text[starts + torch.arange(LENGTH + 1)]]


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("devices", 4), ("microbatches", 4), ("steps", 60), ("batch-size", 16), ("depth", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", default="1F1B")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = Gpt(options.depth)
    data = standard_library(options.batch_size, options.steps)
    pm = partition(
        copy.deepcopy(whole), options.devices, "pipeline",
        example_inputs=data[0][:1], n_microbatches=options.microbatches, schedule=options.schedule,
    )  # fmt: skip
    print(pm, f"\nThe program of rank 1:\n{pm.graph(1).code}", sep="\n")

    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3) for model in (whole, pm)]
    print("Loss in nats a byte:\n\n  step    one piece    partitioned    difference")
    largest = 0.0
    for step, (text, target) in enumerate(data, start=1):
        expected = next_byte_loss(whole(text), target)
        expected.backward()
        loss = pm.train_step(text, target=target, loss_fn=next_byte_loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        difference = abs(loss.item() - expected.item())
        largest = max(largest, difference)
        bar = "█" * (24 * step // options.steps)
        if (keep := step == 1 or step % 5 == 0) or sys.stdout.isatty():
            row = f"{step:6d}{expected.item():13.6f}{loss.item():15.6f}{difference:14.1e}   {bar:·<24}"
            print(row, end="\n" if keep else "\r", flush=True)
    print(f"\nlargest difference {largest:.1e} after {options.steps} steps")


if __name__ == "__main__":
    main()
