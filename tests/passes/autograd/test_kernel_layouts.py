"""Kernels that take one memory format get it, whatever strides the values of a run have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition


class AttendedImage(nn.Module):
    """A convolution, values that lie transposed as behind attention over pixels, and a group normalisation."""

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


@pytest.mark.parametrize("mode", ["data", "fsdp"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
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
