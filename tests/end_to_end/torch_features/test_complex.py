"""Models that compute with complex numbers: written in parts, conjugated, with microbatches and cut batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition


class Fourier(nn.Module):
    """Writes parts of a spectrum by each kind of view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.first(x))
        out = torch.zeros_like(spectrum)
        out[..., :3] = spectrum[..., :3] @ self.weight
        out[:, -1] = spectrum.conj()[:, 0]
        out[:, 4::2] += spectrum[:, 4::2].conj()
        out[:, 5] = x[:, 0]
        out.imag.mul_(0.5)
        spread = torch.zeros(x.shape[0], 3, 3, dtype=out.dtype)
        spread.diagonal(0, -2, -1).copy_(out[:, :3])
        result: Tensor = self.last(torch.fft.ifft(out.conj()).real) + spread.sum((1, 2)).abs()[:, None]
        return result


class Conjugated(nn.Module):
    """A lazy conjugate is read by a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.first(x)).conj()
        result: Tensor = self.last((spectrum * 2).real) + torch.fft.ifft(spectrum).imag
        return result


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        (Fourier, "model", {}),
        pytest.param(Conjugated, "pipeline", {"n_microbatches": 2}, marks=pytest.mark.slow),
    ]
    + [pytest.param(kind, mode, {}, marks=pytest.mark.slow) for kind in (Fourier, Conjugated) for mode in ("data", "fsdp")]
    + [pytest.param(Conjugated, "model", {}, marks=pytest.mark.slow)],
)
def test_trained_as_the_model(kind: type[nn.Module], mode: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, x = kind().double(), torch.randn(6, 8, dtype=torch.float64)
    pm = partition(model, 2, mode, example_inputs=(x,), progress=False, **options)
    expected, found = model(x), pm(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    expected.square().mean().backward()
    found.square().mean().backward()
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
