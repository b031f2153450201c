"""A stage that is differentiated region by region has the joint graph that it has as a whole, call by call."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner.tracing.trace import trace
from passes.autograd import region_cache as region_templates
from passes.autograd.joint_from_regions import differentiate_regions
from passes.autograd.region_cache import RegionTemplates
from passes.autograd.regions import Region
from passes.autograd.staged_model import Differentiation, cut_stages
from passes.autograd.trace_joint import Joint, differentiate, differentiate_from
from passes.graph.aliasing import aliasing
from passes.graph.equivalence import argument_key
from passes.graph.provenance import module_path
from passes.graph.symbolic_sizes import size_of
from passes.normalize.randomness.functional_rng import split_randomness
from passes.pipeline import values_requiring_gradient
from passes.stages.split import StageGraph
from tests.support.models.attention.gpt import Block, Gpt
from tests.support.running.programs import even_plan

CPU = torch.device("cpu")
DEPTH = 4


class Stack(nn.Module):
    """Blocks after each other, between layers of their own."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(make() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return result


class Shared(Stack):
    """All blocks scale by one parameter, twice each; one block is used for all depths."""

    def __init__(self) -> None:
        super().__init__(Perceptron)
        self.scale = nn.Parameter(torch.rand(8))
        self.block = Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.block(block(x) * self.scale) - self.scale.tanh()
        result: Tensor = self.last(x)
        return result


class Returned(Stack):
    """The result of every block is returned, and read by all later blocks."""

    def __init__(self) -> None:
        super().__init__(Perceptron)

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        states = [self.first(x)]
        for block in self.blocks:
            states.append(block(states[-1]) + states[0])
        return [*states, self.last(states[-1])]


class Frozen(Stack):
    """Of some blocks nothing is trained; the first come before anything that is."""

    def __init__(self) -> None:
        super().__init__(Perceptron)
        for module in (self.first, self.blocks[0], self.blocks[2]):
            module.requires_grad_(False)


class Crossed(Stack):
    """Blocks read what an encoder gives, and give it turned around."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first(x)
        y = memory.unsqueeze(1).expand(-1, 4, -1)
        for block in self.blocks:
            y = (memory.unsqueeze(2).relu() * block(y).transpose(1, 2)).mT + y
        result: Tensor = self.last(y).sum(1)
        return result


class SharedNorm(Stack):
    """Every block writes the statistics of one normalisation: one region."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.norm(block(x).tanh()).relu()
        result: Tensor = self.last(x)
        return result


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "perceptron": lambda: Stack(Perceptron),
    "attention": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 12), *(Block(12, 3) for _ in range(DEPTH)), nn.Flatten()),
    "batch_norm": lambda: Stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))),
    "shared": Shared,
    "returned": Returned,
    "frozen": Frozen,
    "crossed": Crossed,
    "shared_norm": SharedNorm,
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), *(nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.SiLU()) for _ in range(DEPTH))
    ),
}

FAST = (("batch_norm", 1),)


def stages_of(model: nn.Module, x: Tensor, n_stages: int = 1) -> tuple[list[StageGraph], frozenset[str], list[frozenset[str]]]:
    """Return the stages, the differentiable values, and for each stage the outputs whose gradients are given."""
    graph = split_randomness(trace(model, (x,), training=True))
    lowered = cut_stages([graph] * n_stages, even_plan(graph, "GPipe", n_stages, 1), [CPU] * n_stages)
    names = {name: original for name, original in graph.parameters.items() if model.get_parameter(original).requires_grad}
    wanted = Differentiation(frozenset(graph.returned), frozenset(), frozenset(names))
    requiring = values_requiring_gradient(lowered, wanted.parameters)
    return list(lowered.stages), wanted.parameters | requiring, [frozenset(stage.outputs) & requiring for stage in lowered.stages]


def assert_same(one: Joint, other: Joint) -> None:
    """Call by call, value by value, memory by memory; names aside."""
    assert list(one.gradients) == list(other.gradients)
    assert one.outputs_with_gradient == other.outputs_with_gradient
    places = [{node: place for place, node in enumerate(joint.graph.nodes)} for joint in (one, other)]
    for mine, theirs in zip(one.graph.nodes, other.graph.nodes, strict=True):
        assert (mine.op, mine.target if mine.op == "call_function" else mine.name) == (
            theirs.op,
            theirs.target if theirs.op == "call_function" else theirs.name,
        )
        assert argument_key((mine.args, mine.kwargs), places[0].__getitem__) == argument_key(
            (theirs.args, theirs.kwargs), places[1].__getitem__
        )
        assert lies(mine) == lies(theirs), mine
        assert module_path(mine) == module_path(theirs)
        assert (mine in one.sources) == (theirs in other.sources)
        assert one.sources.get(mine) == other.sources.get(theirs)
    assert sharing(one.graph) == sharing(other.graph)


def sharing(graph: fx.Graph) -> list[frozenset[int]]:
    """Return, for each node, the places of the nodes that share its memory."""
    memory = aliasing(graph)
    at = [memory.storages.get(node.name, frozenset()) for node in graph.nodes]
    return [frozenset(place for place, other in enumerate(at) if not own.isdisjoint(other)) for own in at]


def lies(node: fx.Node) -> Hashable:
    def described(value: object) -> Hashable:
        if isinstance(value, Tensor):
            return tuple(size_of(size) for size in (*value.shape, *value.stride())), value.dtype
        return tuple(map(described, value)) if isinstance(value, tuple | list) else str(value)

    return described(node.meta.get("val"))


@pytest.mark.parametrize(
    ("name", "n_stages"),
    [pytest.param(name, count, marks=() if (name, count) in FAST else pytest.mark.slow) for name in MODELS for count in (1, 2)],
)
def test_regions_give_the_joint_graph_of_the_whole(name: str, n_stages: int) -> None:
    torch.manual_seed(0)
    stages, differentiable, given = stages_of(MODELS[name]().double(), torch.randn(8, 6, dtype=torch.float64), n_stages)
    templates = RegionTemplates()
    for stage, of_outputs in zip(stages, given, strict=True):
        wanted = frozenset(each for each in stage.bound + stage.arguments if each in differentiable)
        whole = differentiate(stage, wanted, of_outputs, CPU)
        assert_same(whole, differentiate_regions(stage, wanted, of_outputs, templates))
        if n_stages == 1:
            n_regions = sum(isinstance(step, Region) for step in templates.steps(stage))
            assert n_regions == 1 if name == "shared_norm" else n_regions >= DEPTH


@pytest.mark.slow
def test_blocks_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    original = differentiate_from

    def counted(stage: StageGraph, *rest: object) -> Joint:
        traced.append(stage.module.code)
        return original(stage, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(region_templates, "differentiate_from", counted)
    tokens = torch.zeros(8, 6, dtype=torch.int64)
    counts = []
    for depth in (3, 9):
        stages, differentiable, given = stages_of(Gpt(depth=depth), tokens)
        wanted = frozenset(each for each in stages[0].bound if each in differentiable)
        traced.clear()
        differentiate_regions(stages[0], wanted, given[0], RegionTemplates())
        counts.append(len(traced))
    assert counts[0] == counts[1] <= 3


def test_regions_share_results_only_if_inputs_have_equal_layouts() -> None:
    """Equal blocks share an entry; blocks whose inputs differ in strides, or in being tracked, do not."""
    stages, differentiable, _ = stages_of(Stack(Perceptron).double(), torch.randn(8, 6, dtype=torch.float64))
    (stage,), templates = stages, RegionTemplates()
    first, second, *_ = (step for step in templates.steps(stage) if isinstance(step, Region) and len(step.inputs) > 4)
    examples = {node: node.meta["val"] for region in (first, second) for node in templates.inputs(stage, region)}
    tracked = {node for node in examples if node.name in differentiable}
    known = templates.run(stage, first, examples, tracked)
    assert templates.run(stage, second, examples, tracked) is known
    assert templates.run(stage, second, examples, set()) is not known
    (weight,) = (node for node in second.inputs if node.name.endswith("up_weight"))
    assert templates.run(stage, second, {**examples, weight: examples[weight].T.contiguous().T}, tracked) is not known
