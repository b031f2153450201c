"""Operations that have a sharding rule keep rows apart, also where the rules of ``passes.analysis.batch`` have none for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from partitioner.tracing.trace import trace

KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.tensor([0, 1]), x[:, :2]),
    "take_along_dim": lambda x: x.take_along_dim(x.argmax(1, keepdim=True), 1),
    "einsum_of_one_value": lambda x: torch.einsum("bij,bik->bjk", x, x),
    "patches": lambda x: nn.functional.unfold(x[:, None], 2),
}

MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal_with_rows": lambda x: x.diagonal(dim1=0, dim2=1),
    "take_along_rows": lambda x: x.take_along_dim(x.argmax(0, keepdim=True), 0),
    "take_along_everything": lambda x: x.take_along_dim(x.flatten().argsort()),
    "einsum_over_rows": lambda x: torch.einsum("bij,bik->jk", x, x),
    "constant_with_rows": lambda x: x.index_add(0, torch.tensor([0]), x[:1]),
}


class Between(nn.Module):
    """An operation between two layers."""

    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.operation = nn.Linear(6, 6), operation
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.before(x)) * self.scale


@pytest.mark.parametrize("name", KEPT)
def test_rows_stay_rows(name: str) -> None:
    (output,) = trace(Between(KEPT[name]), (torch.randn(4, 6, 6, dtype=torch.float64),)).outputs
    assert (output.combine, output.batch_dim) == ("concatenate", 0)


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet_are_seen(name: str) -> None:
    (output,) = trace(Between(MIXED[name]), (torch.randn(4, 6, 6, dtype=torch.float64),)).outputs
    assert output.combine == "mixed"


def test_microbatches_of_such_operations_give_the_numbers_of_the_batch() -> None:
    model = Between(lambda x: torch.cat([operation(x).flatten(1) for operation in KEPT.values()], 1))
    x = torch.randn(4, 6, 6, dtype=torch.float64)
    pm = partition(model, 2, "pipeline", example_inputs=(x,), n_microbatches=2)
    torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=1e-12)
