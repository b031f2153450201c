"""AlexNet on several GPUs: the batch is cut in the convolutions, the channels in the linear layers. The planner finds it.

    python examples/one_weird_trick.py
    python examples/one_weird_trick.py --devices 8 --batch-size 1024 --plan-only     # of V100s, in seconds, on a laptop

Convolutions have few weights and much to compute, linear layers have most of the weights. Summing the gradients of these over replicas
takes longer than to bring the rows of all replicas together and to compute a part of the channels on each (Krizhevsky, "One weird trick
for parallelizing convolutional neural networks", 2014). One dimension of the mesh cuts different axes in different layers.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partitioner import partition

CHANNELS = (64, 192, 384, 256, 256)


class AlexNet(nn.Module):
    """Five convolutions and three linear layers, for images of 224 x 224."""

    def __init__(self, classes: int = 1000, width: int = 4096) -> None:
        super().__init__()
        first, second, third, fourth, fifth = CHANNELS
        self.features = nn.Sequential(
            *(nn.Conv2d(3, first, kernel_size=11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
            *(nn.Conv2d(first, second, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
            *(nn.Conv2d(second, third, kernel_size=3, padding=1), nn.ReLU()),
            *(nn.Conv2d(third, fourth, kernel_size=3, padding=1), nn.ReLU()),
            *(nn.Conv2d(fourth, fifth, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        )
        self.classifier = nn.Sequential(
            *(nn.Linear(fifth * 6 * 6, width), nn.ReLU()), *(nn.Linear(width, width), nn.ReLU()), nn.Linear(width, classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, 224, 224) to (batch, classes)."""
        result: Tensor = self.classifier(self.features(images).flatten(1))
        return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--plan-only", action="store_true", help="plan a model that has no memory, and run nothing")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    hardware = f"v100:1x{options.devices}"
    with torch.device("meta" if options.plan_only else "cpu"):
        whole, images = AlexNet(), torch.randn(options.batch_size, 3, 224, 224)
    pm = partition(copy.deepcopy(whole), options.devices, example_inputs=(images,), cluster=hardware)
    plain = partition(copy.deepcopy(whole), options.devices, "data", example_inputs=(images,), cluster=hardware)
    print(pm.explain())
    print(f"\nstep   {pm.plan.step_time * 1e3:.1f} ms predicted, {plain.plan.step_time * 1e3:.1f} ms with whole weights on every device")
    if options.plan_only:
        return

    target = torch.randint(1000, (options.batch_size,))
    expected = nn.functional.cross_entropy(whole(images), target)
    expected.backward()
    loss = pm.train_step(images, target=target, loss_fn=nn.functional.cross_entropy)
    gradients = pm.full_gradients()
    differences = [abs(loss.item() - expected.item())]
    for name, parameter in whole.named_parameters():
        found, exact = gradients[name], parameter.grad
        assert found is not None
        assert exact is not None
        differences.append((found - exact).abs().max().item())
    print(f"\nlargest difference {max(differences):.1e} of loss and gradients from those of the whole model")


if __name__ == "__main__":
    main()
