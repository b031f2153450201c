"""Recomputation: equal numbers, less memory, plans equal to programs, and only where memory needs it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from partitioner import Constraints, InfeasiblePlanError, PartitionedModel, partition
from partitioner.tracing.trace import trace
from passes.autograd.recompute import _is_small
from passes.autograd.staged_model import Differentiation, cut_stages
from passes.graph.aliasing import memory_keys
from passes.ir.comm import primitives as communication
from passes.normalize.randomness.functional_rng import dropout_mask_again
from passes.pipeline import differentiate_stages
from tests.support.models.zoo import case_named
from tests.support.running.slow_values import slow

CASE = case_named("gpt")
ROWS = 8
SMALL = 64
"""Bytes of position numbers, which every stage makes for itself."""


@functools.cache
def planned(recompute: str | None, memory_limit: int | None = None) -> PartitionedModel:
    instance = CASE.build(batch_size=ROWS)
    return partition(
        instance.model,
        devices=2,
        mode="pipeline",
        example_inputs=instance.args,
        example_kwargs=dict(instance.kwargs),
        schedule="GPipe",
        n_microbatches=4,
        recompute=recompute,
        memory_limit=memory_limit,
    )


@functools.cache
def saved_bytes(recompute: str) -> tuple[int, ...]:
    """Return, for each stage, the bytes that its lowered forward saves for one microbatch, shared memory counted once.

    Inputs of the step that a stage receives share memory with these.
    """
    plan = planned(recompute).plan
    instance = CASE.build(batch_size=ROWS)
    graph = trace(instance.model, instance.args, instance.kwargs)
    devices = [torch.device("cpu")] * 2
    everything = Differentiation(frozenset(graph.returned), frozenset(), frozenset(graph.parameters))
    lowered = differentiate_stages(cut_stages([graph] * len(plan.stages), plan, devices), everything, recompute)  # type: ignore[arg-type]
    found = []
    for stage in lowered.training:
        results: Any = stage.forward.graph.output_node().args[0]
        inputs = {leaf.placeholder for leaf in graph.inputs}
        saved = (node for node in results[-1] if node.name not in inputs)
        storages = {key: int(tensor.untyped_storage().nbytes()) for node in saved for tensor, key in memory_keys(node)}
        found.append(sum(storages.values()) // 4)
    return tuple(found)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "margin"), [("none", 0.0), ("selective", 0.25), ("full", 0.05)])
def test_predicted_activations_are_what_the_graphs_save(recompute: str, margin: float) -> None:
    """Never less than is saved; with ``"selective"`` a stage's last results count though no reader of its own needs them again.

    Beside what the last stage keeps, the gradient of its result comes from the loss.
    """
    stages = planned(recompute).plan.stages
    result = CASE.build(batch_size=ROWS // 4)
    from_loss = result.model(*result.args, **result.kwargs).nbytes
    for stage, saved in zip(stages, saved_bytes(recompute), strict=True):
        beside = from_loss if stage is stages[-1] else 0
        assert saved * 0.97 <= stage.activation_bytes <= saved * (1.03 + margin) + beside + SMALL


@pytest.mark.slow
def test_each_policy_saves_less() -> None:
    assert sum(saved_bytes("full")) < sum(saved_bytes("selective")) < sum(saved_bytes("none"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:train_step.. fits")
def test_the_planner_recomputes_as_little_as_the_memory_allows() -> None:
    peaks = {recompute: max(planned(recompute).plan.memory) for recompute in ("none", "selective", "full")}
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    assert planned(None).plan.recompute == "none"
    for recompute, peak in peaks.items():
        chosen = planned(None, memory_limit=peak).plan
        assert max(chosen.memory) <= peak
        assert chosen.step_time <= planned(recompute).plan.step_time
    with pytest.raises(InfeasiblePlanError):
        planned(None, memory_limit=peaks["full"] // 2)


@pytest.mark.slow
def test_recomputing_takes_longer() -> None:
    times = [planned(recompute).plan.step_time for recompute in ("none", "selective", "full")]
    assert times == sorted(times)
    assert times[0] < times[2]


class WrittenOut(nn.Module):
    """A block with decomposed attention: scores and weights are larger than the queries and keys that they are made from."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.dropout((query @ key.transpose(-2, -1) / 3).softmax(-1))
        x = x + self.dropout(self.project((weights @ value).transpose(1, 2).reshape(batch, length, width)))
        return torch.as_tensor(x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x))))))


LENGTH = 224
CUT_BESIDE = Constraints(axes={"heads": "tensor", "ffn": "tensor", "sequence": "tensor"})


@functools.cache
def inlined(recompute: str) -> tuple[PartitionedModel, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(WrittenOut(), WrittenOut()).double(), torch.rand(2, LENGTH, 16, dtype=torch.float64)
    arguments = {"example_inputs": (x,), "recompute": recompute, "constraints": CUT_BESIDE, "memory_limit": "1TiB"}
    return partition(model, 2, {"tensor": 2}, **arguments), model, x  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "drawn_again"), [("selective", 2), ("full", 6)])  # those of attention; all
def test_masks_are_drawn_again_and_parts_gathered_again(recompute: str, drawn_again: int) -> None:
    pm, model, x = inlined(recompute)
    target, reference = torch.rand_like(x), copy.deepcopy(model)
    torch.manual_seed(5)
    expected = nn.functional.mse_loss(reference(x), target)
    expected.backward()
    after = torch.get_rng_state()
    torch.manual_seed(5)
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12, msg=name)
    nodes = [node for node in pm.graph(0).graph.nodes if str(node.meta.get("section")) == "0B0"]
    assert sum(node.target is dropout_mask_again for node in nodes) == drawn_again
    again = [node for node in nodes if node.target is communication.all_gather and node.meta["again"]]
    assert len(again) >= 4  # what the first linear layers of each half of both blocks read


@pytest.mark.slow
def test_the_attention_core_is_made_again_and_no_more() -> None:
    """34 of 34 + 5 heads x length / width bytes an element in half precision (Korthikanti et al. 2022)."""
    kept = {recompute: inlined(recompute)[0].simulate().memory[0].kept for recompute in ("none", "selective")}
    values = 16  # a block: inputs of both norms and what is after them, queries, keys, values, attended; 4 times as wide: up, gelu
    half = 2 * LENGTH * 16 * 8 // 2
    assert kept["selective"] < kept["none"] / 2
    blocks = 2 * values * half
    masks, statistics, states = 4 * half // 8, 2 * 4 * half // 16, 2 * 5056  # a byte a number; two numbers a row; two of the generator
    around = 5 * 2 * half  # what the step is given and gives, its gradient, and two copies in a loss function: whole on each rank
    assert blocks <= kept["selective"] - masks - statistics - states <= blocks + around + SMALL


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "drawn_again"), [("none", 0), ("selective", 1), ("full", 3)])
def test_masks_are_drawn_again_with_what_they_are_laid_over(recompute: str, drawn_again: int) -> None:
    """Selective: that of attention alone, which is larger than queries and keys; all are larger than the generator's state."""
    x = torch.rand(4, LENGTH, 16)
    pm = partition(WrittenOut(), 2, {"tensor": 2}, example_inputs=(x,), recompute=recompute, memory_limit="1TiB")
    pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
    assert sum(node.target is dropout_mask_again for node in pm.graph(0).graph.nodes) == drawn_again


def test_repeated_blocks_with_dropout_are_planned_cut() -> None:
    """Masks are written beside the model's nodes: no module is theirs."""
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(6)]
    pm = partition(nn.Sequential(*layers), 2, {"tensor": 2}, example_inputs=(torch.rand(4, 8),), recompute="none")
    assert pm.plan.stages[0].modules == tuple(str(index) for index in range(6))


class GatheredMeans(nn.Module):
    """Three rows in two tiles, and a sum over their columns that a gather reads; rank 1 has one row, rank 0 two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(1, 4), nn.Conv2d(4, 2, 2, stride=2, groups=2, padding=2, padding_mode="replicate")
        self.second, self.last = nn.Conv2d(2, 2, 1, stride=2), nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        means = self.second(self.first(self.norm(x))).mean(1)
        largest = torch.zeros_like(means).scatter_(1, means.argmax(1, keepdim=True), 1.0)
        return torch.as_tensor(self.last(largest + means))


@pytest.mark.parametrize("recompute", ["selective", *slow("full")])
@pytest.mark.parametrize("mesh", [{"tile": 2}, *slow({"zero2": 2, "tile": 2})], ids=str)
def test_ranks_with_parts_of_unlike_sizes_gather_alike(mesh: dict[str, int], recompute: str) -> None:
    """Saved values depend on a rank's sizes; repeated gathers must not: other ranks would wait."""
    torch.manual_seed(0)
    model, x = GatheredMeans().double(), torch.randn(4, 4, 7, 7, dtype=torch.float64).transpose(-1, -2)
    target = torch.randn(4, 3, 12, dtype=torch.float64)
    pm = partition(model, math.prod(mesh.values()), mesh, example_inputs=(x,), recompute=recompute, progress=False)
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    expected = nn.functional.mse_loss(model(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("mode", [{"data": 2}, *slow({"fsdp": 2}, {"pipeline": 2}, {"tensor": 2})])
def test_programs_recompute_what_the_plan_names(mode: dict[str, int]) -> None:
    """Of a plan that names fewer operations, the backward computes fewer again, and keeps more; gradients are the same."""
    instance = CASE.build(batch_size=ROWS)
    options: dict[str, Any] = {"example_inputs": instance.args, "example_kwargs": dict(instance.kwargs), "progress": False}
    plan = partition(instance.model, 2, mode, recompute="selective", **options).plan
    assert plan.recomputed
    kept, gradients = list[int](), list[dict[str, Tensor | None]]()
    for names in (plan.recomputed, plan.recomputed[::2], ()):
        model = copy.deepcopy(instance.model)
        pm = partition(model, 2, plan=dataclasses.replace(plan, recomputed=names), **options)
        kept.append(max(each.kept for each in pm.simulate().memory))
        loss_of(pm(*instance.args, **instance.kwargs)).backward()
        gradients.append(dict(pm.full_gradients()))
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]
    loss_of(instance.model(*instance.args, **instance.kwargs)).backward()
    for name, parameter in instance.model.named_parameters():
        for found in gradients:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)


def loss_of(result: Any) -> Tensor:
    """Return the mean of the squares of a result."""
    return torch.as_tensor((result**2).mean())


def test_means_are_saved_instead_of_sums_over_ranks() -> None:
    """A selective recomputation of batch normalization starts from the mean and the variance of all ranks."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    pm = partition(model, 2, "data", example_inputs=(torch.ones(4, 4, 8, 8),), progress=False, recompute="selective")
    calls = [node for node in pm.graphs[0].graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls].count(torch.ops.partitioner.normalize.default) == 2, "it is computed again"
    quotients = [node for node in calls if node.target is torch.ops.aten.div.Tensor and "all_reduce" in node.args[0].name]
    assert len(quotients) == 2


def test_a_norm_of_a_sum_over_ranks_is_computed_again() -> None:
    """Its backward reads the sum, which is saved all the same."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.norm(self.first(x)))
            return y

    axes = Constraints(axes={"features": "tensor"})
    pm = partition(Normed(), 2, "tensor", example_inputs=(torch.ones(4, 8),), progress=False, recompute="selective", constraints=axes)
    targets = [node.target for node in pm.graphs[0].graph.nodes]
    assert targets.count(torch.ops.aten.native_layer_norm.default) == 2


def test_a_sum_over_ranks_is_no_value_that_is_computed_again() -> None:
    """An embedding whose rows are over the ranks: the sum is a message, which is saved."""
    layers = [nn.Embedding(64, 8), nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)]
    options: dict[str, Any] = {"recompute": "selective", "constraints": Constraints(axes={"vocab": "tensor"}), "progress": False}
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    pm = partition(nn.Sequential(*layers), 2, "tensor", example_inputs=(tokens,), **options)
    assert pm.plan.recomputed == ("layer_norm", "gelu")


def test_a_sum_over_ranks_that_enters_a_region_is_saved() -> None:
    """Not what a rank adds to it, which would be sent again: a region ends between a convolution and its normalization."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())]
    model, x = nn.Sequential(*layers).double(), torch.randn(4, 4, 5, 5, dtype=torch.float64)
    options: dict[str, Any] = {"example_inputs": (x,), "constraints": Constraints(axes={"channels": "tensor"}), "progress": False}
    sums, gradients = list[int](), list[dict[str, Tensor | None]]()
    for recompute in ("none", "full"):
        pm = partition(copy.deepcopy(model), 2, "tensor", recompute=recompute, **options)
        assert bool(pm.plan.regions) == (recompute == "full")
        sums.append([node.target for node in pm.graphs[0].graph.nodes].count(communication.reduce_scatter))
        loss_of(pm(x)).backward()
        gradients.append(dict(pm.full_gradients()))
    assert sums == [5, 5]
    loss_of(model(x)).backward()
    for name, parameter in model.named_parameters():
        for found in gradients:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)


def test_numbers_inside_a_loss_are_saved() -> None:
    """The total weight: logarithms of probabilities are computed again, the loss is not."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 12)
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.last(self.blocks(self.first(x))), target)

    model, inputs = Classifier(), (torch.randn(8, 16), torch.randint(12, (8,)))
    expected = model(*inputs).detach()
    pm = partition(model, 2, "tensor", example_inputs=inputs, recompute="selective", progress=False)
    torch.testing.assert_close(pm.train_step(*inputs), expected)
    targets = [node.target for node in pm.graphs[0].graph.nodes]
    assert targets.count(torch.ops.aten._log_softmax.default) == 2
    assert targets.count(torch.ops.aten.nll_loss_forward.default) == 1


@pytest.mark.parametrize("n_words", [64, 65])
def test_a_loss_over_a_sharded_vocabulary_is_computed_once(n_words: int) -> None:
    """Also where one rank has a word more: exponentials have the size of the scores that are saved, on all ranks."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Embedding(n_words, 8), nn.Linear(8, n_words)
            self.norm = nn.LayerNorm(8)

        def forward(self, tokens: Tensor) -> Tensor:
            scores = self.last(nn.functional.gelu(self.norm(self.first(tokens))))
            return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())

    model, tokens = Language(), torch.randint(n_words, (4, 6))
    own = copy.deepcopy(model)
    own(tokens).backward()
    options: dict[str, Any] = {"recompute": "selective", "constraints": Constraints(axes={"vocab": "tensor"}), "progress": False}
    pm = partition(model, 2, "tensor", example_inputs=(tokens,), **options)
    torch.testing.assert_close(pm.train_step(tokens), own(tokens).detach())
    torch.testing.assert_close(dict(pm.named_parameters())["last.weight"].grad, own.last.weight.grad)
    for graph in pm.graphs:
        targets = [node.target for node in graph.graph.nodes]
        assert targets.count(torch.ops.aten.exp.default) == 1
        assert targets.count(torch.ops.aten.gelu.default) == 2


def test_a_size_of_the_batch_is_no_value_that_an_inner_value_has_the_size_of() -> None:
    """A value times the symbolic number of rows, where ranks hold parts of different sizes."""
    graph = torch.fx.Graph()
    rows, x = graph.placeholder("rows"), graph.placeholder("x")
    rows.meta["val"], x.meta["val"] = ShapeEnv().create_unbacked_symint(), torch.empty(3, 5)
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, rows))
    product.meta["val"] = torch.empty(3, 5)
    nodes: Any = SimpleNamespace(has_uneven_parts=True, uneven_sizes={3, 2}, bytes_of=lambda node: node.meta["val"].nbytes)
    assert not _is_small(product, {rows}, nodes)
    assert _is_small(product, {rows, x}, nodes)
