"""Kernels that take one memory format get it, whatever strides the values of a run have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from tests.support.running.slow_values import slow


class AttendedImage(nn.Module):
    """A convolution, transposed values as after attention over pixels, and a group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.mix = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)
        self.norm, self.after = nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3, padding=1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        rows, channels, height, width = hidden.shape
        mixed = self.mix(hidden.reshape(rows, channels, height * width).transpose(1, 2))
        image: Tensor = self.after(self.norm(mixed.transpose(1, 2).reshape(rows, channels, height, width)))
        return image


@pytest.mark.parametrize("mode", ["data", *slow("fsdp")])
@pytest.mark.parametrize("memory_format", [*slow(torch.contiguous_format), torch.channels_last])
def test_group_normalisation_of_one_row_a_rank(mode: str, memory_format: torch.memory_format) -> None:
    model = AttendedImage()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 3, 4, 4, dtype=torch.float64).to(memory_format=memory_format)
    pm = partition(model, 4, mode, example_inputs=(x,))
    output = pm(x)
    torch.testing.assert_close(output, plain(x), rtol=1e-12, atol=1e-12)
    output.square().sum().backward()
    plain(x).square().sum().backward()
    gradients = pm.full_gradients()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-10)


class PartlySquashed(nn.Module):
    """A batch normalisation of permuted columns, of which one channel is written in place."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims
        self.norm = nn.BatchNorm2d(3)
        nn.init.constant_(self.norm.bias, 0.5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(x.permute(self.dims))
        normal.select(1, 0).tanh_()
        return normal


QUICK = [((0, 3, 1, 2), "pipeline"), ((0, 2, 1, 3), "model"), ((0, 2, 3, 1), "model")]


@pytest.mark.parametrize(
    ("dims", "mode"),
    [
        pytest.param(dims, mode, id=f"{dims}-{mode}", marks=() if (dims, mode) in QUICK else pytest.mark.slow)
        for dims in ((0, 3, 2, 1), (0, 3, 1, 2), (0, 2, 1, 3), (0, 2, 3, 1))
        for mode in ("model", "data", "pipeline")
    ],
)
def test_batch_normalisation_of_images_one_pixel_wide(dims: tuple[int, ...], mode: str) -> None:
    """Torch's kernel reads the gradient in the order of the input where a size of one makes both orders contiguous."""
    generator = torch.Generator().manual_seed(0)
    sizes = {dims[0]: 4, dims[1]: 3, dims[2]: 7, dims[3]: 1}
    x = torch.randn([sizes[dim] for dim in range(4)], dtype=torch.float64, generator=generator)
    weights = torch.randn((4, 3, 7, 1), dtype=torch.float64, generator=generator)
    model = PartlySquashed(dims)
    count = 1 if mode == "pipeline" else None
    pm = partition(model, 1 if mode == "model" else 2, mode, example_inputs=(x,), n_microbatches=count)
    plain = copy.deepcopy(model)
    normal = plain.norm(x.permute(dims).contiguous())
    torch.cat((normal[:, :1].tanh(), normal[:, 1:]), 1).mul(weights).sum().backward()
    pm(x).mul(weights).sum().backward()
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
