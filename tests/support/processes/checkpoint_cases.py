"""Checkpoints by torch's own functions, of a partitioned model beside the unpartitioned model: each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from partitioner import ConfigError, Constraints, PartitionedModel, partition
from tests.support.processes.optimizer_cases import batches, model, square

Mode = str | Mapping[str, int | tuple[int, ...]]
BATCHES = batches(4)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def partitioned(mode: Mode, factor: float | None = 1.0) -> tuple[PartitionedModel, Optimizer]:
    """Return the model with its weights times a factor, over all processes; without values (on the meta device) for None."""
    whole = model().to("meta") if factor is None else scaled(factor)
    replicated_stages = isinstance(mode, Mapping) and isinstance(mode.get("pipeline"), tuple)
    pm = partition(
        *(whole, int(os.environ["WORLD_SIZE"]), mode),
        example_inputs=BATCHES[0][:1],
        n_microbatches=2 if replicated_stages else 1,
        progress=False,
    )
    return pm, AdamW(pm.parameters(), lr=1e-2)


def scaled(factor: float) -> nn.Module:
    whole = model()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(factor)
    return whole


def trained(module: nn.Module, optimizer: Optimizer, steps: range) -> list[float]:
    """Return the losses of steps."""
    losses = []
    for step in steps:
        x, target = BATCHES[step]
        optimizer.zero_grad()
        if isinstance(module, PartitionedModel):
            loss = module.train_step(x, target=target, loss_fn=square)
        else:
            loss = square(module(x), target)
            loss.backward()
        losses.append(float(loss))
        optimizer.step()
    return losses


def reference(steps: int) -> tuple[nn.Module, Optimizer]:
    whole = model()
    optimizer = AdamW(whole.parameters(), lr=1e-2)
    trained(whole, optimizer, range(steps))
    return whole, optimizer


def unequal(found: Any, wanted: Any, path: str, *, exact: bool = False) -> Iterator[str]:
    """Yield the places where two nested states differ; by more than rounding unless ``exact``."""
    if isinstance(wanted, Mapping):
        if found.keys() != wanted.keys():
            yield f"{path}: {sorted(found)} in place of {sorted(wanted)}"
            return
        for key in wanted:
            yield from unequal(found[key], wanted[key], f"{path}.{key}", exact=exact)
    elif isinstance(wanted, Tensor):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if not (torch.equal(whole, wanted) if exact else torch.allclose(whole, wanted, rtol=1e-9, atol=1e-11)):
            yield f"{path}: {whole} in place of {wanted}"
    elif found != wanted:
        yield f"{path}: {found} in place of {wanted}"


def option_problems(mode: Mode) -> list[str]:
    """Return the differences of the functions with each option, after two steps, from those of the unpartitioned model."""
    pm, optimizer = partitioned(mode)
    trained(pm, optimizer, range(2))
    whole, whole_optimizer = reference(2)
    wanted: dict[str, Any]
    wanted_state: Any
    wanted, wanted_state = get_state_dict(whole, whole_optimizer)
    own = {name for name, _ in pm.named_parameters()}
    wanted_state = {**wanted_state, "state": {name: entries for name, entries in wanted_state["state"].items() if name in own}}
    found, found_state = get_state_dict(pm, optimizer)
    problems = [*unequal(found, wanted, "model"), *unequal(found_state["state"], wanted_state["state"], "state")]
    problems += unequal(optimizer.state_dict()["param_groups"][0]["lr"], 1e-2, "lr")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found, found_state = get_model_state_dict(pm, options=full), get_optimizer_state_dict(pm, optimizer, options=full)
    first = dist.get_rank() == 0
    problems += unequal(found, wanted if first else {}, "on rank 0, model")
    problems += unequal(found_state.get("state", {}), wanted_state["state"] if first else {}, "on rank 0, state")
    # What rank 0 has is loaded by all.
    new, new_optimizer = partitioned(mode, 0.5)
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(new, dict(found), options=everywhere)
    problems += unequal(new.full_state_dict(), wanted, "loaded from rank 0")
    whole_state = pm.full_optimizer_state_dict(optimizer)
    if mode == "pipeline":  # rank 0's optimizer has its own parameters only, and torch broadcasts these
        try:
            set_optimizer_state_dict(new, new_optimizer, whole_state if first else {}, options=everywhere)
            problems += [] if first else ["the state of another stage was loaded"]
        except ConfigError as error:
            problems += [] if not first and "flatten_optimizer_state_dict=True" in str(error) else [str(error)]
        set_optimizer_state_dict(new, new_optimizer, get_optimizer_state_dict(pm, optimizer))
    else:
        set_optimizer_state_dict(new, new_optimizer, whole_state if first else {}, options=everywhere)
    problems += unequal(new.full_optimizer_state_dict(new_optimizer)["state"], whole_state["state"], "state loaded from rank 0", exact=True)
    set_model_state_dict(new, wanted, options=StateDictOptions(full_state_dict=True))
    problems += unequal(new.full_state_dict(), wanted, "loaded by all", exact=True)
    return problems


def resumed_problems(saved: Mode, loaded: Mode, folder: str) -> list[str]:
    """Return problems of two steps, an asynchronous save, and two steps under another plan, against four steps of the model."""
    pm, optimizer = partitioned(saved)
    trained(pm, optimizer, range(2))
    state: dict[str, Any] = {"model": get_model_state_dict(pm), "optimizer": get_optimizer_state_dict(pm, optimizer, options=FLAT)}
    writing: Any = async_save(state, checkpoint_id=folder, process_group=cpu_group())
    trained(pm, optimizer, range(2, 3))  # what is saved is the state before
    writing.result()
    new, new_optimizer = partitioned(loaded, 0.5)
    state = {"model": get_model_state_dict(new), "optimizer": get_optimizer_state_dict(new, new_optimizer, options=FLAT)}
    load(state, checkpoint_id=folder)
    set_state_dict(new, new_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=FLAT)
    whole, whole_optimizer = reference(2)
    problems = list(unequal(new.full_state_dict(), whole.state_dict(), "weights at step 2"))
    wanted = trained(whole, whole_optimizer, range(2, 4))
    found = trained(new, new_optimizer, range(2, 4))
    problems += [] if torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-9) else [f"losses {found} in place of {wanted}"]
    return problems + list(unequal(new.full_state_dict(), whole.state_dict(), "weights at step 4"))


def cpu_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def dtensor_problems(mode: Mode, folder: str) -> list[str]:
    """DTensors of a plan: their values, what dcp makes of them, and what the other plan and the same plan load of them."""
    pm, _ = partitioned(mode)
    wanted = model().state_dict()
    tensors = pm.dtensor_state_dict()
    problems = [f"{name} is a {type(tensor).__name__}" for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    problems += unequal(tensors, {name: wanted[name] for name in tensors}, "values", exact=True)
    save(tensors, checkpoint_id=folder)
    for other_mode in (mode, "data"):
        other, _ = partitioned(other_mode, 0.5)
        state: dict[str, Any] = dict(other.dtensor_state_dict())
        load(state, checkpoint_id=folder)
        other.load_state_dict(state)
        problems += unequal(other.full_state_dict(), wanted, f"loaded under {other_mode}", exact=True)
    same, _ = partitioned(mode, None)
    same.load_state_dict(tensors)
    return problems + list(unequal(same.full_state_dict(), wanted, "loaded from memory", exact=True))


def fsdp2_problems(folder: str) -> list[str]:
    """Return problems of fsdp to ``fully_shard`` and back, weights and optimizer, through dcp and in memory, bit by bit."""
    pm, optimizer = partitioned("fsdp")
    trained(pm, optimizer, range(2))
    wanted: Any
    wanted_state: Any
    wanted, wanted_state = pm.full_state_dict(), pm.full_optimizer_state_dict(optimizer)["state"]
    state: dict[str, Any] = {"model": pm.dtensor_state_dict(), "optimizer": pm.sharded_optimizer_state_dict(optimizer)}
    writing: Any = async_save(state, checkpoint_id=folder, process_group=cpu_group())
    writing.result()
    sharded: Any = fully_shard(scaled(0.5))
    sharded_optimizer = AdamW(sharded.parameters(), lr=1e-2)
    state = {"model": get_model_state_dict(sharded), "optimizer": get_optimizer_state_dict(sharded, sharded_optimizer)}
    load(state, checkpoint_id=folder)
    set_state_dict(sharded, sharded_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    problems = list(unequal(sharded.state_dict(), wanted, "fully_shard", exact=True))
    full = StateDictOptions(full_state_dict=True)
    found_state = get_optimizer_state_dict(sharded, sharded_optimizer, options=full)["state"]
    problems += unequal(found_state, wanted_state, "fully_shard's optimizer", exact=True)
    trained(sharded, sharded_optimizer, range(2, 3))
    # Back: in memory, as the mesh of fully_shard has the same ranks; the optimizer through dcp.
    trained(pm, optimizer, range(2, 4))
    pm.load_state_dict(sharded.state_dict())
    pm.load_optimizer_state_dict(optimizer, get_optimizer_state_dict(sharded, sharded_optimizer))
    wanted = get_model_state_dict(sharded, options=full)
    problems += unequal(pm.full_state_dict(), wanted, "back", exact=True)
    wanted_state = get_optimizer_state_dict(sharded, sharded_optimizer, options=full)["state"]
    return problems + list(unequal(pm.full_optimizer_state_dict(optimizer)["state"], wanted_state, "optimizer, back", exact=True))


def idle_rank_problems() -> list[str]:
    """Return problems where the second rank has no parameters, and takes part in everything."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double()
    x, target = torch.rand(4, 4, dtype=torch.float64), torch.rand(4, 6, dtype=torch.float64)
    constraints = Constraints(device_map={"0": 0, "1": 1})
    pm = partition(whole, 2, "pipeline", example_inputs=(x,), constraints=constraints, n_microbatches=1, progress=False)
    optimizer, whole_optimizer = AdamW(pm.parameters(), lr=1e-2), AdamW(whole.parameters(), lr=1e-2)
    pm.train_step(x, target=target, loss_fn=square)
    square(whole(x), target).backward()
    optimizer.step()
    whole_optimizer.step()
    wanted: dict[str, Any] = get_model_state_dict(whole)
    problems = list(unequal(get_model_state_dict(pm), wanted, "model"))
    wanted_state: Any = get_optimizer_state_dict(whole, whole_optimizer)
    own = wanted_state["state"] if dist.get_rank() == 0 else {}
    found: Any = get_optimizer_state_dict(pm, optimizer)
    problems += unequal(found["state"], own, "state")
    found = get_optimizer_state_dict(pm, optimizer)
    if dist.get_rank() == 0:  # a process without parameters has no name by which a group could be found
        set_optimizer_state_dict(pm, optimizer, found)
    optimizer.load_state_dict(optimizer.state_dict())
    return problems + list(unequal(pm.full_optimizer_state_dict(optimizer)["state"], wanted_state["state"], "loaded"))
