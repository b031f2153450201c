"""Small models for frameworks, and the comparison of two runs of a loop."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support.models.attention.gpt import LENGTH, VOCABULARY, Gpt

ROWS = 4
"""Of a batch."""


class Residual(nn.Module):
    """A stem and two residual blocks, each convolution normalised over the batch; classes of images."""

    def __init__(self, channels: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)) for _ in range(2)
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(images)).relu()
        for block in self.blocks:
            x = (x + block(x)).relu()
        return self.head(x.mean((2, 3)))


def model_of(kind: str) -> nn.Module:
    """Return a model with the same weights at every call; in float64."""
    torch.manual_seed(0)
    model = Gpt(width=8, heads=2, depth=2) if kind == "gpt" else Residual()
    return model.double()


def data_of(kind: str, batches: int) -> TensorDataset:
    """Return inputs and targets, the same at every call."""
    generator = torch.Generator().manual_seed(1)
    rows = ROWS * batches
    if kind == "gpt":
        tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        return TensorDataset(tokens, tokens.roll(-1, 1))
    images = torch.randn(rows, 3, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(3, (rows,), generator=generator))


def problems(found: Sequence[float], wanted: Sequence[float], what: str, tolerance: float = 1e-9) -> list[str]:
    """Return the differences of two lists of numbers."""
    one, other = torch.tensor(list(found), dtype=torch.float64), torch.tensor(list(wanted), dtype=torch.float64)
    if one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance):
        return []
    return [f"{what}: {list(found)} in place of {list(wanted)}"]


def spoil(model: nn.Module) -> None:
    """Change all values, so that what is loaded is what counts."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(0.5)
