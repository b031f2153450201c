"""Optimizers that update matrices whole, of a partitioned model beside the model: each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from partitioner import OwnerOptimizer, PartitionedModel, register_optimizer
from tests.support.processes.optimizer_cases import Mode, batches, made, model, refused, square, world_size

STEPS = 6


class Shampoo(Optimizer):
    """A preconditioner for each dimension of a matrix, in lists; vectors by plain descent with momentum."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update each parameter by its own gradient and state."""
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["factors"] = [torch.eye(size, dtype=parameter.dtype) for size in parameter.shape if parameter.dim() > 1]
                update = parameter.grad + group["weight_decay"] * parameter
                for dimension, factor in enumerate(state["factors"]):
                    matrix = update.movedim(dimension, 0).flatten(1)
                    factor.add_(matrix @ matrix.T)
                    values, vectors = torch.linalg.eigh(factor)
                    root = vectors @ torch.diag(values ** (-1 / (2 * len(state["factors"])))) @ vectors.T
                    update = torch.tensordot(root, update.movedim(dimension, 0), 1).movedim(0, dimension)
                state["momentum"].mul_(group["momentum"]).add_(update)
                parameter.sub_(group["lr"] / group["count"] ** 0.5 * state["momentum"])


register_optimizer(Shampoo, "parameters")


class ExactMuon(Shampoo):
    """Orthogonalized momentum in the precision of the parameter, which ``torch.optim.Muon`` has in bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update each matrix by what Newton and Schulz's iterations make of its momentum, near its orthogonal factor."""
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = momentum / momentum.norm()
                for _ in range(5):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)


register_optimizer(ExactMuon, "parameters")

Make = Callable[[nn.Module, Any], list[Optimizer]]
"""Makes the optimizers of a module; its second argument makes those of whole parameters, from parameters, a class and arguments."""


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 2]


def vectors(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() != 2]


def muon_beside_adamw(kind: type[Optimizer], module: nn.Module, owned: Any) -> list[Optimizer]:
    """Return one optimizer for matrices, another for vectors; with weight decay."""
    return [
        owned(matrices(module), kind, lr=0.02, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(vectors(module), lr=1e-2, weight_decay=0.1),
    ]


def adafactor(module: nn.Module, owned: Any) -> list[Optimizer]:
    """Return one optimizer of all parameters, in two groups."""
    groups = [
        {"params": [each for name, each in module.named_parameters() if "bias" not in name], "weight_decay": 0.3},
        {"params": [each for name, each in module.named_parameters() if "bias" in name], "lr": 5e-3},
    ]
    return [owned(groups, torch.optim.Adafactor, lr=2e-2)]


def shampoo(module: nn.Module, owned: Any) -> list[Optimizer]:
    """Return groups by name, for a class whose groups count."""
    named = list(module.named_parameters())
    parts_of = {name: [parameter for other, parameter in named if other == name] for name, _ in named}
    groups = [{"params": parts, "lr": 1e-3 * (1 + len(name) % 3)} for name, parts in parts_of.items()]
    return [owned(groups, Shampoo, weight_decay=0.1)]


MAKES: dict[str, Make] = {
    "Muon": functools.partial(muon_beside_adamw, torch.optim.Muon),
    "exact Muon": functools.partial(muon_beside_adamw, ExactMuon),
    "Adafactor": adafactor,
    "Shampoo": shampoo,
}


def on_the_model(parameters: Any, kind: Any, **defaults: Any) -> Optimizer:
    return kind(parameters, **defaults)


def schedulers(optimizers: list[Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]


def train(module: nn.Module, optimizers: list[Optimizer], steps: range, rates: list[Any], *, freeze: bool = True) -> None:
    """Accumulate two batches a step, clip, and freeze a matrix and a vector after the second step."""
    data = batches(2 * STEPS)
    frozen = [parameter for name, parameter in module.named_parameters() if name in ("1.up.weight", "1.up.bias")]
    for step in steps:
        for parameter in frozen:
            parameter.requires_grad_(step < 2 or not freeze)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x, target in data[2 * step : 2 * step + 2]:
            if isinstance(module, PartitionedModel):
                module.train_step(x, target=target, loss_fn=square)
            else:
                square(module(x), target).backward()
        if isinstance(module, PartitionedModel):
            module.clip_grad_norm_(0.05)
        else:
            nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()
        for rate in rates:
            rate.step()


def distance(pm: PartitionedModel, reference: nn.Module) -> float:
    found = pm.full_state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in reference.state_dict().items())


@functools.cache
def reference_of(name: str, steps: int = STEPS) -> tuple[nn.Module, list[Optimizer]]:
    """Return the model after steps, and its optimizers."""
    reference = model()
    optimizers = MAKES[name](reference, on_the_model)
    train(reference, optimizers, range(steps), schedulers(optimizers))
    return reference, optimizers


def counted_as_planned(optimizers: list[Optimizer], rank: int | None) -> list[str]:
    """Return the differences between the plan and the count of the last step."""
    problems = []
    for optimizer in optimizers:
        if not isinstance(optimizer, OwnerOptimizer):
            continue
        step = optimizer.last_step
        assert step is not None
        planned = optimizer.plan.restricted_to(step.parameters).bytes_between
        own = {pair: size for pair, size in planned.items() if rank in (None, pair[0])}
        if dict(step.sent) != own:
            problems.append(f"sent {step.sent}, planned {own}")
        if step.flag_bytes != optimizer.plan.flag_bytes:
            problems.append(f"{step.flag_bytes} bytes of flags, planned {optimizer.plan.flag_bytes}")
    return problems


def owned_difference(pm: PartitionedModel, name: str, rank: int | None = None) -> float:
    """Return the distance of weights from the model's after steps; bytes must be counted as planned."""
    optimizers = MAKES[name](pm, OwnerOptimizer)
    rates = schedulers(optimizers)
    train(pm, optimizers, range(1), rates)
    problems = counted_as_planned(optimizers, rank)
    train(pm, optimizers, range(1, STEPS), rates)
    problems += counted_as_planned(optimizers, rank)
    assert not problems, problems
    return distance(pm, reference_of(name)[0])


def by_number(states: Iterable[Any]) -> dict[str, Any]:
    """Return states with text keys, since torch.distributed.checkpoint does not load number keys."""
    return {str(number): state for number, state in enumerate(states)}


def resumed_difference(name: str, before: PartitionedModel, after: PartitionedModel, folder: str) -> float:
    """Return the distance of weights from the model's when a run of one plan continues another's sharded checkpoint."""
    optimizers = MAKES[name](before, OwnerOptimizer)
    rates = schedulers(optimizers)
    train(before, optimizers, range(3), rates)
    states = [before.sharded_optimizer_state_dict(optimizer) for optimizer in optimizers]
    save({"model": before.sharded_state_dict(), "optimizers": by_number(states)}, checkpoint_id=folder, no_dist=not in_processes())
    new = MAKES[name](after, OwnerOptimizer)
    state: dict[str, Any] = {
        "model": after.sharded_state_dict(),
        "optimizers": by_number(map(after.sharded_optimizer_state_dict, new)),
    }
    load(state, checkpoint_id=folder, no_dist=not in_processes())
    after.load_state_dict(state["model"])
    new_rates = schedulers(new)
    for number, optimizer in enumerate(new):
        after.load_optimizer_state_dict(optimizer, state["optimizers"][str(number)])
        new_rates[number].load_state_dict(rates[number].state_dict())
    train(after, new, range(3, STEPS), new_rates)
    return distance(after, reference_of(name)[0])


def full_state_problems(pm: PartitionedModel, name: str) -> list[str]:
    """Return the differences of full optimizer states from the model's, by the package's functions and by torch's."""
    problems = []
    optimizers = MAKES[name](pm, OwnerOptimizer)
    train(pm, optimizers, range(STEPS), schedulers(optimizers))
    reference, theirs = reference_of(name)
    for optimizer, other in zip(optimizers, theirs, strict=True):
        expected: Any = get_optimizer_state_dict(reference, other)
        problems += compared(pm.full_optimizer_state_dict(optimizer)["state"], expected["state"], "full")
        found: Any = get_optimizer_state_dict(pm, optimizer)
        problems += compared(found["state"], expected["state"], "torch", held=dict(pm.named_parameters()))
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        optimizer.load_state_dict(torch.load(io.BytesIO(saved.getvalue())))
        problems += compared(pm.full_optimizer_state_dict(optimizer)["state"], expected["state"], "loaded")
        pm.load_optimizer_state_dict(optimizer, expected)
        problems += compared(pm.full_optimizer_state_dict(optimizer)["state"], expected["state"], "of the model")
    return problems


def compared(found: Mapping[str, Any], expected: Mapping[str, Any], what: str, held: Mapping[str, Any] | None = None) -> list[str]:
    """Return names and values of states; ``held``: the names that this process has, of all of which the state is compared."""
    names = [name for name in expected if held is None or name in held]
    problems = [f"{what}: {sorted(found)} in place of {sorted(names)}"] if sorted(found) != sorted(names) else []
    for name in names:
        try:
            torch.testing.assert_close(found.get(name), expected[name], rtol=1e-9, atol=1e-9)
        except AssertionError as error:
            problems.append(f"{what}: {name}: {error}")
    return problems


# -- in processes --------------------------------------------------------------------------------------------------------------------


def in_processes() -> bool:
    return world_size() > 1 if "WORLD_SIZE" in os.environ else False


def differences_in_processes(mode: Mode, names: list[str]) -> dict[str, float]:
    """Return the distance of weights from the model's with each kind of optimizer."""
    pm = made(mode, world_size())
    found = {}
    for name in names:
        restored(pm)
        found[name] = owned_difference(pm, name, int(os.environ["RANK"]))
    return found


def restored(pm: PartitionedModel) -> PartitionedModel:
    """Return a partitioned model as it was at first."""
    pm.load_state_dict(model().state_dict())
    pm.zero_grad()
    pm.requires_grad_()
    return pm


def checkpoints_in_processes(modes: list[Mode], names: list[str], folder: str) -> dict[str, Any]:
    """Return problems of full states, and distances of weights when the run of one plan continues in another."""
    before, after = (made(mode, world_size()) for mode in modes)
    found: dict[str, Any] = {}
    for name in names:
        found[f"state of {name}"] = full_state_problems(restored(before), name)
        found[f"resumed {name}"] = resumed_difference(name, restored(before), restored(after), f"{folder}/{name}")
    return found


def planned_in_processes(mode: Mode) -> tuple[str, dict[tuple[int, int], int], str]:
    """Return the plan of one optimizer of all parameters, its bytes, and the plan of one rank a process."""
    optimizer = OwnerOptimizer(made(mode, world_size()).parameters(), torch.optim.Adafactor)
    return str(optimizer.plan), optimizer.plan.bytes_between, str(optimizer.plan_of_processes)


def refusals_in_processes(mode: Mode) -> dict[str, str]:
    """Return the errors of ranks that differ in their calls; training goes on afterwards."""
    pm, own = made(mode, world_size()), int(os.environ["RANK"])
    x, target = batches(1)[0]
    named = dict(pm.named_parameters())
    del_one = [parameter for name, parameter in named.items() if own == 0 or name != "1.up.weight"]
    found = {"another list": refused(lambda: OwnerOptimizer(del_one, torch.optim.Adafactor))}
    optimizer = OwnerOptimizer(list(named.values()), torch.optim.Adafactor)
    pm.train_step(x, target=target, loss_fn=square)
    kept = named["1.up.weight"].grad
    if own == 0:
        named["1.up.weight"].grad = None
    found["gradient on one rank"] = refused(optimizer.step)
    named["1.up.weight"].grad = kept
    found["all"] = refused(optimizer.step)
    with pm.no_sync():
        pm.train_step(x, target=target, loss_fn=square)
    return found


def ranks_without_any(mode: Mode) -> dict[str, Any]:
    """Only some ranks have parameters of the optimizer: how far weights are from the model's, and problems of its state."""
    pm, reference = made(mode, world_size()), model()
    optimizers = [
        OwnerOptimizer([each for name, each in pm.named_parameters() if name == "0.weight"], Shampoo, model=pm),
        Shampoo([reference.get_parameter("0.weight")]),
    ]
    for module, optimizer in zip((pm, reference), optimizers, strict=True):
        train(module, [optimizer], range(2), [], freeze=False)
    expected: Any = get_optimizer_state_dict(reference, optimizers[1])["state"]
    found = {
        "difference": distance(pm, reference),
        "state": compared(pm.full_optimizer_state_dict(optimizers[0])["state"], expected, "full"),
    }
    get_optimizer_state_dict(pm, optimizers[0])
    pm.load_optimizer_state_dict(optimizers[0], get_optimizer_state_dict(reference, optimizers[1]))
    for module, optimizer in zip((pm, reference), optimizers, strict=True):
        train(module, [optimizer], range(2, 3), [], freeze=False)
    return {**found, "resumed": distance(pm, reference)}
