"""Models of images in which a view makes a dimension of space the channels, or the rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Turned(nn.Module):
    """A layer whose channels, or rows, are a dimension of space.

    Args:
        layer: called on an image of permuted dimensions.
        dims: the permutation.
    """

    def __init__(self, layer: nn.Module, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.layer, self.last, self.dims = nn.Conv2d(3, 3, 3, padding=1), layer, nn.Conv2d(3, 3, 3, padding=1), dims

    def forward(self, x: Tensor) -> Tensor:
        turned = self.layer(self.first(x).tanh().permute(self.dims)).relu()
        return torch.as_tensor(self.last(turned.permute([self.dims.index(dim) for dim in range(4)])))


class Lines(nn.Module):
    """Lines of the image as a sequence before the batch, both in one dimension for a linear layer.

    Args:
        mix: the linear layer, over channels and width.
    """

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Conv2d(3, 3, 3, padding=1), mix, nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        lines = self.first(x).permute(2, 0, 1, 3)
        mixed = self.mix(lines.reshape(-1, lines.shape[2] * lines.shape[3])).view(lines.shape)
        return torch.as_tensor(self.last(mixed.permute(1, 2, 0, 3)))


class Gram(nn.Module):
    """Rows times rows of an image: its height is both dimensions of the product, and then stands beside a width of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        product = x @ x.transpose(-1, -2)
        product = product + self.conv(F.relu(product))
        return F.pad(product[:, :, :, 3:] - product[:, :, :, :-3], (1, 1, 0, 0), mode="replicate")
