"""Numbers for open sizes: equal values share one fake tensor, but for those in memory that a call writes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.tracing.trace import source_of, trace_source
from passes.graph.aliasing import aliasing
from passes.ir.phase import observing_phases


class Masked(nn.Module):
    """Layers of one shape, and a mask of that shape that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        mask = torch.zeros_like(x)
        mask.add_(x.detach() > 0)
        return x * mask


def values_with_numbers() -> dict[str, tuple[Tensor, bool]]:
    """Return name of a node -> its value after the phase, and whether a call writes its memory; later phases change the graph."""
    values: dict[str, tuple[Tensor, bool]] = {}

    def observe(name: str, state: Any, _seconds: float) -> None:
        if name == "fix_sizes":
            memory = aliasing(state.graph)
            values.update({node.name: (node.meta["val"], memory.written(node)) for node in state.graph.nodes if "val" in node.meta})

    with observing_phases(observe):
        trace_source(source_of(Masked(), (torch.rand(4, 6, 8),), {}, None, None), open_sizes=("length",))
    return values


def test_values_in_memory_that_is_written_have_fake_tensors_of_their_own() -> None:
    """A write changes ``requires_grad`` of the fake tensor that it is run on: that of a mask, not of all values of its shape."""
    values = values_with_numbers()
    linear = [value for name, (value, _) in values.items() if name.startswith("linear")]
    assert [tuple(value.shape[1:]) for value in linear] == [(6, 8)] * 4
    assert len(set(map(id, linear))) == 1
    shared = Counter(id(value) for value, _ in values.values())
    written = {name: value for name, (value, is_written) in values.items() if is_written}
    assert {"zeros_like", "add_"} <= written.keys()
    assert all(shared[id(value)] == 1 for value in written.values())
