"""Norms of single gradients as Python numbers, in a process that has some parameters of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from partitioner.runtime.state.part_gradient import NormShare, PartGradient
from passes.ir.errors import PartitionWarning


def gradients(count: int) -> list[PartGradient]:
    """Return gradients of parameters of one model, each of norm 5."""
    total = cast(Any, SimpleNamespace(read_alone=set()))
    found = [torch.tensor([3.0, 4.0]).as_subclass(PartGradient) for _ in range(count)]
    for gradient in found:
        gradient.share = NormShare(total, is_counted=True)
    return found


BY_HAND: dict[str, Callable[[Sequence[PartGradient]], Any]] = {
    "norms of data": lambda each: sum(gradient.data.norm(2).item() ** 2 for gradient in each),
    "squared norms": lambda each: sum((gradient.norm() ** 2).item() for gradient in each),
    "squares": lambda each: sum(float(gradient.pow(2).sum()) for gradient in each),
    "a tensor of norms": lambda each: torch.tensor([gradient.norm() for gradient in each]).square().sum(),
    "largest": lambda each: max(gradient.abs().max().item() for gradient in each) ** 2 * 2 + 18,
}
"""How scripts take a norm of all gradients, a number after the other."""


@pytest.mark.parametrize("name", BY_HAND)
def test_numbers_of_several_gradients_are_announced_once(name: str) -> None:
    given = gradients(2)
    with pytest.warns(PartitionWarning, match=r"pm\.clip_grad_norm_\(max_norm\).*torch\.nn\.utils\.get_total_norm") as announced:
        totals = [float(BY_HAND[name](given)) for _ in range(2)]
    assert totals == pytest.approx([50.0, 50.0])
    assert len(announced) == 1
    assert announced[0].filename == __file__


def test_the_norm_of_one_gradient_is_a_number_like_any_other() -> None:
    (gradient,) = gradients(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [gradient.norm().item() for _ in range(2)] == [5.0, 5.0]
        assert f"{gradient.norm():.1f}" == "5.0"
