"""Targets that are never negative: a cross entropy over them ignores none, so that its mean is over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.rules.non_negative import non_negative

CASES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "positions": (lambda logits: logits.argmax(1), "mean"),
    "positions, sliced": (lambda logits: logits.topk(2, 1).indices[:, 1], "mean"),
    "zeros": (lambda logits: torch.zeros(logits.shape[0], dtype=torch.int64), "mean"),
    "comparison": (lambda logits: (logits[:, 0] > 0).long(), "mean"),
    "signed": (lambda logits: logits.argmax(1) - 1, "mixed"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mean_over_targets_that_are_never_ignored_is_one_over_rows(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.layer(x)
            return nn.functional.cross_entropy(logits, CASES[name][0](logits))

    graph = trace(Net(), (torch.rand(8, 6),), {}, training=True)
    (output,) = graph.leaves
    assert output.combine == CASES[name][1]


class Bytes(nn.Module):
    """Reads eight bytes as one integer, which may be negative."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x[:, :4], (x * 255).to(torch.uint8).view(torch.int64)[:, 0])


def test_a_view_of_another_dtype_may_be_negative() -> None:
    graph = trace(Bytes(), (torch.rand(8, 8),), {})
    views = [node.name for node in graph.graph.nodes if node.target is torch.ops.aten.view.dtype]
    assert views
    assert non_negative(graph.graph).isdisjoint(views)
