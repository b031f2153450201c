"""The way of the batch follows from sharding rules: what an operation does to the loop of the batch, wherever in a dimension it is.

Every case is executed in microbatches by ``partition`` and compared with the model, or refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.ir.graph import Output
from tests.support.running.slow_values import all_but

KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.tensor([0, 1]), x[:, :2]),
    "take_along_dim": lambda x: x.take_along_dim(x.argmax(1, keepdim=True), 1),
    "einsum_of_one_value": lambda x: torch.einsum("bij,bik->bjk", x, x),
    "patches": lambda x: nn.functional.unfold(x[:, None], 2),
    "two_batches_in_one": lambda x: torch.cat([x, x.sin()]).tanh().chunk(2)[1],
    "two_batches_of_sizes": lambda x: torch.cat([x, x.sin()]).split(x.shape[0])[1],
    "rows_as_groups": lambda x: nn.functional.conv1d(x.reshape(1, -1, 6), x[:, :2].repeat(1, 3, 1)[..., :3].reshape(-1, 6, 3),
        groups=x.shape[0]).reshape(x.shape[0], -1, 4),
    "repeated_for_each_row": lambda x: x + torch.arange(6.0).repeat_interleave(x.shape[0]).view(6, -1).T[:, None],
    "sums_shaped_like_totals": lambda x: x * torch.zeros_like(x.sum()).exp(),
    "size_of_another": lambda x: x.amax(1, keepdim=True).expand_as(x),
    "without_elements": lambda x: torch.cat([x, x[:, 6:].reshape(x.shape[0], 6, 0).mT], 1),
}  # fmt: skip

TOTALS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "einsum_over_rows": ("sum", lambda x: torch.einsum("bij,bik->jk", x, x)),
    "product_over_rows": ("sum", lambda x: x.flatten(1).T @ x.flatten(1)),
    "counted_classes": ("sum", lambda x: x.argmax(-1).to(x.dtype).histc(6, 0, 5)),
    "linear_in_means": ("mean", lambda x: nn.functional.linear(x.mean(0), torch.ones(2, 6, dtype=x.dtype)) + x.mean()),
    "chosen_mean": ("mean", lambda x: torch.where(torch.tensor(True), x.mean(0), 0.0)),
    "stacked_means": ("mean", lambda x: torch.stack([x.mean(), x.pow(2).mean() + 1, torch.tensor(2.0, dtype=x.dtype)])),
}

MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal_with_rows": lambda x: x.diagonal(dim1=0, dim2=1),
    "take_along_rows": lambda x: x.take_along_dim(x.argmax(0, keepdim=True), 0),
    "take_along_everything": lambda x: x.take_along_dim(x.flatten().argsort()),
    "constant_with_rows": lambda x: x.index_add(0, torch.tensor([0]), x[:1]),
    "numbers_of_half_the_rows": lambda x: x.reshape(-1, 3, 6)[torch.arange(x.shape[0])],
    "numbers_of_columns": lambda x: torch.ones(9, 6, dtype=x.dtype)[torch.arange(x.shape[0])],
    "row_numbers_as_numbers": lambda x: x * torch.arange(x.shape[0])[:, None, None].expand(-1, 6, 6),
    "written_into_one_row": lambda x: x.scatter(0, torch.zeros(1, 6, 6, dtype=torch.long), 1.0),
    "two_batches_apart": lambda x: torch.cat([x, x.sin()]).view(-1, 2, 6, 6).sum(1),
    "half_the_rows": lambda x: x.chunk(2)[0],
    "bias_of_a_sum": lambda x: torch.addmm(x.new_ones(36), x.flatten(1).T, x.flatten(1)),
    "number_added_to_a_sum": lambda x: x.sum(0) + 1,
    "padded_sum": lambda x: nn.functional.pad(x.sum(0), (1, 1), value=1.0),
    "counted_means": lambda x: torch.count_nonzero(x.mean(0) > 0),
    "resized_to_rows": lambda x: (
        x * nn.functional.adaptive_avg_pool1d(torch.ones(1, 6, 24, dtype=x.dtype), x.shape[0]).mT.reshape(-1, 6, 1)
    ),
    "two_kinds_of_totals": lambda x: torch.stack([x.sum(), x.mean()]),
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


def only_output(operation: Callable[[Tensor], Tensor], batch_size: int | None) -> Output:
    """Return the result's role; traced with an open batch, or for one size."""
    (output,) = trace(Between(operation), (torch.randn(4, 6, 6, dtype=torch.float64),), batch_size=batch_size).outputs
    return output


OPEN_AND_FIXED = pytest.mark.parametrize("batch_size", [None, 4], ids=["open", "fixed"])


@OPEN_AND_FIXED
@pytest.mark.parametrize("name", KEPT)
def test_rows_stay_rows(name: str, batch_size: int | None) -> None:
    output = only_output(KEPT[name], batch_size)
    assert (output.combine, output.batch_dim) == ("concatenate", 0)


@OPEN_AND_FIXED
@pytest.mark.parametrize("name", TOTALS)
def test_totals(name: str, batch_size: int | None) -> None:
    kind, operation = TOTALS[name]
    assert only_output(operation, batch_size).combine == kind


@OPEN_AND_FIXED
@pytest.mark.parametrize("name", MIXED)
def test_rows_that_meet_are_seen(name: str, batch_size: int | None) -> None:
    assert only_output(MIXED[name], batch_size).combine == "mixed"


@pytest.mark.slow
def test_microbatches_of_such_operations_give_the_numbers_of_the_batch() -> None:
    model = Between(lambda x: torch.cat([operation(x).flatten(1) for operation in KEPT.values()], 1))
    x = torch.randn(4, 6, 6, dtype=torch.float64)
    pm = partition(model, 2, "pipeline", example_inputs=(x,), n_microbatches=2)
    torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", all_but(["counted_classes", "linear_in_means"], TOTALS))
def test_microbatches_add_up(name: str) -> None:
    model = Between(TOTALS[name][1])
    x = torch.randn(4, 6, 6, dtype=torch.float64)
    pm = partition(model, 2, "pipeline", example_inputs=(x,), n_microbatches=2)
    torch.testing.assert_close(pm(x), model(x), rtol=1e-12, atol=1e-12)
