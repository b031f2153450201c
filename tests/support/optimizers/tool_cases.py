"""PyTorch's tools around optimizers, on a partitioned model and on the model: each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from partitioner import PartitionedModel, register_optimizer
from passes.ir.errors import ConfigError
from tests.support.optimizers.owner_cases import distance, restored
from tests.support.processes.optimizer_cases import Mode, batches, made, model, square, world_size

BATCHES = batches(4)

# -- how an optimizer computes ---------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True, foreach=True),
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True),
    "Adagrad, fused": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2, fused=True),
    "SGD, fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True, fused=True),
    "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, weight_decay=0.1, foreach=True),
    **{
        f"{kind.__name__}, foreach": functools.partial(kind, lr=1e-2, foreach=True)
        for kind in (
            *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
            *(torch.optim.RMSprop, torch.optim.Rprop),
        )
    },
}

# -- learning rates --------------------------------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, halved),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, halved),
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=2),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=3),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.7),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
    ),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    ),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 4),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.01, anneal_epochs=2),
}


def halved(step: int) -> float:
    return 0.5**step


def run(module: nn.Module, step: int) -> Tensor:
    """Forward and backward of one batch; the loss."""
    x, target = BATCHES[step]
    if isinstance(module, PartitionedModel):
        return module.train_step(x, target=target, loss_fn=square)
    loss = square(module(x), target)
    loss.backward()
    return loss.detach()


def train(module: nn.Module, optimizer: Optimizer, scheduler: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = run(module, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([loss] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def implementation_difference(name: str, pm: PartitionedModel) -> float:
    """Return the distance of weights from the model's after steps."""
    reference = model()
    for module in (pm, reference):
        train(module, IMPLEMENTATIONS[name](list(module.parameters())), None, range(3))
    return distance(pm, reference)


def scheduler_difference(name: str, pm: PartitionedModel) -> float:
    """Return the distance of weights from the model's when the schedule is resumed after two steps."""
    reference = model()
    theirs = sgd(reference)
    train(reference, theirs, SCHEDULERS[name](theirs), range(4))
    ours = sgd(pm)
    scheduler = SCHEDULERS[name](ours)
    train(pm, ours, scheduler, range(2))
    state, schedule = pm.full_optimizer_state_dict(ours), scheduler.state_dict()
    resumed = sgd(pm)
    again = SCHEDULERS[name](resumed)
    pm.load_optimizer_state_dict(resumed, state)
    again.load_state_dict(schedule)
    train(pm, resumed, again, range(2, 4))
    return distance(pm, reference)


# -- averages of weights ---------------------------------------------------------------------------------------------------------------

AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "equal": AveragedModel,
    "SWA": lambda module: AveragedModel(module, multi_avg_fn=get_swa_multi_avg_fn()),
    "EMA": lambda module: AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7)),
    "EMA with buffers": lambda module: AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True),
    "by hand": lambda module: AveragedModel(module, avg_fn=lambda average, new, _count: average.lerp(new, 0.2)),
}


def average_difference(name: str, pm: PartitionedModel) -> float:
    """Return the distance of an average of weights, and of its results, from the model's."""
    reference = model()
    averages = {}
    for module in (pm, reference):
        average, optimizer = AVERAGES[name](module), sgd(module)
        for step in range(3):
            train(module, optimizer, None, range(step, step + 1))
            average.update_parameters(module)
        averages[module] = average
    computed = (averages[pm](BATCHES[0][0]) - averages[reference](BATCHES[0][0])).detach().abs().max()
    ours: Any = averages[pm].module
    return max(distance(ours, averages[reference].module), float(computed))


# -- two steps in one ------------------------------------------------------------------------------------------------------------------


class SAM(Optimizer):
    """Descends by the gradient at a point uphill, at a distance over all parameters."""

    def __init__(self, params: Any, norm: Callable[[list[Tensor]], Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self._norm = norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Climb, compute the gradient there, come back, and descend."""
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        scale = 0.05 / (self._norm([each.grad for each in parameters if each.grad is not None]) + 1e-12)
        climbed = [each.grad * scale for each in parameters if each.grad is not None]
        for parameter, distance_ in zip(parameters, climbed, strict=True):
            parameter.add_(distance_)
        with torch.enable_grad():
            loss = closure()
        for parameter, distance_ in zip(parameters, climbed, strict=True):
            parameter.sub_(distance_)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)
        return loss


class DeclaredSAM(SAM):
    """Reads elements, and a norm that is given to it."""

    def step(self, closure: Any = None) -> Any:
        """Step as the base class."""
        return super().step(closure)


register_optimizer(DeclaredSAM, "elements")


def norm_by_hand(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def sam_steps(module: nn.Module, kind: type[SAM], norm: Callable[[list[Tensor]], Tensor]) -> None:
    optimizer = kind(module.parameters(), norm)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            return run(module, step)

        closure()
        optimizer.step(closure)


def sam_difference(kind: type[SAM], by_hand: bool, pm: PartitionedModel) -> float:
    reference = model()
    sam_steps(reference, kind, norm_by_hand)
    sam_steps(pm, kind, norm_by_hand if by_hand else lambda _gradients: pm.clip_grad_norm_(float("inf")))
    return distance(pm, reference)


def lbfgs_difference(pm: PartitionedModel) -> float:
    reference = model()
    for module in (pm, reference):
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

        def closure(module: nn.Module = module, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            return run(module, 0)

        for _ in range(2):
            optimizer.step(closure)
    return distance(pm, reference)


# -- the table -------------------------------------------------------------------------------------------------------------------------

Outcome = float | str
"""How far the weights are from the model's, or the refusal."""


def rows() -> Iterator[tuple[str, Callable[[PartitionedModel], float]]]:
    """Yield each tool with a run of it."""
    for name in IMPLEMENTATIONS:
        yield name, functools.partial(implementation_difference, name)
    for name in SCHEDULERS:
        yield name, functools.partial(scheduler_difference, name)
    for name in AVERAGES:
        yield f"average: {name}", functools.partial(average_difference, name)
    yield "SAM", functools.partial(sam_difference, SAM, True)
    yield "SAM, declared", functools.partial(sam_difference, DeclaredSAM, True)
    yield "SAM, declared, with the norm of pm.clip_grad_norm_", functools.partial(sam_difference, DeclaredSAM, False)
    yield "LBFGS", lbfgs_difference


def outcomes(pm: PartitionedModel, names: list[str] | None = None) -> dict[str, Outcome]:
    """Return the table for one model; ``names``: of some tools."""
    found: dict[str, Outcome] = {}
    for name, measure in rows():
        if names is None or name in names:
            restored(pm)
            try:
                found[name] = measure(pm)
            except ConfigError as error:
                found[name] = str(error)
    return found


# -- in processes ----------------------------------------------------------------------------------------------------------------------


def outcomes_in_processes(mode: Mode, names: list[str] | None = None) -> dict[str, Outcome]:
    return outcomes(made(mode, world_size()), names)
