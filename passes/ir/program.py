"""A rank's program: one fx graph whose nodes are stage calls and communication, and the modules that it calls.

    def forward(self, batch, x, target, loss_fn):
        sizes = microbatch_sizes(batch, 2)
        receive_h_mb0 = receive((sizes[0], 16), dtype=torch.float32, source=0, tag=0)
        h_mb0 = wait(receive_h_mb0)
        stage1_forward_mb0 = self.stage1_forward(sizes[0], h_mb0)
        ...

The modules hold the parameters, buffers and constants of a rank; ``Program.bind`` gives them these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx, nn

from passes.ir.comm.unsummed import AddUnsummed, GradientSlot
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import Autocast
from passes.ir.torch_private import TreeSpec, pytree

ProgramKind = Literal["train_step", "forward", "backward"]
"""Kind of program: a training step, a forward, or the backward of one."""

PROGRAM_ARGUMENTS = ("batch", "target", "loss_fn", "loss_weights", "saved", "output_gradients")
"""Arguments of programs other than model inputs; no placeholder of a ModelGraph but ``batch`` has such a name."""


@dataclass(frozen=True)
class Program:
    """The program of one rank.

    Attributes:
        kind: a whole training step; a forward (in training it also returns saved values); the backward of such a forward.
        rank: the rank.
        module: the graph.
        stages: the stages that it runs.
    """

    kind: ProgramKind
    rank: int
    module: fx.GraphModule
    stages: tuple[int, ...]

    @property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(node.target for node in self.module.graph.nodes if node.op == "placeholder")

    @property
    def reads(self) -> frozenset[str]:
        """The arguments, parameters, buffers and constants that it reads, by placeholder name."""
        own = {node.target for node in self.module.graph.nodes if node.op == "get_attr" or (node.op == "placeholder" and node.users)}
        return frozenset(own.union(*(module.bound_names for module in self.module.children() if isinstance(module, StageCall))))

    def bind(self, state: Mapping[str, Tensor], slots: Mapping[str, GradientSlot]) -> None:
        """Give the modules their parameters, buffers and constants, and the slots of gradients, by placeholder name."""
        for module in self.module.children():
            if isinstance(module, StageCall):
                module.bind(state)
            elif isinstance(module, StoreGradients | AddUnsummed):
                module.bind(slots)
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                setattr(self.module, node.target, state[node.target])


class StageCall(nn.Module):
    """Calls a stage's graph with the stage's parameters, buffers and constants, followed by the arguments of the call.

    Args:
        graph: the stage's forward, backward, input-gradient or weight-gradient graph.
        bound_names: placeholder names of these parameters, buffers and constants.
        takes_tuple: whether the first argument is a tuple of saved values, each of which is an argument of the graph.
    """

    def __init__(self, graph: fx.GraphModule, bound_names: Sequence[str], *, takes_tuple: bool = False) -> None:
        super().__init__()
        self.graph = graph
        self.bound_names = tuple(bound_names)
        self.takes_tuple = takes_tuple
        self.bound: tuple[Tensor, ...] = ()

    def bind(self, state: Mapping[str, Tensor]) -> None:
        self.bound = tuple(state[name] for name in self.bound_names)

    def forward(self, *arguments: Any) -> Any:
        unpacked = (*arguments[0], *arguments[1:]) if self.takes_tuple else arguments
        return self.graph(*self.bound, *unpacked)


class StoreGradients(nn.Module):
    """Adds gradients to ``.grad``, as autograd does: a parameter that was frozen after the program was made gets none.

    Args:
        names: for each gradient, the parameter's placeholder; None: the gradient is stored elsewhere.

    Attributes:
        unsummed: parameter whose gradient is a part that a later step sums -> the ranks of the sum.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.unsummed: Mapping[str, tuple[int, ...]] = {}
        self._slots: tuple[tuple[GradientSlot, tuple[int, ...]] | None, ...] = ()

    def bind(self, slots: Mapping[str, GradientSlot]) -> None:
        self._slots = tuple(None if name is None else (slots[name], self.unsummed.get(name, ())) for name in self.names)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_slots": ()}  # of the model that runs the program: a saved one is bound anew

    def forward(self, gradients: Sequence[Tensor]) -> None:
        for slot_and_ranks, gradient in zip(self._slots, gradients, strict=True):
            if slot_and_ranks is not None:
                slot, unsummed_over = slot_and_ranks
                slot.add(gradient, unsummed_over)


class LossCall(nn.Module):
    """Computes the loss of one microbatch and its gradients with respect to the model's results.

    Args:
        leaves: for each leaf of the model's result, the index of its value in ``values``; None for a constant.
        constants: for each leaf, its constant if no node computes it; a size as an expression in the batch.
        tree: structure of the result.
        tracked: indices of the values that require a gradient.
        differentiated: indices of the values whose gradients are arguments of stages.
        autocast: the mixed precision that it is computed in.
        draws: whether it draws random numbers.
        changes: whether it changes values in place: it is given copies, since a leaf of autograd cannot be changed.
    """

    def __init__(
        self,
        leaves: Sequence[int | None],
        constants: Sequence[Any],
        tree: TreeSpec,
        tracked: Sequence[int],
        differentiated: Sequence[int],
        autocast: Autocast | None = None,
        *,
        draws: bool = False,
        changes: bool = False,
    ) -> None:
        super().__init__()
        self.draws = draws
        self.changes = changes
        self.leaves = tuple(leaves)
        self.constants = tuple(constants)
        self.tree = tree
        self.tracked = tuple(tracked)
        self.differentiated = tuple(differentiated)
        self.autocast = autocast

    def forward(
        self, values: Sequence[Tensor], target: Any, loss_fn: Callable[..., Tensor] | None, weight: float | Tensor, rows: int
    ) -> tuple[Tensor, ...]:
        """Return ``weight * loss`` and its gradients for each of ``differentiated``. ``rows``: the size of the microbatch.

        A weight of 0 gives a loss and gradients of 0: the loss itself is nan if all targets are ignored.
        """
        with torch.enable_grad():
            inputs = [value.detach().requires_grad_() if index in self.tracked else value for index, value in enumerate(values)]
            given = [value.clone() for value in inputs] if self.changes else inputs
            pairs = zip(self.leaves, self.constants, strict=True)
            leaves = [at_batch(constant, rows) if index is None else given[index] for index, constant in pairs]
            result = pytree.tree_unflatten(leaves, self.tree)
            loss = self._loss(result, target, loss_fn).reshape(())
            weighted = loss * weight if weight else torch.zeros_like(loss)
        if not self.tracked:
            return (weighted.detach(),)
        if not weight:
            return (weighted.detach(), *(torch.zeros_like(values[index]) for index in self.differentiated))
        computed: Sequence[Tensor | None] = torch.autograd.grad(weighted, [inputs[index] for index in self.tracked], allow_unused=True)
        gradient_of = dict(zip(self.tracked, computed, strict=True))
        for index, gradient in gradient_of.items():
            if gradient is not None and index not in self.differentiated:
                raise ConfigError(
                    "the loss depends on an output of the model that it did not depend on when it was first called",
                    remedy="pass another function object for another loss: each one is looked at once",
                )
        gradients = []
        for index in self.differentiated:
            gradient = gradient_of[index]
            gradients.append(torch.zeros_like(values[index]) if gradient is None else gradient.contiguous())
        return (weighted.detach(), *gradients)

    def _loss(self, result: Any, target: Any, loss_fn: Callable[..., Tensor] | None) -> Tensor:
        """Return the loss; an error that the user's loss_fn raises becomes a ConfigError."""
        try:
            return call_loss(result, target, loss_fn, self.autocast)
        except (PartitionError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = f"loss_fn fails on the model's outputs and this target: {type(error).__name__}: {error}"
            raise ConfigError(problem, remedy="call it as train_step does: loss_fn(model(x), target)") from error


def at_batch(constant: Any, batch: int) -> Any:
    """Return the value of a constant result for a batch size: it may be an expression in the batch."""
    if isinstance(constant, sympy.Expr):
        return int(constant.subs(dict.fromkeys(constant.free_symbols, batch)))
    return constant


def call_loss(result: Any, target: Any, loss_fn: Callable[..., Tensor] | None, autocast: Autocast | None = None) -> Tensor:
    """Return ``loss_fn(result, target)``, or without a ``loss_fn`` the loss that the model itself returns.

    Args:
        autocast: the mixed precision that it is computed in.

    Raises:
        ConfigError: the model returns no loss, or the loss is not a single number.
    """
    devices = {leaf.device.type for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)} & {"cpu", "cuda"}
    with contextlib.nullcontext() if autocast is None else autocast.enabled(max(devices, default=None)):
        loss: object = loss_fn(result, target) if loss_fn is not None else _own_loss(result)
    if isinstance(loss, Tensor) and loss.device.type == "meta":
        raise ConfigError("the loss is on the meta device: it has no value", remedy="compute it from the model's outputs")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if loss_fn is None:
        raise ConfigError("no loss: the model returns more than one number, and no loss_fn was given", remedy=_GIVE_LOSS_FN)
    if isinstance(loss, Tensor):
        raise ConfigError(f"loss_fn returns a tensor of shape {tuple(loss.shape)}, not one number", remedy="reduce it: .mean() or .sum()")
    raise ConfigError(
        f"loss_fn returns a value of type {type(loss).__name__}, not a tensor of one number",
        remedy="return the tensor that a gradient flows from: no number, tuple or None",
    )


def _own_loss(result: Any) -> object:
    """Return the loss that the model computes: the result itself if it is a tensor, else its ``.loss`` or ``["loss"]``."""
    loss: object = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    if loss is None and isinstance(result, Mapping):
        loss = result.get("loss")
    if loss is None:
        raise ConfigError(
            f"no loss: the model returns {type(result).__name__} without a .loss, and no loss_fn was given", remedy=_GIVE_LOSS_FN
        )
    return loss


_GIVE_LOSS_FN = "pm.train_step(x, target=y, loss_fn=torch.nn.functional.mse_loss), or pass the labels that make the model return its loss"
