"""The operator that transformers 5 calls for products of groups, for tests beside an older transformers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

NAME = "transformers::grouped_mm_fallback"


def intervals(ends: Tensor) -> list[tuple[int, slice]]:
    """Return each group with its rows."""
    bounds = [0, *ends.tolist()]
    return [(group, slice(*pair)) for group, pair in enumerate(pairwise(bounds))]


@torch.library.custom_op(NAME, mutates_args=(), schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor")
def grouped_mm_fallback(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    for group, interval in intervals(offs):
        result[interval] = rows[interval] @ weight[group]
    return result


@torch.library.custom_op(f"{NAME}_backward", mutates_args=())
def backward(rows: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    of_rows, of_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    for group, interval in intervals(offs):
        of_rows[interval] = grad[interval] @ weight[group].t()
        of_weight[group] = rows[interval].t() @ grad[interval]
    return of_rows, of_weight


@grouped_mm_fallback.register_fake
def _(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@backward.register_fake
def _(rows: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return (*backward(*ctx.saved_tensors, grad), None)


grouped_mm_fallback.register_autograd(gradients, setup_context=setup_context)
