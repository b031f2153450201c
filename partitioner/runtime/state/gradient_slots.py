"""Where programs put the gradients of this process's parameters.

Of ranks that share a parameter, each adds what it alone computes: its block; where several hold the same block they compute the same
gradient, and that of the lowest is taken. Between ``no_sync`` steps ranks have parts of a sum. In one process these are added up in the one
``.grad`` there is; a process with one rank keeps its part there (see ``passes.ir.comm.unsummed``).

A parameter with hooks gets its gradient when all ranks have run: autograd adds it, and calls them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from partitioner.runtime.state.hooks import has_hooks
from partitioner.runtime.state.part_gradient import BlockGradient, PartGradient, plain
from partitioner.runtime.state.stored_parameters import StoredParameter
from passes.ir.errors import ConfigError
from passes.spmd.shards import Block

__all__ = ["GradientStore", "ParameterSlot", "is_unsummed"]


def is_unsummed(parameter: Tensor) -> bool:
    """Whether ``.grad`` is a rank's own part of a sum. One that was cleared or replaced since is none."""
    return parameter.grad is not None and getattr(parameter, "_unsummed_gradient", None) is parameter.grad


class GradientStore:
    """The gradients of one run that wait for hooks, and whether hooks are called.

    Args:
        all_ranks_here: whether this process has all ranks: parts of sums are then added up here.
    """

    def __init__(self, *, all_ranks_here: bool) -> None:
        self.all_ranks_here = all_ranks_here
        self._calls_hooks = True
        self._waiting: dict[StoredParameter, Tensor] = {}

    def begin(self) -> None:
        """Forget what a run that failed left."""
        self._waiting.clear()

    def add(self, stored: StoredParameter, gradient: Tensor, block: Block | None) -> None:
        """Add a summed gradient, or a block of it."""
        parameter = stored.parameter
        if self._calls_hooks and has_hooks(parameter):
            self._waiting[stored] = _added(self._waiting.get(stored), gradient, block, parameter)
        else:
            put(stored, _added(parameter.grad, gradient, block, parameter))

    def finish(self) -> None:
        """Add the gradients that waited, as autograd does: tensor hooks first, then ``.grad``, then post-accumulate hooks."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        torch.autograd.backward([stored.parameter for stored in waiting], list(waiting.values()))
        for stored in waiting:
            put(stored, stored.parameter.grad)

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Inside, hooks of parameters are not called."""
        before, self._calls_hooks = self._calls_hooks, False
        try:
            yield
        finally:
            self._calls_hooks = before


class ParameterSlot:
    """Where the gradients go that one rank computes for one parameter: a ``passes.ir.comm.unsummed.GradientSlot``.

    Args:
        store: of the process.
        stored: the parameter.
        block: the rank's part of it; None: all of it.
        owner: the lowest rank that holds the same.
        rank: whose slot it is.
    """

    def __init__(self, store: GradientStore, stored: StoredParameter, block: Block | None, owner: int, rank: int) -> None:
        self._store = store
        self._stored = stored
        self._block = block
        self._owner = owner
        self._rank = rank

    def add(self, gradient: Tensor, unsummed_over: Sequence[int] = ()) -> None:
        """See ``GradientSlot``."""
        parameter = self._stored.parameter
        counts = self._rank == self._owner or self._owner in unsummed_over
        if not parameter.requires_grad or not counts:
            return
        if unsummed_over and not self._store.all_ranks_here:
            _keep_unsummed(self._stored, gradient, len(unsummed_over))
            return
        if is_unsummed(parameter):
            raise ConfigError(
                f"the gradient of {self._stored.name} holds a rank's part from no_sync(), "
                "and this step computes the whole batch on every rank",
                remedy="let all batches of an accumulation divide over the ranks, or clear the gradients before this one",
            )
        self._store.add(self._stored, gradient, self._block)

    def take_unsummed(self) -> Tensor | None:
        """See ``GradientSlot``."""
        parameter = self._stored.parameter
        if not is_unsummed(parameter):
            return None
        part, parameter.grad = parameter.grad, None
        del parameter._unsummed_gradient  # type: ignore[attr-defined]  # noqa: SLF001
        return part


def put(stored: StoredParameter, gradient: Tensor | None, *, is_sum: bool = True) -> None:
    """Make a tensor the ``.grad`` of a parameter, as one that says what it is a part of."""
    membership = stored.membership
    kind = None if is_sum and membership.has_all else BlockGradient if membership.is_part or not is_sum else PartGradient
    if gradient is not None and kind is not (type(gradient) if isinstance(gradient, PartGradient) else None):
        gradient = plain(gradient)
        gradient = gradient if kind is None else gradient.as_subclass(kind)
    if stored.parameter.grad is not gradient:
        stored.parameter.grad = gradient


def _added(total: Tensor | None, gradient: Tensor, block: Block | None, parameter: Tensor) -> Tensor:
    """A sum of gradients, in the memory of the first."""
    gradient = gradient.to(parameter.device)
    if block is not None:
        total = torch.zeros_like(parameter) if total is None else total
        block.within(total).add_(block.unfold(gradient))
        return total
    return gradient if total is None else total.add_(gradient)


def _keep_unsummed(stored: StoredParameter, gradient: Tensor, n_ranks: int) -> None:
    """Add a part to ``.grad`` that is to be summed over so many ranks later."""
    parameter = stored.parameter
    if parameter.grad is not None and not is_unsummed(parameter):
        parameter.grad.div_(n_ranks)
    put(stored, _added(parameter.grad, gradient, None, parameter), is_sum=False)
    parameter._unsummed_gradient = parameter.grad  # type: ignore[attr-defined]  # noqa: SLF001  # it lives and dies with the parameter
