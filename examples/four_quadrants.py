"""Cut images into four quadrants, one a device: exact at every seam, beside the split that is wrong there.

    python examples/four_quadrants.py

Two blocks of convolution, batch normalisation, ReLU and pooling. Four devices that each run the network on a quadrant by itself put zeros
where their neighbours' rows should be; `mode={"tile": (2, 2)}` fetches the rows, and in training sums the statistics. The picture shows by
how much the two differ from one device, element by element of the result.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition

SHADES = " .:-=+*#%@"


def two_blocks() -> nn.Sequential:
    def block(channels_in: int, channels_out: int) -> list[nn.Module]:
        return [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 8), *block(8, 8))


def by_itself(model: nn.Module, images: Tensor) -> Tensor:
    """Run each quadrant through the network, as if there were no other."""
    rows = [torch.cat([model(part) for part in half.chunk(2, 3)], 3) for half in images.chunk(2, 2)]
    return torch.cat(rows, 2)


def error(found: Tensor, exact: Tensor) -> Tensor:
    """Return the largest error of all images and channels, for each place, relative to the largest value."""
    return ((found - exact).abs().amax((0, 1)) / exact.abs().max()).detach()


def picture(errors: Tensor, largest: float) -> list[str]:
    """Draw one character for each place: blank below one millionth of the largest error, and darker by its size."""
    steps = (errors / largest * (len(SHADES) - 1)).ceil().clamp(0, len(SHADES) - 1).int()
    steps[errors < 1e-6 * largest] = 0
    return ["".join(SHADES[int(step)] * 2 for step in row) for row in steps]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model = two_blocks().double()
    for _ in range(10):  # statistics for evaluation
        model(torch.randn(16, 3, options.size, options.size).double())
    model.eval()
    images = torch.randn(4, 3, options.size, options.size).double()
    pm = partition(model, devices=4, mode={"tile": (2, 2)}, example_inputs=(images,))
    print(f"{pm}\n\nThe program of rank 0:\n{pm.graph(0).code}")

    with torch.no_grad():
        exact = model(images)
        ours, naive = error(pm(images), exact), error(by_itself(model, images), exact)
    largest = naive.max().item()
    print(f"Error, the largest over images and channels; blank is none, {SHADES[-1]} is {largest:.0%} of the largest value.\n")
    print("  " + "each quadrant by itself".ljust(2 * exact.shape[3] + 4) + 'mode={"tile": (2, 2)}')
    for left, right in zip(picture(naive, largest), picture(ours, largest), strict=True):
        print(f"  |{left}|  |{right}|")
    seams = [row for row in range(exact.shape[2]) if naive[row].median() > 0]
    print(f"\neach quadrant by itself: wrong in rows {seams[0]} to {seams[-1]} of {exact.shape[2]}, and in the columns alike")

    trained, target = two_blocks().double(), torch.randn_like(exact)
    pm = partition(copy.deepcopy(trained), devices=4, mode={"tile": (2, 2)}, example_inputs=(images,))
    nn.functional.mse_loss(trained(images), target).backward()
    pm.train_step(images, target=target, loss_fn=nn.functional.mse_loss)
    gradients = pm.full_gradients()
    differences = [ours.max().item()]
    for name, parameter in trained.named_parameters():
        found, reference = gradients[name], parameter.grad
        assert found is not None
        assert reference is not None
        differences.append((found - reference).abs().max().item())
    print(f"largest difference {max(differences):.1e} of tiles from one device, in results and in gradients of training")


if __name__ == "__main__":
    main()
