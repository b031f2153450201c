"""PyTorch's fast path of transformer encoders, which it takes only without gradients, differs from its other path: it is noted."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition

NOTE = "PyTorch returns zeros at the positions that src_key_padding_mask leaves out"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.encoder(x, src_key_padding_mask=mask)
        return result


@pytest.mark.slow
def test_padded_positions() -> None:
    torch.manual_seed(0)
    model = Encoder().double().eval()
    x, mask = torch.randn(4, 5, 8, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.bool)
    mask[1:, 3:] = True
    pm = partition(model, 2, "model", example_inputs=(x, mask), progress=False)
    assert NOTE in " ".join(pm.explain().split())
    torch.testing.assert_close(pm(x, mask), model(x, mask))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors are a prototype
        expected, found = model(x, mask), pm(x, mask)
    torch.testing.assert_close(found[~mask], expected[~mask])
    assert not expected[mask].any()  # else the note is no longer true


@pytest.mark.slow
def test_training_has_no_note() -> None:
    model = Encoder().double()
    x, mask = torch.randn(4, 5, 8, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.bool)
    assert NOTE not in " ".join(partition(model, 2, "model", example_inputs=(x, mask), progress=False).explain().split())


def test_precision_under_autocast_on_the_cpu() -> None:
    model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval(), torch.randn(4, 5, 8)
    pm = partition(model, 2, "data", example_inputs=(x,), precision="bf16-mixed", progress=False)
    note = "under torch.no_grad() and autocast on the CPU, PyTorch returns the lower precision"
    assert note in " ".join(pm.explain().split())
    assert note not in " ".join(partition(model, 2, "data", example_inputs=(x,), progress=False).explain().split())
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with torch.no_grad():
            lower = model(x)
    assert lower.dtype == torch.bfloat16  # else the note is no longer true
    with torch.no_grad():
        torch.testing.assert_close(pm(x), expected.detach(), atol=2**-6, rtol=0)
