"""``pm.check()`` says equal when all is equal, and names the first value that differs when something was broken."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Generator, Tensor, fx, nn

from partitioner import PartitionedModel, partition
from partitioner.reports.check.compare import compare
from partitioner.specialize.sharded_model import ShardedModel
from passes.ir.errors import ConfigError
from tests.support.models.case import Case, Inputs, mean_squared_error, real
from tests.support.models.zoo import case_named
from tests.support.running.transparency import make_partitioned

aten = torch.ops.aten


def partitioned(case: Case, **arguments: Any) -> PartitionedModel:
    return make_partitioned(case.build(), devices=3, mode="pipeline", n_microbatches=4, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("residual", "ZB1P"),
        ("gpt", "ZBV"),
        ("returns_loss", "1F1B"),
        ("nested_outputs", "Interleaved1F1B"),
        ("unet", "GPipe"),
    ],
)
def test_equal_models_are_equal(name: str, schedule: str) -> None:
    case = case_named(name)
    instance = case.build(batch_size=7)
    report = partitioned(case, schedule=schedule).check(*instance.args, **instance.kwargs)
    assert report, str(report)
    assert {part.name for part in report.parts} >= {"outputs", "gradients, backward()", "loss", "gradients, train_step", "values of nodes"}
    assert str(report).endswith("EQUAL: the partitioned model computes what the original computes")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    """Products of fewer rows round otherwise; every number that comes out is judged by the precision of the model."""
    case = case_named("residual")
    instance = case.build(batch_size=32, dtype=dtype)
    report = make_partitioned(instance, devices=2, mode="pipeline", n_microbatches=3).check(*instance.args)
    assert max(comparison.error for part in report.parts for comparison in part.comparisons) > 0
    assert report, str(report)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.first(x) if shift is None else self.first(x) + shift
        return self.last(y) * scale


def test_arguments_are_those_of_calls() -> None:
    """By name, and ones that the example lacks."""
    x = torch.rand(4, 4)
    pm = partition(Shifted(), 2, "pipeline", example_inputs=(x,), progress=False)
    for kwargs in ({"x": x}, {"x": x, "shift": x}, {"x": x, "scale": 2.0}):
        report = pm.check(**kwargs)
        assert report, str(report)
    with pytest.raises(ConfigError, match=r"does not fit Shifted.forward: got an unexpected keyword argument 'mask'"):
        pm.check(x, mask=x)


@pytest.mark.slow
def test_gradients_of_inputs() -> None:
    case = case_named("residual")
    (x,) = case.build().args
    report = partitioned(case).check(x.clone().requires_grad_())
    assert report
    for part in report.parts:
        if part.name.startswith("gradients"):
            assert part.comparisons[-1].what == "gradient of input args[0]" or "input" in part.comparisons[-1].what


@pytest.mark.slow
def test_present_weights_are_compared() -> None:
    case = case_named("gpt")
    instance = case.build()
    pm = partitioned(case)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
    optimizer.step()
    assert pm.check(*instance.args)


@pytest.mark.slow
def test_everything_is_left_as_it_was() -> None:
    case = case_named("batch_norm_convolution")
    instance = case.build()
    pm = partitioned(case)
    pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
    state = {name: value.clone() for name, value in pm.full_state_dict().items()}
    gradients = {name: None if value is None else value.clone() for name, value in pm.full_gradients().items()}
    text = [graph.code for graph in pm.graphs]
    original = {name: value.clone() for name, value in instance.model.state_dict().items()}
    random = torch.get_rng_state()
    pm.check(*instance.args)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in pm.full_state_dict().items())
    assert all(torch.equal(value, original[name]) for name, value in instance.model.state_dict().items())
    for name, value in pm.full_gradients().items():
        kept = gradients[name]
        assert (value is None and kept is None) or (value is not None and kept is not None and torch.equal(value, kept))
    assert [graph.code for graph in pm.graphs] == text


@pytest.mark.slow
def test_batch_norm_differs_by_definition() -> None:
    case = case_named("batch_norm_convolution")
    report = partitioned(case).check(*case.build().args)
    assert report
    (note,) = report.notes
    assert "BatchNorm in training (1, 5) normalises over the rows of each microbatch" in note
    assert "by definition" in note
    assert "in 1 microbatch" in report.title
    assert any(part.name == "buffers" and len(part.comparisons) == 6 for part in report.parts)


@pytest.mark.slow
def test_batch_norm_in_evaluation_does_not_differ() -> None:
    case = case_named("batch_norm_convolution")
    instance = case.build()
    instance.model.eval()
    report = make_partitioned(instance, devices=2, mode="pipeline", n_microbatches=4).check(*instance.args)
    assert report
    assert not report.notes
    assert "in 4 microbatches" in report.title


def test_dropout_differs_by_definition() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3)).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    pm = partition(model, devices=2, mode="pipeline", example_inputs=(x,), n_microbatches=4, progress=False)
    report = pm.check(x)
    assert report, str(report)
    assert "random numbers (1, 4) are drawn anew for each microbatch" in report.notes[0]


class Inference(nn.Module):
    """Nothing that it returns is differentiable."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).argmax(dim=-1)


def rows(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, 4),), {}


def test_a_model_without_gradients() -> None:
    case = Case("inference", Inference, rows, None, mean_squared_error)
    report = partitioned(case).check(*case.build().args)
    assert report
    assert {part.name for part in report.parts if part.comparisons} == {"outputs", "values of nodes"}


# -- broken on purpose -----------------------------------------------------------------------------------------------------------------


def lowering_of(pm: PartitionedModel) -> ShardedModel:
    return pm.sharded_for(8, in_parts=False)[1]


def replace(module: fx.GraphModule, target: Any, by: Any) -> str:
    """Let the last such node do something else."""
    node = next(node for node in reversed(module.graph.nodes) if node.target is target)
    node.target = by
    module.recompile()
    return node.name


def test_a_wrong_node_is_named() -> None:
    case = case_named("residual")
    pm = partitioned(case)
    name = replace(lowering_of(pm).stages.stages[1].module, aten.gelu.default, aten.relu.default)
    report = pm.check(*case.build().args)
    assert not report
    assert report.first_value is not None
    assert (report.first_value.node, report.first_value.stage, report.first_value.rank) == (name, 1, 1)
    assert report.first_value.place.source is not None
    assert report.first_value.place.source.rpartition(":")[0].endswith("perceptrons.py")
    text = str(report)
    assert f"the first value that differs, in the order of the graph, is {name}" in text
    assert "aten.gelu.default" in text
    assert text.endswith("DIFFERENT: the partitioned model does not compute what the original computes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt", {"data": 2, "tensor": 2}),
        ("batch_norm_convolution", {"tensor": 2}),
        ("batch_norm_convolution", {"data": 2, "tensor": 2}),
        ("group_norm_convolution", {"fsdp": 2, "pipeline": 2}),
    ],
)
def test_every_node_of_a_cut_model_is_compared(name: str, mesh: dict[str, int]) -> None:
    instance = case_named(name).build()
    pm = partition(instance.model, devices=math.prod(mesh.values()), mode=mesh, example_inputs=instance.args, n_microbatches=1)
    report = pm.check(*instance.args)
    assert report, report
    (nodes,) = [part for part in report.parts if part.name == "values of nodes"]
    calls = [
        node for node in pm.sharded_for(len(instance.args[0]))[1].cut.widest.graph.computing_nodes() if isinstance(node.meta["val"], Tensor)
    ]
    assert len(nodes.comparisons) == len(calls)


@pytest.mark.slow
def test_a_wrong_part_of_a_node_is_named() -> None:
    instance = case_named("gpt").build()
    pm = partition(instance.model, devices=2, mode="tensor", example_inputs=instance.args)
    _, sharded = pm.sharded_for(len(instance.args[0]))
    wrong = next(node for node in sharded.graph.graph.nodes if node.target is torch.ops.aten.gelu.default)
    wrong.target = torch.ops.aten.relu.default
    wrong.args, wrong.kwargs = wrong.args[:1], {}
    report = pm.check(*instance.args)
    assert not report
    assert report.first_value is not None
    assert report.first_value.node == wrong.name


@pytest.mark.slow
def test_a_wrong_training_graph_is_told_from_a_wrong_forward_graph() -> None:
    case = case_named("residual")
    pm = partitioned(case)
    sharded = lowering_of(pm)
    training = sharded.training(sharded.everything(frozenset()))
    replace(training.training[1].forward, aten.gelu.default, aten.relu.default)
    report = pm.check(*case.build().args)
    assert not report
    assert report.first_value is not None
    assert report.first_value.node in sharded.stages.stages[1].outputs
    assert report.first_value.cause == "the stage's forward graph computes the right value, its training graph does not"


@pytest.mark.slow
def test_a_wrong_gradient_is_named() -> None:
    """The gradient of a bias of the middle stage is doubled; everything else stays right."""
    case = case_named("residual")
    pm = partitioned(case)
    sharded = lowering_of(pm)
    training = sharded.training(sharded.everything(frozenset())).training[1]
    assert training.backward is not None
    names = training.parameters_with_gradient
    position = next(index for index, name in enumerate(names) if name.endswith("down_bias"))
    parameter = sharded.graph.parameters[names[position]]
    graph = training.backward.graph
    output = graph.output_node()
    *arguments, gradients = cast(tuple[Any, ...], output.args[0])
    with graph.inserting_before(output):
        doubled = graph.call_function(aten.mul.Tensor, (gradients[position], 2))
    changed = tuple(doubled if index == position else gradient for index, gradient in enumerate(gradients))
    output.args = ((*arguments, changed),)
    training.backward.recompile()
    report = pm.check(*case.build().args)
    assert not report
    assert report.first_value is None
    assert report.first_gradient is not None
    assert report.first_gradient.comparison.what == f"gradient of {parameter}"
    assert report.first_gradient.place.module == parameter.rpartition(".")[0]
    assert report.first_gradient.stage == 1
    assert {comparison.what for part in report.parts for comparison in part.differing} == {f"gradient of {parameter}"}


def test_wrong_inputs_are_refused() -> None:
    case = case_named("residual")
    with pytest.raises(ConfigError, match="has shape"):
        partitioned(case).check(torch.zeros(8, 5, dtype=torch.float64))


# -- comparing -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "found", "equal"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-12], True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan"), 1.0], [0.0, 1.0], False),
        ([float("-inf"), 1.0], [float("-inf"), 1.0], True),
        ([float("-inf"), 1.0], [-1e300, 1.0], False),
        ([-1.7e308, 1.0], [-1.7e308, 1.0 + 1e-3], False),
        ([0.0, 0.0], [1e-300, 0.0], False),
    ],
)
def test_compare(reference: list[float], found: list[float], equal: bool) -> None:
    comparison = compare("x", torch.tensor(reference, dtype=torch.float64), torch.tensor(found, dtype=torch.float64))
    assert comparison.equal is equal


def test_compare_needs_the_same_kind() -> None:
    zeros = torch.zeros(2, 3)
    assert not compare("x", zeros, None).equal
    assert not compare("x", None, zeros).equal
    assert compare("x", None, None).equal
    assert not compare("x", zeros, zeros.double()).equal
    assert not compare("x", zeros, zeros.T).equal
    assert not compare("x", torch.tensor([1]), torch.tensor([2])).equal
    assert compare("x", torch.tensor([1 + 2j]), torch.tensor([1 + 2j])).equal
