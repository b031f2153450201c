"""Spread a convolution network in depth over two devices: the first layers on one, the others on the next.

    python examples/two_block_convolution.py

Two blocks of convolution, batch normalisation, ReLU and pooling learn to tell horizontal from vertical stripes. `mode="model"`
sends the whole batch through, so batch normalisation sees every row and the numbers are those of one device.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition

SIZE = 16


def two_blocks() -> nn.Sequential:
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 8), *block(8, 16), nn.Flatten(), nn.Linear(16 * (SIZE // 4) ** 2, 2))


def stripes(rows: int) -> tuple[Tensor, Tensor]:
    """Noisy images of shape (rows, 1, 16, 16) with stripes of random phase: class 0 horizontal, class 1 vertical."""
    labels = torch.randint(2, (rows,))
    wave = torch.sin(torch.arange(SIZE) * 1.3 + 6.3 * torch.rand(rows, 1)).unsqueeze(1)
    vertical = wave.expand(-1, SIZE, -1)
    images = torch.where(labels.view(-1, 1, 1) == 1, vertical, vertical.transpose(1, 2))
    return (images + torch.randn(rows, SIZE, SIZE)).unsqueeze(1), labels


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = two_blocks()
    images, labels = stripes(64)
    pm = partition(copy.deepcopy(whole), devices=2, mode="model", example_inputs=(images,))
    print(pm)
    for rank, graph in enumerate(pm.graphs):
        print(f"\nThe program of rank {rank}:\n{graph.code}")

    loss_fn = nn.CrossEntropyLoss()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (whole, pm)]
    print("  step    one device    two devices")
    for step in range(1, options.steps + 1):
        expected = loss_fn(whole(images), labels)
        expected.backward()
        loss = pm.train_step(images, target=labels, loss_fn=loss_fn)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 or step % 5 == 0:
            print(f"{step:6d}{expected.item():14.6f}{loss.item():15.6f}")

    state = pm.full_state_dict()
    largest = max((state[name] - value).abs().max().item() for name, value in whole.state_dict().items())
    print(f"\nlargest difference {largest:.1e} over all weights and statistics after {options.steps} steps")


if __name__ == "__main__":
    main()
