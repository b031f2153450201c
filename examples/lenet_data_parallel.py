"""Train LeNet on handwritten digits over k devices that share each batch, beside LeNet on one device.

    python examples/lenet_data_parallel.py                       # four devices, 97 % of unseen digits in half a minute
    python examples/lenet_data_parallel.py --devices 2 --mode fsdp

The digits come with scikit-learn: pip install 'torch-partitioner[examples]'. Every device has a part of the batch; the gradients are
summed, so the weights stay equal, and they stay those of one device: both accuracies stand side by side.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

from partitioner import partition


def lenet() -> nn.Module:
    """Return a network from images of shape (batch, 1, 8, 8) to the logits of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip


def digits() -> tuple[Tensor, Tensor]:
    """Return 1797 images and their digits, shuffled."""
    found = load_digits()
    order = torch.randperm(len(found.target))
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)[order] / 16, torch.tensor(found.target)[order]


def accuracy(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("devices", 4), ("epochs", 12), ("batch-size", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mode", default="data", help="data, fsdp, zero1 or zero2")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    one = lenet()
    images, labels = digits()
    seen, unseen = slice(0, 1408), slice(1408, 1792)
    pm = partition(copy.deepcopy(one), options.devices, options.mode, example_inputs=(images[: options.batch_size],))
    print(f"{pm}\n")

    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (one, pm)]
    loss_fn = nn.functional.cross_entropy
    print(f" epoch     one device    {options.devices} devices    accuracy on one    on {options.devices}")
    largest, expected, loss = 0.0, torch.zeros(()), torch.zeros(())
    for epoch in range(1, options.epochs + 1):
        for image, label in zip(images[seen].split(options.batch_size), labels[seen].split(options.batch_size), strict=True):
            expected = loss_fn(one(image), label)
            expected.backward()
            loss = pm.train_step(image, target=label, loss_fn=loss_fn)
            largest = max(largest, abs(loss.item() - expected.item()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        first, second = (accuracy(model, images[unseen], labels[unseen]) for model in (one, pm))
        print(f"{epoch:6d}{expected.item():15.6f}{loss.item():13.6f}{first:17.1%}{second:10.1%}")
    print(f"\nlargest difference {largest:.1e} between the losses of all steps")


if __name__ == "__main__":
    main()
