"""Targets that are never negative: a cross entropy over them ignores none, so that its mean is over rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from partitioner.tracing.trace import trace

CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "positions": (lambda logits, _: logits.argmax(1), "mean"),
    "positions, sliced": (lambda logits, _: logits.topk(2, 1).indices[:, 1], "mean"),
    "zeros": (lambda logits, _: torch.zeros(logits.shape[0], dtype=torch.int64), "mean"),
    "comparison": (lambda logits, _: (logits[:, 0] > 0).long(), "mean"),
    "signed": (lambda logits, _: logits.argmax(1) - 1, "mixed"),
    "bytes of another dtype": (lambda _, words: words.view(torch.int64)[:, 0], "mixed"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mean_over_targets_that_are_never_ignored_is_one_over_rows(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            logits = self.layer(x)
            words = (logits * 50).to(torch.uint8).repeat(1, 2)
            return nn.functional.cross_entropy(logits, CASES[name][0](logits, words))

    graph = trace(Net(), (torch.rand(8, 6),), {}, training=True)
    (output,) = graph.leaves
    assert output.combine == CASES[name][1]
