"""Functions of worker processes in the tests of cut axes: each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from partitioner import Constraints, PartitionedModel
from tests.support.models.attention.experts import DROPLESS, ROUTED
from tests.support.models.attention.gpt import FOUR_TOKENS
from tests.support.models.case import Case, Instance
from tests.support.models.vision.space import SPACE
from tests.support.models.zoo import ZOO
from tests.support.running.transparency import (
    N_MICROBATCHES,
    Difference,
    compare_gradients,
    compare_values,
    first_difference,
    loss_of,
    make_partitioned,
)

Mode = str | Mapping[str, int | tuple[int, ...]]
CASES = {case.name: case for case in (*ZOO, *SPACE)}


def n_microbatches(mode: Mode) -> int:
    return N_MICROBATCHES if "pipeline" in mode else 1


def mesh_training_difference(name: str, mode: Mode) -> str | None:
    """Compare loss, gradients and weights of three AdamW steps, on this rank, with the unpartitioned model."""
    devices = int(os.environ["WORLD_SIZE"])
    difference = first_difference(CASES[name], devices=devices, mode=mode, n_microbatches=n_microbatches(mode))
    return None if difference is None else str(difference)


def mesh_call_difference(name: str, mode: Mode) -> str | None:
    """Compare a call and its ``backward()``, clipped gradients, and weights that are read back and loaded."""
    case = CASES[name]
    instance, loaded = case.build(), case.build()
    devices = int(os.environ["WORLD_SIZE"])
    pm = make_partitioned(instance, devices=devices, mode=mode, n_microbatches=n_microbatches(mode))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(0.875)
    found: list[str] = []  # all are looked for: a rank that stopped at its first would leave the others waiting
    for which, reference in (("given", instance), ("loaded", loaded)):
        if reference is loaded:
            pm.load_state_dict(loaded.model.state_dict())
        for differences in (_call_differences, _clip_differences, _state_differences):
            found += [f"{which} weights: {difference}" for difference in differences(case, reference, pm)]
    return next(iter(found), None)


def expert_training_difference(way: str, mode: Mode, dimension: str) -> str | None:
    """Compare as ``mesh_training_difference`` a mixture whose tokens go to the rank of their expert."""
    devices = int(os.environ["WORLD_SIZE"])
    constraints = Constraints(axes={"experts": dimension})
    case = {**ROUTED, "dropless": DROPLESS}[way]
    difference = first_difference(case, devices=devices, mode=mode, n_microbatches=n_microbatches(mode), constraints=constraints)
    return None if difference is None else str(difference)


def attention_training_difference(attention: str) -> str | None:
    """Compare as ``mesh_training_difference`` a transformer over its sequence, with attention shared in this way."""
    devices, constraints = int(os.environ["WORLD_SIZE"]), Constraints(attention=attention)
    difference = first_difference(FOUR_TOKENS, devices=devices, mode="sequence", n_microbatches=1, constraints=constraints)
    return None if difference is None else str(difference)


def checkpoint_difference(name: str, saved: Mode, loaded: Mode, folder: str) -> str | None:
    """Compare a checkpoint: each process saves its blocks; under another plan, from other weights, each loads its new ones."""
    devices = int(os.environ["WORLD_SIZE"])
    instance, other = CASES[name].build(seed=0), CASES[name].build(seed=5)
    pm = make_partitioned(instance, devices=devices, mode=saved, n_microbatches=n_microbatches(saved))
    save(pm.sharded_state_dict(), checkpoint_id=folder)
    pm = make_partitioned(other, devices=devices, mode=loaded, n_microbatches=n_microbatches(loaded))
    state = pm.sharded_state_dict()
    load(state, checkpoint_id=folder)
    pm.load_state_dict(state)
    found = pm.full_state_dict()
    unequal = [name for name, value in instance.model.state_dict().items() if not torch.equal(found[name], value)]
    return ", ".join(unequal) or None


def _call_differences(case: Case, instance: Instance, pm: PartitionedModel) -> Iterator[Difference]:
    pm.zero_grad()
    instance.model.zero_grad()
    expected, output = instance.model(*instance.args, **instance.kwargs), pm(*instance.args, **instance.kwargs)
    loss_of(case, expected, instance.target).backward()
    loss_of(case, output, instance.target).backward()
    yield from _one(compare_values(expected, output, case.tolerance))
    yield from _gradient_differences(case, instance, pm)


def _clip_differences(case: Case, instance: Instance, pm: PartitionedModel) -> Iterator[Difference]:
    """Yield differences of clipped gradients of the previous call."""
    for kind in (2.0, float("inf")):
        norm = nn.utils.clip_grad_norm_(instance.model.parameters(), 1e-3, kind)
        yield from _one(compare_values(norm, pm.clip_grad_norm_(1e-3, kind), case.tolerance))
        yield from _gradient_differences(case, instance, pm)


def _state_differences(case: Case, instance: Instance, pm: PartitionedModel) -> Iterator[Difference]:
    """Yield differences of whole states in every process."""
    expected = dict(instance.model.state_dict())
    yield from _one(compare_values(expected, pm.full_state_dict(), case.tolerance))
    yield from _one(compare_values(expected, pm.state_dict(), case.tolerance))


def _gradient_differences(case: Case, instance: Instance, pm: PartitionedModel) -> Iterator[Difference]:
    expected = {name: parameter.grad for name, parameter in instance.model.named_parameters()}
    yield from _one(compare_gradients(expected, pm.full_gradients(), case.tolerance))


def _one(difference: Difference | None) -> Iterator[Difference]:
    if difference is not None:
        yield difference
