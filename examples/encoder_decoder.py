"""Pipeline an encoder-decoder: two inputs, masks by keyword, and a memory that every decoder layer reads.

    python examples/encoder_decoder.py

A small `nn.Transformer` learns to reverse words of different lengths. Each decoder layer needs the padding mask and the encoder's
output: both reach every stage that asks for them, and the gradients of the memory are added up on their way back.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import partition

LETTERS, LENGTH, WIDTH = 27, 9, 32
START = 26


class Reverser(nn.Module):
    """Words of shape (batch, 9) and their reversed beginnings to logits of shape (batch, 9, 27)."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 5)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, word: Tensor, beginning: Tensor, *, padding: Tensor, causal: Tensor) -> Tensor:
        memory = self.letters(word) + self.position
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        x = self.letters(beginning) + self.position
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        logits: Tensor = self.head(x)
        return logits


def words(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random words, their reversals, and True where a word has ended; what follows its end is the letter 0."""
    lengths = torch.randint(2, LENGTH + 1, (rows, 1))
    places = torch.arange(LENGTH)
    padding = places >= lengths
    word = torch.randint(1, LETTERS - 1, (rows, LENGTH)).masked_fill(padding, 0)
    reversed_word = word.gather(1, (lengths - 1 - places).clamp(min=0)).masked_fill(padding, 0)
    return word, reversed_word, padding


def letter_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.transpose(1, 2), target)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = Reverser()
    word, target, padding = words(48)
    beginning = torch.cat((torch.full((48, 1), START), target[:, :-1]), dim=1)
    masks: dict[str, Any] = {"padding": padding, "causal": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)}
    pm = partition(copy.deepcopy(whole), options.devices, "pipeline", example_inputs=(word, beginning), example_kwargs=masks)
    print(pm)

    optimizers = [torch.optim.AdamW(model.parameters(), lr=5e-3) for model in (whole, pm)]
    largest = 0.0
    print("\n  step     one piece    partitioned")
    for step in range(1, options.steps + 1):
        expected = letter_loss(whole(word, beginning, **masks), target)
        expected.backward()
        loss = pm.train_step(word, beginning, **masks, target=target, loss_fn=letter_loss)
        exact = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
        gradients = ((name, gradient) for name, gradient in pm.full_gradients().items() if gradient is not None)
        largest = max([largest, *((gradient - exact[name]).abs().max().item() for name, gradient in gradients)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"{step:6d}{expected.item():14.6f}{loss.item():15.6f}")
    print(f"\nlargest difference {largest:.1e} over all gradients of all steps")


if __name__ == "__main__":
    main()
