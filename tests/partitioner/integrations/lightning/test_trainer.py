"""Lightning's Trainer with a partitioned LightningModule: every step, checkpoint and log as on one device."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionError
from tests.support.processes.processes import Workers

pytestmark = pytest.mark.filterwarnings("ignore")

lightning = pytest.importorskip("lightning")

from lightning import LightningModule  # noqa: E402
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging  # noqa: E402

from partitioner.integrations.lightning import PartitionStrategy  # noqa: E402
from tests.partitioner.integrations.lightning.modules import Recording, fit, loader, partitioned  # noqa: E402
from tests.partitioner.integrations.lightning.process_cases import (  # noqa: E402
    refused_teachers,
    stochastic_averages,
    stochastic_averages_in_processes,
    trainer_losses,
    trainer_with_everything,
)

MODES = ("pipeline", "fsdp", "tensor")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Recording, dict[str, Any]]]:
    """Return the framework's own run on one device, and the checkpoint at its end; each once."""
    known: dict[Any, tuple[Recording, dict[str, Any]]] = {}

    def run(name: str, averages: bool = False, **options: Any) -> tuple[Recording, dict[str, Any]]:
        key = name, averages, *options.items()
        if key not in known:
            folder = tmp_path_factory.mktemp("whole")
            callbacks = [EMAWeightAveraging(decay=0.5)] if averages else []
            module, trainer = fit(name, "auto", folder, callbacks=callbacks, **{"devices": 1, **options})
            trainer.save_checkpoint(folder / "end.ckpt")
            known[key] = module, torch.load(folder / "end.ckpt", weights_only=False)
        return known[key]

    return run


def close(found: list[float], expected: list[float]) -> bool:
    one, other = (torch.tensor(losses, dtype=torch.float64) for losses in (found, expected))
    return len(found) == len(expected) and torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def same_weights(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    pairs = [(found[name], each) for name, each in expected.items()]
    return list(found) == list(expected) and all(torch.allclose(one, other, rtol=1e-9, atol=1e-11) for one, other in pairs)


def logged(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


ALL = [(name, mode) for name in ("gpt", "resnet") for mode in MODES]
RUNS = pytest.mark.parametrize(("name", "mode"), ALL)


@pytest.mark.slow
@RUNS
def test_losses_and_resumption_are_those_of_one_device(name: str, mode: str, whole: Any, tmp_path: Path) -> None:
    expected, end = whole(name)
    first, trainer = fit(name, partitioned(mode), tmp_path / "first", epochs=1)
    assert [model.plan.grid.names for model in trainer.strategy.partitioned_models] == [(mode,)]
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    second, trainer = fit(name, partitioned(mode), tmp_path / "second", resumed=tmp_path / "middle.ckpt")
    assert close(first.losses + second.losses, expected.losses)
    assert close(first.validated + second.validated[-2:], expected.validated)
    assert same_weights(second.state_dict(), expected.state_dict())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    found = torch.load(tmp_path / "end.ckpt", weights_only=False)
    assert found["optimizer_states"][0]["param_groups"] == end["optimizer_states"][0]["param_groups"]
    for number, entries in end["optimizer_states"][0]["state"].items():
        torch.testing.assert_close(found["optimizer_states"][0]["state"][number], entries)
    assert [row["lr-AdamW/pg1"] for row in logged(tmp_path / "second")]
    assert {type(module) for module in second.modules()} == {type(module) for module in expected.modules()}  # the user's own again


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
@RUNS
def test_processes_train_as_one_device(name: str, mode: str, whole: Any, workers: Callable[[int], Workers], tmp_path: Path) -> None:
    expected, _ = whole(name)
    for losses, validated in workers(2).values(trainer_losses, name, mode, tmp_path, timeout=280):
        assert close(losses, expected.losses)
        assert close(validated, expected.validated)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_processes_average_a_teacher_by_hand(mode: str, whole: Any, workers: Callable[[int], Workers], tmp_path: Path) -> None:
    """Each process has the same part of both."""
    expected, _ = whole("teacher")
    for losses, validated in workers(2).values(trainer_losses, "teacher", mode, tmp_path, timeout=280):
        assert close(losses, expected.losses)
        assert close(validated, expected.validated)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_refuse_a_teacher_that_they_could_not_average(workers: Callable[[int], Workers], tmp_path: Path) -> None:
    for in_forward, in_optimizer in workers(2).values(refused_teachers, tmp_path, timeout=280):
        assert "teacher is built like student, and forward does not call it" in in_forward
        assert "an optimizer has teacher." in in_optimizer
        assert "self.student.parameters(), in place of self.parameters()" in in_optimizer


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_processes_average_stochastically_and_resume(mode: str, workers: Callable[[int], Workers], tmp_path: Path) -> None:
    losses, state = stochastic_averages(lambda: "auto", tmp_path / "whole")
    for found, weights in workers(2).values(stochastic_averages_in_processes, mode, tmp_path / mode, timeout=280):
        assert close(found, losses)
        assert same_weights(weights, state)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_processes_accumulate_clip_average_and_shuffle(mode: str, whole: Any, workers: Callable[[int], Workers], tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    expected, _ = whole("gpt", averages=True, seed=7, **options)
    for losses, state in workers(2).values(trainer_with_everything, mode, tmp_path, timeout=280):
        assert close(losses, expected.losses)
        assert same_weights(state, expected.state_dict())


@pytest.mark.slow
def test_a_checkpoint_of_a_callback_continues_on_one_device(whole: Any, tmp_path: Path) -> None:
    expected, _ = whole("gpt")
    checkpoints = ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val_loss", save_last=True, enable_version_counter=False)
    first, _ = fit("gpt", partitioned("tensor", n_microbatches=1), tmp_path, epochs=1, callbacks=[checkpoints])
    second, _ = fit("gpt", "auto", tmp_path, devices=1, resumed=tmp_path / "kept" / "last.ckpt")
    assert close(first.losses + second.losses, expected.losses)


def test_accumulation_clipping_and_averages(whole: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    expected, _ = whole("two models", averages=True, **options)
    module, trainer = fit("two models", partitioned("fsdp"), tmp_path, callbacks=[EMAWeightAveraging(decay=0.5)], **options)
    assert len(trainer.strategy.partitioned_models) == 2
    assert close(module.losses, expected.losses)
    assert same_weights(module.state_dict(), expected.state_dict())
    trainer.validate(module, loader("two models", 2), verbose=False)
    assert len(module.validated) == len(expected.validated) + 2


@pytest.mark.slow
def test_mixed_precision(tmp_path: Path) -> None:
    runs = [
        fit("two models", strategy, tmp_path, precision="bf16-mixed", epochs=1, devices=1)[0].losses
        for strategy in ("auto", partitioned("tensor"))
    ]
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_a_strategy_without_devices_takes_those_of_the_trainer(whole: Any, tmp_path: Path) -> None:
    module, trainer = fit("two models", PartitionStrategy(), tmp_path, devices=2)
    assert {model.plan.n_ranks for model in trainer.strategy.partitioned_models} == {2}
    assert close(module.losses, whole("two models")[0].losses)


@pytest.mark.slow
def test_the_package_of_the_other_name() -> None:
    code = """
import pytorch_lightning as pl
from partitioner.integrations.lightning import PartitionStrategy
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=PartitionStrategy(), logger=False)
print(isinstance(trainer.strategy, pl.strategies.Strategy), type(trainer.strategy) is PartitionStrategy)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]


class Adversaries(LightningModule):
    """A generator and its judge, trained by hand with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            made = self.judge(self.generator(batch[0])).mean()
            loss = -made if optimizer is optimizers[0] else made - self.judge(batch[0]).mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (self.generator, self.judge)]


@pytest.mark.slow
def test_manual_optimization_of_two_models() -> None:
    losses = []
    for strategy in ("auto", partitioned("tensor")):
        torch.manual_seed(0)
        module = Adversaries().double()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, loader("two models", 5))
        losses.append(module.losses)
    assert close(losses[1], losses[0])


class Dropping(Recording):
    """Layers that compute otherwise in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 6))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0])


def modes_after_each_run(strategy: Any) -> tuple[Dropping, list[list[bool]]]:
    """Validate, train, set a layer to evaluation, train; return the modes after each."""
    torch.manual_seed(0)
    module = Dropping().double()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
        strategy=strategy,
    )
    rows, modes = loader("two models", 2), []
    for run in range(3):
        torch.manual_seed(run)
        if run == 0:
            trainer.validate(module, rows, verbose=False)
        else:
            module.net[1].train(run == 1)
            trainer.fit_loop.max_epochs = run
            trainer.fit(module, rows)
        modes.append([each.training for each in module.modules()])
    return module, modes


def test_each_run_has_the_modes_of_the_modules() -> None:
    expected, found = (modes_after_each_run(strategy) for strategy in ("auto", partitioned("tensor")))
    assert found[1] == expected[1]
    assert close(found[0].losses, expected[0].losses)
    assert close(found[0].validated, expected[0].validated)
    assert same_weights(found[0].state_dict(), expected[0].state_dict())


# -- refusals ----------------------------------------------------------------------------------------------------------------------


class ReadsTheEpoch(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * (1 + self.current_epoch))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return self(batch[0]).square().mean()


class Shares(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.down.weight = self.up.weight

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return self.down(self.up(batch[0])).square().mean()


class CallsNothing(Recording):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self.weight * batch[0]).square().mean()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ReadsTheEpoch, r"forward reads self.current_epoch, .* read it in training_step"),
        (Shares, r"up.weight is a parameter of up and down(.|\n)*self\(\.\.\.\)"),
        (CallsNothing, r"training_step calls no module with parameters(.|\n)*example_input_array"),
    ],
)
def test_what_cannot_be_partitioned_is_refused(kind: Any, said: str) -> None:
    trainer = lightning.Trainer(accelerator="cpu", strategy=partitioned("fsdp"), max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(PartitionError, match=said):
        trainer.fit(kind().double(), loader("two models", 1))


def test_averages_that_would_replace_statistics_are_refused() -> None:
    averages = StochasticWeightAveraging(swa_lrs=0.1)
    trainer = lightning.Trainer(accelerator="cpu", strategy=partitioned("fsdp"), max_steps=1, logger=False, callbacks=[averages])
    with pytest.raises(ConfigError, match=r"running statistics and the momentum of 1 after(.|\n)*EMAWeightAveraging"):
        trainer.fit(Dropping().double(), loader("two models", 1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"precision": "bf16-mixed"},
            r"precision is no option of PartitionStrategy: pass it to the Trainer: Trainer\(precision=",
        ),
        ({"microbatches": 4}, r"no option 'microbatches'(.|\n)*did you mean n_microbatches"),
    ],
)
def test_options_are_those_of_partition(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        partitioned("fsdp", **options)
