"""Ways to share attention that are planned: exactly those by which a cut of the mesh shares some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.model import CuttableModel
from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh
from passes.ir.plan import ATTENTION
from tests.support.running.slow_values import all_but

MESHES = (
    (("sequence", 2),),
    (("sequence", 3),),
    (("sequence", 4),),
    (("sequence", 8),),
    (("sequence", 2), ("tensor", 2)),
    (("data", 2), ("sequence", 2)),
    (("sequence", 5),),
    (("sequence", 6),),
)


class Attention(nn.Module):
    """Attention of ``heads`` over ``keys`` positions, of its own input or of a second one."""

    def __init__(self, heads: int, *, causal: bool = False, crossed: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, self.crossed = heads, causal, crossed
        self.query, self.key, self.value, self.out = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        source = other if self.crossed else x
        query, key, value = (
            layer(of).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, of in ((self.query, x), (self.key, source), (self.value, source))
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        rest: Tensor = self.out(mixed.transpose(1, 2).flatten(-2)) + other.mean((1, 2), keepdim=True)
        return rest


class Convolved(nn.Module):
    """Attention over the places of an image, which are no sequence, with a text as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.attention = nn.Conv2d(3, 24, 3, padding=1), Attention(4, crossed=True)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        mixed: Tensor = self.attention(self.space(image).flatten(2).transpose(1, 2), text)
        return mixed


def inputs(length: int, other: int = 12) -> tuple[Tensor, Tensor]:
    return torch.rand(4, length, 24), torch.rand(4, other, 24)


CASES: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
    "four heads": (Attention(4), inputs(24)),
    "causal": (Attention(4, causal=True), inputs(24)),
    "causal, odd length": (Attention(4, causal=True), inputs(15)),
    "causal, once divisible": (Attention(4, causal=True), inputs(6)),
    "one head": (Attention(1), inputs(24)),
    "three heads, short": (Attention(3), inputs(5)),
    "other keys": (Attention(4, crossed=True), inputs(24)),
    "image and text": (Convolved(), (torch.rand(4, 3, 8, 8), torch.rand(4, 12, 24))),
    "no attention": (nn.Sequential(nn.Linear(24, 24), nn.ReLU()), (torch.rand(4, 12, 24),)),
}


@pytest.mark.parametrize("name", all_but(["causal, odd length", "other keys", "three heads, short", "no attention"], CASES))
def test_ways_are_those_that_share_some_attention(name: str) -> None:
    """A way that is left out shares no attention of any mesh; one that is planned may turn out not to, for the mesh's lengths."""
    model, args = CASES[name]
    cuttable = CuttableModel(trace(model, args, {}, training=True), PlanRequest("auto", ("cuda:0",) * 8))
    shared: set[str] = set()
    offered: set[str] = set()
    for mesh in map(Mesh, MESHES):
        try:
            offered.update(cuttable.attention_choices(mesh))
        except ConfigError:
            with pytest.raises(ConfigError):
                cuttable.cut(mesh)
            continue
        ways = [way for way in ATTENTION[1:] if cuttable.cut(mesh, attention=way).shares_attention]
        assert set(ways) <= set(cuttable.attention_choices(mesh)), mesh
        shared.update(ways)
    if name in ("one head", "image and text", "no attention"):
        assert "ulysses" not in shared | offered
    assert shared == offered - {ATTENTION[0]}
