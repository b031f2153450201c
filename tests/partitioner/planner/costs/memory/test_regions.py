"""Regions of recomputation: repeated blocks, what a model marks, and modules that the caller names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from partitioner import ConfigError, Plan, partition
from partitioner.planner.costs.cut_points import find_cut_points
from partitioner.planner.costs.memory.checkpoint_regions import checkpoint_regions
from partitioner.planner.costs.memory.named_regions import named_regions
from partitioner.tracing.trace import trace
from passes.graph.provenance import module_path
from passes.ir.graph import ModelGraph
from passes.ir.plan import Region


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.attention(self.norm(x))
        return y + self.down(nn.functional.gelu(self.up(y)))  # type: ignore[no-any-return]


def plain(block: nn.Module, x: Tensor) -> Any:
    return block(x)


class Blocks(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Any] = plain, depth: int = 4) -> None:
        super().__init__()
        self.embedding, self.head, self.call = nn.Linear(16, 16), nn.Linear(16, 3), call
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)  # type: ignore[no-any-return]


X = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(0))


def graph_of(model: nn.Module, x: Tensor = X) -> ModelGraph:
    return trace(model.train(), (x,))


def modules_of(graph: ModelGraph, regions: tuple[Region, ...]) -> list[str]:
    """Return the module of the first node of each region."""
    nodes = {node.name: node for node in graph.graph.nodes}
    return [module_path(nodes[region.first_node]) for region in regions]


def test_repeated_blocks_are_regions() -> None:
    graph = graph_of(Blocks(depth=6))
    regions = checkpoint_regions(graph, find_cut_points(graph))
    assert modules_of(graph, regions) == ["embedding", *(f"layers.{index}.norm" for index in range(6)), "head"]
    assert {(region.recompute, region.is_joined) for region in regions} == {("full", False)}


def test_without_blocks_segments_begin_where_little_crosses() -> None:
    """Eight layers of growing width, each as wide inside as two before it: cut between layers, not inside."""

    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).exp().tanh())  # type: ignore[no-any-return]

    graph = graph_of(nn.Sequential(*(Wide(64 + 8 * index) for index in range(8))), torch.randn(4, 8))
    regions = checkpoint_regions(graph, find_cut_points(graph))
    assert len(regions) > 2
    assert all(path.endswith("up") for path in modules_of(graph, regions))


def test_named_modules_are_regions_and_the_innermost_pattern_decides() -> None:
    graph = graph_of(Blocks(depth=2))
    regions = named_regions(graph, (("layers.*", "full"), ("layers.*.attention", "selective")))
    assert [(path, region.recompute, region.is_joined) for path, region in zip(modules_of(graph, regions), regions, strict=True)] == [
        ("embedding", "none", False),
        ("layers.0.norm", "full", False),
        ("layers.0.attention", "selective", True),
        ("layers.0", "full", True),
        ("layers.1.norm", "full", False),
        ("layers.1.attention", "selective", True),
        ("layers.1", "full", True),
        ("head", "none", False),
    ]


@pytest.mark.parametrize(
    ("depth", "use_reentrant"),
    [(2, True), (2, False), pytest.param(6, True, marks=pytest.mark.slow), (6, False)],  # six equal blocks are traced once
)
def test_checkpoints_of_the_model_are_regions(*, use_reentrant: bool, depth: int) -> None:
    graph = graph_of(Blocks(functools.partial(checkpoint, use_reentrant=use_reentrant), depth))
    regions = named_regions(graph, ())
    assert modules_of(graph, regions) == ["embedding", *(f"layers.{index}.norm" for index in range(depth)), "head"]
    assert [region.recompute for region in regions] == ["none", *["full"] * depth, "none"]
    assert not any(region.is_joined for region in regions)


def _saves_products(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_selective_checkpoint_saves_what_its_policy_says() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, _saves_products)
    graph = graph_of(Blocks(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts), 1))
    policies, position = {}, {region.first_node: region for region in named_regions(graph, ())}
    region = None
    for node in graph.computing_nodes():
        region = position.get(node.name, region)
        policies[node.name] = region and region.recompute
    assert {policies[name] for name in ("layer_norm", "add", "gelu")} == {"full"}
    assert {policies[name] for name in policies if name.startswith("linear")} == {"none"}


def test_plans_with_regions_are_read_back_and_checked() -> None:
    pm = partition(Blocks(), 1, "model", example_inputs=(X,), training=True, recompute={"layers.*": "full"})
    assert pm.plan.recompute == "by region"
    again = Plan.from_json(pm.plan.to_json())
    assert again == pm.plan
    text = pm.plan.to_json().replace('"recompute": "full"', '"recompute": "sometimes"')
    with pytest.raises(ConfigError, match=r"plan.regions\[1\].recompute: 'sometimes' does not fit"):
        Plan.from_json(text)
    name = pm.plan.regions[1].first_node
    with pytest.raises(ConfigError, match=r"regions\[1\].first_node"):
        partition(Blocks(), 1, plan=Plan.from_json(again.to_json().replace(f'"{name}"', '"absent"')), example_inputs=(X,), training=True)


@pytest.mark.parametrize(
    ("recompute", "problem"),
    [
        ({"layer.*": "full"}, r"recompute names 'layer\.\*', which is no module of the model(.|\n)*did you mean"),
        ({"layers.*": "sometimes"}, r"there is no recompute\['layers\.\*'\]='sometimes'"),
        ({"layers.*": 1}, "recompute"),
    ],
)
def test_bad_patterns(recompute: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        partition(Blocks(), 1, "model", example_inputs=(X,), recompute=recompute)


def test_a_policy_without_effect_is_noted() -> None:
    model = Blocks()
    model.embedding.requires_grad_(requires_grad=False)
    pm = partition(model, 1, "model", example_inputs=(X,), training=True, recompute={"embedding": "full", "layers.*": "full"})
    notes = [note for note in pm.plan.notes if "has no effect" in note]
    assert notes == ['recompute={"embedding": ...} has no effect: nothing there needs a gradient']


@pytest.mark.parametrize(("first_layer", "recompute"), [(nn.Linear(8, 8), {"1": "none"}), (nn.Identity(), "full")])
def test_a_region_may_begin_with_a_dropout_whose_mask_ranks_share(first_layer: nn.Module, recompute: Any) -> None:
    """Beside axes, the mask is a value of its own, drawn before the dropout; the plan names the dropout."""
    model = nn.Sequential(first_layer, nn.Dropout(0.5), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).train()
    pm = partition(model, 2, "tensor", example_inputs=(torch.randn(4, 8),), recompute=recompute, progress=False)
    assert "dropout" in {region.first_node for region in pm.plan.regions}
