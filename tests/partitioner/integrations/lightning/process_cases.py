"""Functions of worker processes in the tests of Lightning: each function runs on every rank at once."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Subset

from partitioner import ConfigError, partition
from partitioner.integrations import lightning as strategies
from tests.partitioner.integrations.lightning.modules import OfTeacher, Recording, fit, loader, partitioned
from tests.partitioner.integrations.loops import ROWS, data_of, model_of, spoil


def trainer_losses(name: str, mode: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses of five steps and, from their checkpoint, of five more; and those that validate."""
    warnings.simplefilter("ignore")
    first, trainer = fit(name, partitioned(mode), folder, epochs=1)
    path = folder / f"{name} {mode}.ckpt"
    trainer.save_checkpoint(path)
    second, _ = fit(name, partitioned(mode), folder, resumed=path)
    return first.losses + second.losses, first.validated + second.validated[-2:]


def trainer_with_everything(mode: str, folder: Path, **options: Any) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the weights of a run that accumulates, clips and averages; seeds differ by rank, and the loader shuffles."""
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    averages = [EMAWeightAveraging(decay=0.5)]
    module, _ = fit(
        "gpt", partitioned(mode), folder, callbacks=averages, seed=7 + rank, accumulate_grad_batches=2, gradient_clip_val=0.1, **options
    )
    return module.losses, module.state_dict()


def stochastic_averages(strategy: Any, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Return the losses and the weights of StochasticWeightAveraging over three epochs, which continue from a checkpoint of the second."""
    warnings.simplefilter("ignore")
    runs: list[Recording] = []
    for epochs in (2, 3):
        averages = [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]
        checkpoints = ModelCheckpoint(dirpath=folder, save_last=True, enable_version_counter=False)
        callbacks = [*averages, checkpoints]
        path = folder / "last.ckpt" if runs else None
        runs.append(fit("gpt", strategy(), folder, epochs=epochs, callbacks=callbacks, resumed=path, devices=1)[0])
    return runs[0].losses + runs[1].losses, runs[1].state_dict()


def stochastic_averages_in_processes(mode: str, folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Return those of this process."""
    return stochastic_averages(lambda: partitioned(mode), folder)


def refused_teachers(folder: Path) -> list[str]:
    """Return what is said where ``forward`` has a teacher of its own, and where an optimizer has the parameters of one."""
    warnings.simplefilter("ignore")
    said = []
    for is_in_forward in (True, False):
        module = OfTeacher().double()
        module.teacher.requires_grad_(True)
        if not is_in_forward:
            module.loss = lambda batch, module=module: module.student(batch[0]).square().mean()
        trainer = Trainer(accelerator="cpu", strategy=partitioned("pipeline"), max_steps=1, default_root_dir=folder)
        try:
            trainer.fit(module, loader("teacher", 1))
        except ConfigError as error:
            said.append(str(error))
    return said


def fabric_losses(strategy: str | None, kind: str, mode: str, path: Path) -> list[float]:
    """Return the losses of ten steps of a loop of Fabric, with a checkpoint in the middle that a spoiled model loads."""
    warnings.simplefilter("ignore")
    is_launched = "RANK" in os.environ
    chosen = "auto" if strategy is None else getattr(strategies, strategy)()
    fabric = Fabric(accelerator="cpu", devices=2 if is_launched else 1, precision="64-true", strategy=chosen)
    fabric.launch()
    data = data_of(kind, 10)
    losses: list[float] = []
    for half in range(2):
        net = model_of(kind)
        if half:
            spoil(net)
        model = net if mode == "whole" else partition(net, 2, mode, example_inputs=(data.tensors[0][:ROWS],), progress=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = fabric.setup(model, optimizer)
        rows = fabric.setup_dataloaders(DataLoader(Subset(data, range(half * 5 * ROWS, (half + 1) * 5 * ROWS)), batch_size=ROWS))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if half:
            fabric.load(path, state)
            assert state["step"] == 5
        for number, (inputs, targets) in enumerate(rows):
            is_last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
                fabric.backward(loss)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.zero_grad()
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 5})
    return losses
