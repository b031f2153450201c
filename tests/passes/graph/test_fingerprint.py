"""Equal digests of equal graphs, in every process; others of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.graph.equivalence import graph_digest
from tests.support.models.zoo import case_named
from tests.support.processes.processes import Workers

NAMES = ("perceptron", "gpt", "batch_norm_convolution", "nested_outputs", "integers_and_flags")


def digests(names: Sequence[str]) -> list[str]:
    """Return the digests of models of the zoo, in this order."""
    instances = [case_named(name).build() for name in names]
    return [graph_digest(trace(each.model, each.args, each.kwargs, training=None)) for each in instances]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_processes_have_the_same_digests(workers: Callable[[int], Workers]) -> None:
    """Strings hash differently there, functions have other addresses, and earlier traces differ."""
    found = digests(NAMES)
    assert workers(2).values(digests, NAMES[::-1]) == [found[::-1]] * 2
    assert len(set(found)) == len(NAMES)


class Positions(nn.Module):
    """Adds numbers that it makes where its inputs are."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], device=x.device)


def digest(model: nn.Module, x: Tensor) -> str:
    return graph_digest(trace(model, (x,), {}, training=True))


def test_where_tensors_are_does_not_count() -> None:
    x = torch.zeros(4, 8)
    assert digest(Positions(), x) == digest(Positions(), x.to("meta"))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.GELU()), (4, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1)), (4, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2)), (6, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2)), (4, 3, 8)),
        (nn.Sequential(nn.Linear(8, 8, bias=False), nn.LeakyReLU(0.2)), (4, 8)),
    ],
    ids=["operation", "number", "batch", "sizes", "weights"],
)
def test_another_model_or_batch_has_another_digest(model: nn.Module, sizes: tuple[int, ...]) -> None:
    assert digest(nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2)), torch.zeros(4, 8)) != digest(model, torch.zeros(sizes))
