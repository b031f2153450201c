"""Optimizers of a partitioned model beside those of the model, in one process and in several: each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from partitioner import Constraints, PartitionedModel, partition, register_optimizer
from passes.ir.errors import ConfigError

Mode = str | Mapping[str, int]
Make = Callable[[nn.Module], Optimizer]

STEPS = 20


class Block(nn.Module):
    """Attention with its three products in one weight, and two layers: columns, rows and runs of heads are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Map any number of rows."""
        rows, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(mixed)
        return x + self.down(torch.tanh(self.up(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.rand(8, 5, 4, dtype=torch.float64), torch.rand(8, 5, 3, dtype=torch.float64)) for _ in range(count)]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def made(mode: Mode, devices: int, **arguments: Any) -> PartitionedModel:
    return partition(model(), devices, mode, example_inputs=(batches(1)[0][0],), progress=False, **arguments)


def grouped(module: nn.Module) -> Optimizer:
    """Return an optimizer in which weights decay, biases and norms do not; groups are found by names."""
    named = list(module.named_parameters())
    alone = [parameter for name, parameter in named if name.endswith(".bias") or "norm" in name or name.startswith("2.")]
    decayed = [parameter for name, parameter in named if not (name.endswith(".bias") or "norm" in name or name.startswith("2."))]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}, {"params": alone, "weight_decay": 0.0}], lr=1e-2)


def by_name(module: nn.Module) -> Optimizer:
    """Return an optimizer with a rate for each parameter, by its exact name."""
    groups = [{"params": [parameter], "lr": 1e-2 * (1 + len(name) % 3)} for name, parameter in module.named_parameters()]
    return torch.optim.AdamW(groups)


def difference_after(pm: PartitionedModel, make: Make = grouped, *, steps: int = STEPS, max_norm: float | None = None) -> float:
    """Return the distance of weights from the model's after steps of the same optimizer."""
    reference = model()
    optimizers = make(reference), make(pm)
    for x, target in batches(steps):
        for module, optimizer in zip((reference, pm), optimizers, strict=True):

            def closure(module: nn.Module = module, optimizer: Optimizer = optimizer, x: Tensor = x, target: Tensor = target) -> Tensor:
                optimizer.zero_grad()
                if isinstance(module, PartitionedModel):
                    return module.train_step(x, target=target, loss_fn=square)
                loss = square(module(x), target)
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
                continue
            closure()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            optimizer.step()
    found = pm.full_state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in reference.state_dict().items())


class Undeclared(torch.optim.SGD):
    """Undeclared."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step by gradients only."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


class Declared(Undeclared):
    """Declared: reads what its ``step`` reads."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step as the base class."""
        return super().step(closure)


# -- in processes --------------------------------------------------------------------------------------------------------------------


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def groups_train_as_on_the_model(mode: Mode) -> float:
    return difference_after(made(mode, world_size()))


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def after_a_step(mode: Mode) -> PartitionedModel:
    pm = made(mode, world_size())
    x, target = batches(1)[0]
    pm.train_step(x, target=target, loss_fn=square)
    return pm


TOTALS: dict[str, Callable[[list[Tensor]], Any]] = {
    "norms of data": lambda gradients: sum(gradient.data.norm(2) ** 2 for gradient in gradients) ** 0.5,
    "squares": lambda gradients: sum(gradient.detach().float().pow(2).sum() for gradient in gradients),
    "products": lambda gradients: sum((gradient * gradient).sum() for gradient in gradients),
    "largest": lambda gradients: torch.stack([gradient.abs().max() for gradient in gradients]).max(),
    "one vector": lambda gradients: torch.cat([gradient.flatten() for gradient in gradients]).norm(),
    "parameters_to_vector": lambda gradients: nn.utils.parameters_to_vector(gradients).dot(nn.utils.parameters_to_vector(gradients)),
}
"""How scripts take the norm of all gradients by hand."""


def optimizers_of_parts(mode: Mode) -> dict[str, str]:
    """Return the error of each kind of optimizer, and of norms of the gradients."""
    pm = after_a_step(mode)
    gradients = [parameter.grad for parameter in pm.parameters() if parameter.grad is not None]
    parameters = list(pm.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() == 2]
    found = {
        "Adafactor": refused(torch.optim.Adafactor(parameters).step),
        "Muon": refused(torch.optim.Muon(matrices).step),
        "LBFGS": refused(lambda: torch.optim.LBFGS(parameters).step(lambda: 0.0)),
        "Undeclared": refused(Undeclared(parameters, lr=0.0).step),
        "AdamW": refused(torch.optim.AdamW(parameters, lr=0.0).step),
        "clip_grad_norm_": refused(lambda: nn.utils.clip_grad_norm_(pm.parameters(), 1.0)),
        "the norms of blocks": refused(lambda: torch.stack([gradient.norm(2.0) for gradient in gradients]).sum()),
        "of different orders": refused(lambda: torch.stack([gradient.norm(2.0) for gradient in gradients]).norm(1.0)),
        "clip_grad_value_": refused(lambda: nn.utils.clip_grad_value_(pm.parameters(), 1.0)),
        "one norm": refused(lambda: float(gradients[0].norm())),
        "pm.clip_grad_norm_": refused(lambda: pm.clip_grad_norm_(1.0)),
        **{name: refused(functools.partial(total, gradients)) for name, total in TOTALS.items()},
    }
    found["declared"] = refused(register_optimizer(Declared, "elements")(parameters, lr=0.0).step)
    for optimizer in (torch.optim.Rprop(parameters), torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=0.1)):
        optimizer.step()
        assert {type(value) for state in optimizer.state.values() for value in state.values()} == {Tensor}
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return found


def clipped(mode: Mode) -> float:
    """Return the distance of torch's clipping, of several orders, from the model's: norms, and weights after clipped steps."""
    pm, reference = after_a_step(mode), model()
    x, target = batches(1)[0]
    square(reference(x), target).backward()
    norms = [
        float(nn.utils.clip_grad_norm_(pm.parameters(), 0.1, order) - nn.utils.clip_grad_norm_(reference.parameters(), 0.1, order))
        for order in (2.0, 1.0, float("inf"))
    ]
    return max(*map(abs, norms), difference_after(made(mode, world_size()), steps=2, max_norm=0.01))


def whole_replicas() -> dict[str, float]:
    """Return distances where every process has all parameters: all optimizers and clipping are right."""
    kinds: dict[str, Make] = {
        "Adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=1e-2),
        "LBFGS": lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3),
    }
    found = {name: difference_after(made("data", world_size()), make, steps=2) for name, make in kinds.items()}
    return {**found, "clipped": difference_after(made("data", world_size()), steps=3, max_norm=0.01)}


def parts_of_sums() -> list[str]:
    """Inside ``no_sync`` a process has its part of a sum: nothing takes it for the sum, and a step with it is refused."""
    pm = made("data", world_size())
    x, target = batches(1)[0]
    with pm.no_sync():
        pm.train_step(x, target=target, loss_fn=square)
    optimizer = torch.optim.AdamW(pm.parameters())
    clips = (lambda: pm.clip_grad_norm_(1.0), lambda: nn.utils.clip_grad_norm_(pm.parameters(), 1.0))
    found = [refused(call) for call in (optimizer.step, *clips, pm.full_gradients)]
    pm.train_step(x, target=target, loss_fn=square)
    return [*found, *(refused(call) for call in (optimizer.step, *clips))]


def hooks_of_parts(mode: Mode) -> tuple[str, str]:
    """Return the errors of a hook on a parameter, registered on the partitioned model and on the model before."""
    pm = made(mode, world_size())
    next(pm.parameters()).register_hook(torch.neg)
    x, target = batches(1)[0]
    later = refused(lambda: pm.train_step(x, target=target, loss_fn=square))
    original = copy.deepcopy(model())
    for parameter in original.parameters():
        parameter.register_hook(torch.neg)
    before = refused(lambda: partition(original, world_size(), mode, example_inputs=(x,), progress=False))
    return later, before


def hooks_of_whole_parameters(mode: Mode) -> float:
    """Return the distance of gradients from the model's, with hooks on parameters of both."""
    reference = model()
    for parameter in reference.parameters():
        parameter.register_hook(lambda gradient: gradient / gradient.norm())
    x, target = batches(1)[0]
    pm = partition(reference, world_size(), mode, example_inputs=(x,), progress=False)
    square(reference(x), target).backward()
    pm.train_step(x, target=target, loss_fn=square)
    found = pm.full_gradients()
    return max(float((found[name] - parameter.grad).abs().max()) for name, parameter in reference.named_parameters())  # type: ignore[operator]


class Tied(nn.Module):
    """The last stage of a pipeline has all parameters, and the first one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(3, 4))
        self.mix = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Map any number of rows."""
        return self.mix(x @ self.code.T) @ self.code


def a_stage_with_all_parameters() -> tuple[float, int]:
    """Return the distance of a clipped step from the model's, and the number of parameters in the optimizer's state."""
    torch.manual_seed(0)
    reference = Tied().double()
    x, target = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    split = Constraints(split_spec={"mix": "beginning"})
    pm = partition(reference, 2, "pipeline", n_microbatches=2, constraints=split, example_inputs=(x,), progress=False)
    assert pm.train_step(x, target=target, loss_fn=square) is not None
    square(reference(x), target).backward()
    norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.1) for module in (reference, pm)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (reference, pm)]
    for optimizer in optimizers:
        optimizer.step()
    found = pm.full_state_dict()
    distances = [float((found[name] - value).abs().max()) for name, value in reference.state_dict().items()]
    whole = pm.full_optimizer_state_dict(optimizers[1])
    optimizers[1].state_dict()  # gathers: every rank must take part
    return max(*distances, float((norms[0] - norms[1]).abs())), len(whole["state"])


def rates_in_processes(before: Mode, after: Mode, folder: str) -> list[str]:
    """Return parameters whose rate, changed after the optimizer was made, differs in the loaded optimizer of another plan."""
    pm, other = made(before, world_size()), made(after, world_size())
    optimizer = by_name(pm)
    x, target = batches(1)[0]
    pm.train_step(x, target=target, loss_fn=square)
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= 7
    wanted = {name: 1e-2 * (1 + len(name) % 3) * 7 for name, _ in model().named_parameters()}
    save({"optimizer": pm.sharded_optimizer_state_dict(optimizer)}, checkpoint_id=folder)
    new, newer = by_name(other), by_name(other)
    state = {"optimizer": other.sharded_optimizer_state_dict(new)}
    load(state, checkpoint_id=folder)
    other.load_optimizer_state_dict(new, state["optimizer"])
    other.load_optimizer_state_dict(newer, pm.full_optimizer_state_dict(optimizer))
    problems = []
    for loaded in (new, newer):
        groups = other.full_optimizer_state_dict(loaded)["param_groups"]
        rates = {name: group["lr"] for group in groups for name in group["params"]}
        problems += [f"{name}: {rates.get(name)} in place of {rate}" for name, rate in wanted.items() if rates.get(name) != rate]
    return problems
