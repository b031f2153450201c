"""A training loop as users of accelerate write it, for a model in one piece or partitioned, in one process or in several."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, broadcast, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from partitioner import ConfigError, partition
from partitioner.integrations.accelerate import Accelerator
from tests.partitioner.integrations.loops import ROWS, data_of, model_of, spoil

STEPS = 10


@dataclass
class Trained:
    """Results of a run.

    Attributes:
        losses: of the steps.
        norms: of the gradients.
        resumed: losses of the last steps, of a model that has loaded the state of the step before.
        predictions: of the first rows, in evaluation mode.
        rates: the learning rates.
    """

    losses: list[float]
    norms: list[float]
    resumed: list[float]
    predictions: list[float]
    rates: list[float]


def forget() -> None:
    """Let the next Accelerator be the first of this process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def prepared(kind: str, mode: str | None, model: nn.Module | None = None, inputs: str = "global", **options: Any) -> Any:
    """Return the accelerator, and all that it prepares; a model that was partitioned before may be given."""
    forget()
    of_process = accelerate.Accelerator if "WORLD_SIZE" not in os.environ else Accelerator  # in one process either serves
    accelerator = of_process(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True), **options)
    data = data_of(kind, STEPS)
    if model is None:
        model = model_of(kind)
        if mode is not None:
            model = partition(model, 2, mode, example_inputs=(data[:ROWS][0],), inputs=inputs, progress=False)
    torch.manual_seed(3)
    rows = ROWS if inputs == "global" else ROWS // 2
    loader = DataLoader(data, rows, shuffle=inputs == "global")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def steps(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Iterable[Any], folder: str = "", saved_after: int = 0
) -> Trained:
    """Train over the loader; save the state after a step."""
    done = Trained([], [], [], [], [])
    for number, (inputs, targets) in enumerate(loader, start=1):
        with accelerator.accumulate(model):
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                done.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        done.losses.append(float(accelerator.gather(loss.detach()).mean()))
        done.rates += scheduler.get_last_lr()
        if number == saved_after:
            accelerator.save_state(folder)
    return done


def trained(kind: str, mode: str | None, folder: str, accumulation: int = 1) -> Trained:
    """Ten steps, and those after the fifth again from the saved state; after the sixth, if gradients of pairs are accumulated."""
    saved_after = 5 if accumulation == 1 else 6
    accelerator, model, optimizer, loader, scheduler = prepared(kind, mode, gradient_accumulation_steps=accumulation)
    done = steps(accelerator, model, optimizer, scheduler, loader, folder, saved_after)
    model.eval()
    with torch.no_grad():
        predictions: Tensor = accelerator.gather_for_metrics(model(data_of(kind, 1)[:][0]))
    done.predictions = predictions.flatten().tolist()
    spoil(model.train())
    accelerator, model, optimizer, loader, scheduler = prepared(kind, mode, model, gradient_accumulation_steps=accumulation)
    accelerator.load_state(folder)
    done.resumed = steps(accelerator, model, optimizer, scheduler, accelerator.skip_first_batches(loader, saved_after)).losses
    return done


def local_rows(kind: str) -> Trained:
    """Train with rows of each process's own, as with DistributedDataParallel."""
    accelerator, model, optimizer, loader, scheduler = prepared(kind, "fsdp", inputs="local")
    return steps(accelerator, model, optimizer, scheduler, loader)


class Stream(IterableDataset[Any]):
    """Rows one after the other."""

    def __iter__(self) -> Any:
        data = data_of("gpt", 3)
        yield from (data[index] for index in range(len(data)))


def stream(mode: str | None) -> list[float]:
    """Return the losses of a model trained on rows of a stream."""
    forget()
    accelerator = Accelerator(cpu=True)
    model = model_of("gpt")
    if mode is not None:
        model = partition(model, 2, mode, example_inputs=(data_of("gpt", 1)[:][0],), progress=False)
    model, loader = accelerator.prepare(model, DataLoader(Stream(), ROWS))
    with torch.no_grad():
        return [float(nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())) for tokens, targets in loader]


def refusals() -> list[str]:
    """Return the errors of an Accelerator that would give ranks of one replica different rows."""
    said = []
    example = (data_of("gpt", 1)[:][0],)
    cases: list[tuple[Any, str, dict[str, Any], bool | None]] = [
        (Accelerator, "local", {}, False),
        (Accelerator, "global", {"dispatch_batches": True}, False),
        (Accelerator, "global", {}, True),
        (accelerate.Accelerator, "global", {}, False),
        (accelerate.Accelerator, "local", {}, False),
        (Accelerator, "local", {}, None),
    ]
    for of_process, inputs, options, is_loader_first in cases:
        forget()
        accelerator = of_process(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        is_around = is_loader_first is None
        mode = "data" if of_process is accelerate.Accelerator or is_around else "tensor"
        pm = partition(model_of("gpt"), int(os.environ["WORLD_SIZE"]), mode, example_inputs=example, inputs=inputs, progress=False)
        loader = DataLoader(data_of("gpt", 2), ROWS)
        if is_loader_first:
            loader = accelerator.prepare(loader)
        try:
            accelerator.prepare(nn.Sequential(pm, nn.Linear(2, 2)) if is_around else pm, loader)
        except ConfigError as error:
            said.append(str(error))
    return said


def shared_values() -> dict[str, Any]:
    """Return results of accelerate's functions for values that differ between processes, around one partitioned model."""
    forget()
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002  the state that scripts share
    torch.manual_seed(rank)
    accelerator = Accelerator(cpu=True)
    pm = partition(nn.Linear(2, 2), 2, "data", example_inputs=(torch.ones(2, 2),), progress=False)
    around, beside, teacher = accelerator.prepare(
        nn.Sequential(pm, nn.Linear(2, 2)), nn.Linear(2, 2), nn.BatchNorm1d(2).requires_grad_(False)
    )
    if rank == 1:
        accelerator.set_trigger()
    name: list[str] = broadcast_object_list([f"run {rank}"])
    return {
        "drawn": [torch.rand(1).item(), random.random(), np.random.rand()],  # noqa: NPY002
        "name": name,
        "from the second": broadcast_object_list([rank], from_process=1),
        "tensors": [tensor.tolist() for tensor in broadcast({"a": torch.tensor([rank])}).values()],
        "of processes": gather_object([rank]),
        "of replicas": accelerator.gather_for_metrics([rank], use_gather_object=True),
        "split": accelerator.split_between_processes([0, 1]).__enter__(),
        "beside": [type(beside), type(teacher), beside.weight.tolist(), around[1].weight.tolist()],
        "triggers": [accelerator.check_trigger(), accelerator.check_trigger()],
    }
