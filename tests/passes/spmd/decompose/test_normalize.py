"""Normalisation by given statistics, whose backward knows where they come from: results and gradients are those of torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.spmd.decompose.normalization import normalize

EPS = 1e-3

WHOLE: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "batch": (lambda x, weight, bias: F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS), (1,)),
    "instance": (lambda x, weight, bias: F.instance_norm(x, weight=weight, bias=bias, eps=EPS), (4, 6)),
    "groups": (lambda x, weight, bias: F.group_norm(x, 2, weight, bias, eps=EPS), (4, 2)),
    "one group": (lambda x, weight, bias: F.group_norm(x, 1, weight, bias, eps=EPS), (4, 1)),
}
"""Of (4, 6, 5, 3): what torch computes, and the shape of its statistics."""


def statistics(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    """Mean, variance, and how many elements have them together."""
    grouped = x.transpose(0, 1).reshape(6, -1) if len(shape) == 1 else x.reshape(*shape, -1)
    return grouped.mean(-1), grouped.var(-1, correction=0), grouped.shape[-1]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_is_normalised_and_differentiated_as_torch_does_it(name: str, affine: bool) -> None:
    function, shape = WHOLE[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 5, 3, generator=generator, dtype=torch.float64).add(3).requires_grad_()
    parameters = (
        [torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)] if affine else [None, None]
    )
    mean, variance, count = statistics(x.detach(), shape)
    leaves = [each for each in (x, *parameters) if each is not None]
    given = torch.randn(x.shape, generator=generator, dtype=torch.float64)

    found = normalize(x, mean, variance, *parameters, EPS, count, [], True)
    expected = function(x, *parameters)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, leaves, given), torch.autograd.grad(expected, leaves, given), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_are_divided_by_the_root_of_their_mean_square() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator, dtype=torch.float64).add(2).requires_grad_()
    mean_square = x.detach().square().mean(1, keepdim=True)
    given = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    found = normalize(x.unsqueeze(1), torch.zeros_like(mean_square), mean_square, None, None, EPS, 7, [], False).view(x.shape)
    expected = F.rms_norm(x, (7,), eps=EPS)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x, given), torch.autograd.grad(expected, x, given))


@pytest.mark.slow
def test_torch_can_trace_it() -> None:
    x, weight, bias = torch.randn(2, 6, 5, requires_grad=True), torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    arguments: tuple[Any, ...] = (x, torch.zeros(2, 3), torch.ones(2, 3), weight, bias, EPS, 10, [], True)
    assert set(torch.library.opcheck(normalize, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_a_rank_that_has_no_elements_gets_none_and_adds_nothing(shape: tuple[int, ...]) -> None:
    """Of three rows over four ranks the last has an empty part."""
    x, weight = torch.zeros(2, 6, 0, 3, requires_grad=True), torch.ones(6, requires_grad=True)
    found = normalize(x, torch.zeros(shape), torch.ones(shape), weight, None, EPS, 10, [], True)
    assert found.shape == x.shape
    of_x, of_weight = torch.autograd.grad(found.sum(), (x, weight))
    assert of_x.shape == x.shape
    assert torch.equal(of_weight, torch.zeros(6))


@pytest.mark.parametrize(("rows", "channels", "groups"), [(4, 1, 1), (1, 8, 1), (4, 8, 2)])
def test_a_part_of_one_element_in_space_has_the_gradient_of_the_formula(rows: int, channels: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, given = (torch.randn(rows, channels, 1, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, bias = torch.randn(2, channels, generator=generator, dtype=torch.float64).unbind(0)
    mean, variance = torch.randn(rows, groups, generator=generator, dtype=torch.float64), torch.rand(rows, groups, dtype=torch.float64)
    count = 10
    leaves = [each.requires_grad_() for each in (x, weight.clone(), bias.clone())]
    found = normalize(leaves[0], mean, variance, *leaves[1:], EPS, count, [], True)

    scale, centre = (1 / torch.sqrt(variance + EPS)).unsqueeze(-1), mean.unsqueeze(-1)
    normal = (x.detach().view(rows, groups, -1) - centre) * scale
    incoming = (given.view(rows, channels) * weight).view(rows, groups, -1)
    moved = incoming.sum(-1, keepdim=True) + normal * (incoming * normal).sum(-1, keepdim=True)
    expected = scale * (incoming - moved / count)
    of_x, of_weight, of_bias = torch.autograd.grad(found, leaves, given)
    torch.testing.assert_close(of_x.flatten(), expected.flatten())
    torch.testing.assert_close(of_weight, (given.view(rows, channels) * normal.view(rows, channels)).sum(0))
    torch.testing.assert_close(of_bias, given.view(rows, channels).sum(0))
