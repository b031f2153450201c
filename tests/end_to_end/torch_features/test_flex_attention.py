"""FlexAttention is computed by the operations that it stands for, with any mask and change of scores, and cut over batch and heads."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from partitioner import partition

LENGTH = 6
ROWS, COLUMNS = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
BEFORE = create_block_mask(lambda _, __, i, j: i > j, None, None, LENGTH, LENGTH, device="cpu")
"""A query sees the keys before it; the first one sees none."""


class Attention(nn.Module):
    """Four heads, of which keys and values have ``n_key_heads``."""

    def __init__(self, attend: Callable[..., Any], n_key_heads: int = 4) -> None:
        super().__init__()
        self.queries, self.keys_values, self.last = nn.Linear(16, 16), nn.Linear(16, n_key_heads * 8), nn.Linear(16, 16)
        self.attend, self.n_key_heads = attend, n_key_heads

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Any:
        batch, length, _ = x.shape
        queries = self.queries(x).view(batch, length, 4, 4).transpose(1, 2)
        keys, values = self.keys_values(x).view(batch, length, 2 * self.n_key_heads, 4).transpose(1, 2).chunk(2, dim=1)
        arguments = (queries, keys, values) if documents is None else (queries, keys, values, documents)
        return self.last(self.attend(*arguments).transpose(1, 2).reshape(batch, length, 16))


def scores(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2 + (i - j) * 0.1 * (h + 1), scale=0.3)


def scores_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = (ROWS - COLUMNS) * 0.1 * torch.arange(1, 5)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=0.6)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flex_attention(q, k, v, block_mask=BEFORE, enable_gqa=True)


def grouped_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return zeros for a query without a key."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=ROWS > COLUMNS, enable_gqa=True).nan_to_num(0.0)


def documents(q: Tensor, k: Tensor, v: Tensor, of: Tensor) -> Any:
    """Attend to the keys of a query's own document: a mask by an input, made in forward."""
    mask = create_block_mask(lambda b, h, i, j: of[b, i] == of[b, j], q.shape[0], None, LENGTH, LENGTH, device="cpu")
    return flex_attention(q, k, v, block_mask=mask)


def documents_written_out(q: Tensor, k: Tensor, v: Tensor, of: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(of[:, :, None] == of[:, None])[:, None])


PAIRS = [(scores, scores_written_out, 4), (grouped, grouped_written_out, 2), (documents, documents_written_out, 4)]
QUICK = {(documents, "tensor")}
MODES: dict[str, dict[str, Any]] = {
    "pipeline": {"devices": 2, "mode": "pipeline", "n_microbatches": 2},
    "data": {"devices": 2, "mode": "data"},
    "fsdp": {"devices": 2, "mode": "fsdp"},
    "tensor": {"devices": 2, "mode": "tensor"},
    "mesh": {"devices": 4, "mode": {"data": 2, "tensor": 2}},
}


def _inputs(function: Callable[..., Any]) -> tuple[Tensor, ...]:
    x = torch.randn(4, LENGTH, 16, dtype=torch.float64)
    return (x, torch.tensor([[0, 0, 0, 1, 1, 2], [0] * 6, [0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1]])) if function is documents else (x,)


@pytest.mark.parametrize(
    ("function", "written_out", "n_key_heads", "mode"),
    [
        pytest.param(*pair, mode, marks=[] if (pair[0], mode) in QUICK else [pytest.mark.slow], id=f"{pair[0].__name__}-{mode}")
        for pair in PAIRS
        for mode in MODES
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_values_and_gradients(function: Callable[..., Any], written_out: Callable[..., Any], n_key_heads: int, mode: str) -> None:
    """Beside scaled_dot_product_attention with that mask, since PyTorch has no gradients of FlexAttention on the CPU."""
    torch.manual_seed(0)
    model, inputs = Attention(function, n_key_heads).double(), _inputs(function)
    reference = Attention(written_out, n_key_heads).double()
    reference.load_state_dict(model.state_dict())
    pm = partition(copy.deepcopy(model), example_inputs=inputs, progress=False, **MODES[mode])
    found, wanted = pm(*inputs), reference(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


class Learned(Attention):
    """Adds a learned number a head to all scores of a query's own key."""

    def __init__(self) -> None:
        super().__init__(lambda q, k, v: flex_attention(q, k, v, score_mod=self.score))
        self.bias = nn.Parameter(torch.randn(4))

    def score(self, score: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + torch.where(query == key, self.bias[head], 0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_what_a_score_reads_takes_up_gradients() -> None:
    torch.manual_seed(0)
    model, (x,) = Learned().double(), _inputs(scores)
    pm = partition(model, 2, "tensor", example_inputs=(x,), progress=False)
    pm(x).square().sum().backward()
    found = pm.full_gradients()["bias"]
    model.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.eye(LENGTH) * model.bias[:, None, None])
    model(x).square().sum().backward()
    torch.testing.assert_close(found, model.bias.grad, rtol=1e-9, atol=1e-9)
