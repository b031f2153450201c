"""Cut one convolution layer of 64 channels over four devices: 16 channels on each.

    python examples/convolution_channels.py
    python examples/convolution_channels.py --devices 3            # 22, 21 and 21 channels

No device has the whole weight, forward or backward. The explanation names the axis; the program of rank 0 shows the one thing that is
communicated: the channels, gathered for the caller of the model.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import nn

from partitioner import partition


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=4)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    whole = nn.Conv2d(3, 64, kernel_size=3, padding=1)
    images, target = torch.randn(8, 3, 32, 32), torch.randn(8, 64, 32, 32)
    pm = partition(copy.deepcopy(whole), options.devices, "tensor", example_inputs=(images,))
    print(f"{pm}\n\n{pm.explain()}\n\nThe program of rank 0:\n{pm.graph(0).code}")

    expected = nn.functional.mse_loss(whole(images), target)
    expected.backward()
    loss = pm.train_step(images, target=target, loss_fn=nn.functional.mse_loss)
    parts = [dict(pm.named_parts(rank))["weight"] for rank in range(options.devices)]
    print("each rank's part of the weight:", ", ".join(str(tuple(part.shape)) for part in parts))

    gradients = pm.full_gradients()
    differences = [abs(loss.item() - expected.item())]
    for name, parameter in whole.named_parameters():
        found, exact = gradients[name], parameter.grad
        assert found is not None
        assert exact is not None
        differences.append((found - exact).abs().max().item())
    print(f"\nlargest difference {max(differences):.1e} of loss and gradients from those of the whole layer")


if __name__ == "__main__":
    main()
