"""Checks of values, flags of installed hooks, and masks of encoders decide nothing, and are traced."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition

X = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def check(model: nn.Module, *args: Tensor) -> None:
    model = model.double()
    torch.testing.assert_close(partition(model, 2, "model", example_inputs=args, progress=False)(*args), model(*args))


def test_check_of_values() -> None:
    class Checks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            torch._check_tensor_all(x.abs() < 100)
            return self[1](self[0](x))

    check(Checks(nn.Linear(8, 8), nn.Linear(8, 8)), X)


def test_hooks_that_the_first_call_installs() -> None:
    class Captures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.is_installed = False

        def forward(self, x: Tensor) -> Tensor:
            assert not x.is_meta  # so that traces are compared, not runs
            self.found: list[Tensor] = []
            if not self.is_installed:
                for layer in self.layers:
                    layer.register_forward_hook(lambda _module, _args, output: self.found.append(output))
                self.is_installed = True
            for layer in self.layers:
                x = layer(x)
            return x + self.found[1]

    check(Captures(), X)


@pytest.mark.slow
def test_masks_of_encoders() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            own = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if mask is None else mask
            return self.encoder(x, mask=own)

    check(Encoder(), X)
    model, causal = Encoder().double(), nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    pm = partition(model, 2, "model", example_inputs=(X, causal), progress=False)
    for mask in (causal, causal.T.contiguous()):
        torch.testing.assert_close(pm(X, mask), model(X, mask))
