"""Bad input is refused with the problem and the remedy: never guessed, never a hang."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import (
    Cluster,
    ConfigError,
    Constraints,
    InfeasiblePlanError,
    PartitionedModel,
    PartitionError,
    Plan,
    TraceError,
    partition,
)
from tests.support.running.slow_values import slow

X = torch.randn(8, 4)


class Scaled(nn.Module):
    """Two inputs and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor, scale: Tensor, *, double: bool = False) -> Tensor:
        y = self.layers(x) * scale
        return torch.as_tensor(2 * y if double else y)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def made(**arguments: Any) -> PartitionedModel:
    return partition(mlp(), **{"devices": 2, "mode": "pipeline", "example_inputs": (X,), **arguments})


@pytest.fixture(scope="module")
def pm() -> PartitionedModel:
    return made(n_microbatches=2)


@pytest.fixture(scope="module")
def scaled() -> PartitionedModel:
    example = {"scale": torch.ones(8, 1), "double": False}
    return partition(Scaled(), devices=2, mode="pipeline", example_inputs=(X,), example_kwargs=example, n_microbatches=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 0}, ("devices=0", "at least one")),
        ({"devices": -1}, ("devices=-1",)),
        ({"devices": []}, ("at least one device",)),
        ({"devices": None}, ("no", "devices=4")),
        ({"devices": ["cuda:99", "cpu"]}, ("cuda:99",)),
        ({"devices": ["elephant"]}, ("elephant",)),
        ({"devices": 200}, ("200", "stages")),
        ({"mode": "pipelin"}, ("pipelin",)),
        ({"mode": "tile"}, ("no space", "convolutions")),
        ({"mode": {"tile": (2, 0)}}, ("tile", "1 or more")),
        ({"mode": {"data": (2, 1)}}, ("only tiles make a grid",)),
        ({"mode": {"pipeline": 3}}, ("3 devices", "devices=3")),
        ({"mode": {"pipeline": 2, "tile": 2}, "devices": 4}, ("no space",)),
        ({"schedule": "1F1C"}, ("1F1C", "1F1B")),
        ({"schedule": "ZBV", "stages_per_device": 3}, ("ZBV",)),
        ({"n_microbatches": 0}, ("0",)),
        ({"recompute": "sometimes"}, ("sometimes",)),
        ({"memory_limit": "lots"}, ("lots",)),
        ({"optimizer": "adamx"}, ("adamx",)),
        ({"precision": "half"}, ("half", "bf16-mixed")),
        ({"batchnorm": "mine"}, ("mine", "local")),
        ({"inputs": "rows"}, ("rows", "local")),
        ({"cluster": "abacus:4"}, ("abacus",)),
        ({"constraints": Constraints(device_map={"layer_nine": 0})}, ("layer_nine",)),
        ({"constraints": Constraints(split_spec={"17": "beginning"})}, ("17",)),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_arguments(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**arguments)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "remedy:" in text
    assert isinstance(caught.value, ValueError)


def test_memory_that_nothing_fits_says_how_much_is_missing() -> None:
    with pytest.raises(InfeasiblePlanError, match="does not fit 2 devices of 100 B: the fullest device lacks") as caught:
        made(memory_limit=100)
    assert "remedy:" in str(caught.value)


def test_plan_for_other_devices(pm: PartitionedModel) -> None:
    with pytest.raises(ConfigError, match="plan is for 2 devices"):
        made(devices=3, plan=pm.plan)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 7}', '{"format": 1, "wheels": 4}'])
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pm: pm(), ("x, scale", "None now")),
        (lambda pm: pm(X), ("Scaled.forward", "missing a required argument: 'scale'")),
        (lambda pm: pm(X, scale=torch.ones(8, 2), double=False), ("scale", "(8, 2)", "(batch, 1)")),
        (lambda pm: pm(X[:4], scale=torch.ones(8, 1), double=False), ("x has 4", "scale has 8")),
        (lambda pm: pm(X.double(), scale=torch.ones(8, 1), double=False), ("float64", "float32")),
        (lambda pm: pm(X[:, :3], scale=torch.ones(8, 1), double=False), ("(8, 3)", "(batch, 4)")),
        (lambda pm: pm(X[None], scale=torch.ones(8, 1), double=False), ("3 dimensions", "(batch, 4)")),
        (lambda pm: pm(X.tolist(), scale=torch.ones(8, 1), double=False), ("arguments",)),
        (lambda pm: pm(X.to("meta"), scale=torch.ones(8, 1), double=False), ("x is on the meta device",)),
        (lambda pm: pm(X, scale=torch.ones(8, 1).to_sparse(), double=False), ("scale is sparse (torch.sparse_coo)",)),
        (lambda pm: pm(X, scale=torch.ones(8, 1), double=torch.ones(2).numpy()), ("double", "a ndarray of shape (2,)")),
        (lambda pm: pm(X[:0], scale=torch.ones(0, 1), double=False), ("empty",)),
    ],
)
def test_inputs_at_run_time(scaled: PartitionedModel, call: Callable[[PartitionedModel], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        call(scaled)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss_fn": nn.functional.mse_loss, "target": torch.randn(5, 2)}, ("5", "8")),
        ({"loss_fn": nn.functional.mse_loss, "target": [torch.randn(8, 2)]}, ("loss_fn fails", "AttributeError")),
        ({"loss_fn": nn.functional.mse_loss, "target": torch.empty(8, 2, device="meta")}, ("target is on the meta device",)),
        ({"loss_fn": nn.functional.mse_loss, "target": torch.zeros(8, 2).to_sparse()}, ("target is sparse (torch.sparse_coo)",)),
        ({"loss_fn": lambda output, target: output.sum().to("meta"), "target": torch.randn(8, 2)}, ("loss is on the meta device",)),
        ({"loss_fn": nn.MSELoss(reduction="none"), "target": torch.randn(8, 2)}, ("loss", "one number")),
        ({"loss_fn": lambda output, target: 3.0, "target": torch.randn(8, 2)}, ("loss", "float")),
        ({}, ("loss",)),
        ({"loss_fn": nn.functional.mse_loss, "target": torch.randn(8, 2), "loss_reduction": "max"}, ("max", "mean")),
    ],
)
def test_losses(pm: PartitionedModel, arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        pm.train_step(X, **arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_loss_that_is_known_fails_on_another_target(pm: PartitionedModel) -> None:
    """A loss is proved once; each step checks its target."""
    pm.train_step(X, target=torch.randn(8, 2), loss_fn=nn.functional.mse_loss)
    for target in (["a"], object(), {"a": torch.randn(8, 2)}):
        with pytest.raises(ConfigError, match=r"loss_fn fails on .*: AttributeError"):
            pm.train_step(X, target=target, loss_fn=nn.functional.mse_loss)


def test_a_loss_of_the_output_alone(pm: PartitionedModel) -> None:
    with pytest.raises(ConfigError, match=r"takes 1 positional argument .*\n.*without target= the second argument is None"):
        pm.train_step(X, loss_fn=lambda output: output.mean())


def test_what_a_plan_freezes(pm: PartitionedModel) -> None:
    with pytest.raises(ConfigError, match="cannot be moved"):
        pm.double()
    with pytest.raises(ConfigError, match="no rank 2"):
        pm.graph(2)
    assert pm.train() is pm


def test_states_that_do_not_fit(pm: PartitionedModel) -> None:
    state = pm.full_state_dict()
    with pytest.raises(ConfigError, match="wheel"):
        pm.load_state_dict({**state, "wheel": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"0\.weight"):
        pm.load_state_dict({name: tensor for name, tensor in state.items() if name != "0.weight"})
    with pytest.raises(ConfigError, match="shape"):
        pm.load_state_dict({**state, "0.weight": torch.zeros(2, 2)})


def test_a_second_backward_is_refused(pm: PartitionedModel) -> None:
    loss = pm(X).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match=r"(?s)keeps nothing for a second one.*add the losses and call backward\(\) once"):
        loss.backward()
    pm.zero_grad()


def test_meta_models_plan_but_do_not_run() -> None:
    with torch.device("meta"):
        model = mlp()
    pm = partition(model, devices=2, mode="pipeline", example_inputs=(torch.empty(8, 4, device="meta"),))
    assert len(pm.graphs) == 2
    for run in (pm, pm.check):
        with pytest.raises(ConfigError, match=r"the model is on the meta device.*have shapes but no numbers"):
            run(torch.empty(8, 4, device="meta"))


WORDS = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))


def recorded(pm: PartitionedModel, ids: Tensor) -> None:
    with pm.record():
        pm(ids)


@pytest.mark.parametrize("mode", ["pipeline", *slow("data", "fsdp", "tensor")])
def test_an_operation_that_fails_is_named(mode: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    pm = partition(WORDS, 2, mode, example_inputs=ids)
    calls: tuple[Callable[[], object], ...] = (
        lambda: torch.no_grad()(pm)(ids + 9),
        lambda: pm(ids + 9),
        lambda: pm.train_step(ids + 9, loss_fn=lambda output, _target: output.mean()),
        functools.partial(recorded, pm, ids + 9),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"rank \d cannot compute embedding\w*: index out of range in self") as caught:
            call()
        assert "where: module 0, operation aten.embedding.default, at " in str(caught.value)
        assert isinstance(caught.value.__cause__, IndexError)


def test_errors_of_hooks_are_their_own() -> None:
    def fail(_parameter: Tensor) -> None:
        raise RuntimeError("of the hook")

    pm = partition(mlp(), 2, "pipeline", example_inputs=X)
    next(pm.parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError, match="of the hook"):
        pm.train_step(X, loss_fn=lambda output, _target: output.mean())


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_is_refused(pm: PartitionedModel) -> None:
    with pytest.raises(TraceError, match=r"(?s)runs programs on several ranks.*torch.jit.trace\(model, ...\)"):
        torch.jit.trace(pm, X)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


def test_control_flow_on_values_names_its_place() -> None:
    with pytest.raises(TraceError) as caught:
        partition(nn.Sequential(nn.Linear(4, 4), Branches()), devices=2, mode="pipeline", example_inputs=(X,))
    assert "test_bad_input.py" in str(caught.value)
    assert "remedy:" in str(caught.value)


def test_every_error_is_a_partition_error() -> None:
    assert all(issubclass(kind, PartitionError) for kind in (ConfigError, InfeasiblePlanError, TraceError))


def test_cluster_of_too_few_devices() -> None:
    with pytest.raises(ConfigError, match="devices"):
        made(devices=4, cluster=Cluster.preset("h100", devices_per_node=2))


class GroupsOfRows(nn.Module):
    """Takes time first, and folds it: for a caller whose batch is the first dimension, rows in groups of four."""

    def forward(self, x: Tensor) -> Tensor:
        batch_first = x.transpose(0, 1)
        return batch_first.reshape(batch_first.shape[0], 3, 4)


@pytest.mark.parametrize("mode", ["data", "fsdp", "zero1"])
def test_rows_that_a_model_keeps_together_are_no_replicas_batch(mode: str) -> None:
    with pytest.raises(ConfigError, match="keeps the 12 rows of the batch together in 3 groups, which 2 ranks cannot share equally"):
        partition(GroupsOfRows(), 2, mode, example_inputs=(torch.randn(12, 4),))
