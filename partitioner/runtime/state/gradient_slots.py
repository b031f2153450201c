"""Accumulate the gradients that programs compute into ``.grad`` of this process's parameters.

Each rank that shares a parameter adds the gradient of its block; ranks with the same block compute the same gradient, and only the lowest
adds it. Inside ``no_sync``, ranks have terms of a sum. If one process runs all ranks, these add up in the parameter's one ``.grad``; a
process with one rank keeps its term there (see ``passes.ir.comm.unsummed``).

The gradient of a parameter with hooks is added by autograd, which calls the hooks, when all ranks have run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from partitioner.runtime.state.hooks import has_hooks
from partitioner.runtime.state.part_gradient import BlockGradient, PartGradient, plain
from partitioner.runtime.state.stored_parameters import Membership, StoredParameter
from passes.ir.errors import ConfigError
from passes.spmd.shards import Block


def is_unsummed(parameter: Tensor) -> bool:
    """Return whether ``.grad`` is a rank's own term of a sum (``no_sync``); False once it was cleared or replaced."""
    return parameter.grad is not None and getattr(parameter, "_unsummed_gradient", None) is parameter.grad


class GradientStore:
    """Adds gradients to parameters, those with hooks at the end of a run; terms of sums add up here if ``all_ranks_here``.

    Attributes:
        trained: the names of the parameters that programs compute gradients for.
        waiting: the gradients of parameters with hooks, in a run.
    """

    def __init__(self, trained: frozenset[str], *, all_ranks_here: bool) -> None:
        self.trained = trained
        self.all_ranks_here = all_ranks_here
        self._calls_hooks = True
        self.discards = False
        self.waiting: dict[StoredParameter, Tensor] = {}
        self._aside: dict[StoredParameter, Tensor] | None = None

    def begin(self) -> None:
        """Discard gradients of a run that failed."""
        self.waiting.clear()

    def add(self, stored: StoredParameter, gradient: Tensor, block: Block | None) -> None:
        """Add a summed gradient, or a block of it."""
        parameter = stored.parameter
        if self._aside is not None:
            self._aside[stored] = _add(self._aside.get(stored), gradient, block, parameter)
        elif self._calls_hooks and has_hooks(parameter):
            self.waiting[stored] = _add(self.waiting.get(stored), gradient, block, parameter)
        else:
            set_gradient(stored, _add(parameter.grad, gradient, block, parameter))

    def finish(self) -> None:
        """Let autograd add the waiting gradients: it calls tensor hooks, adds to ``.grad``, and calls post-accumulate hooks."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, {}
        torch.autograd.backward([stored.parameter for stored in waiting], list(waiting.values()))
        for stored in waiting:
            set_gradient(stored, stored.parameter.grad)

    @contextlib.contextmanager
    def discarding(self) -> Iterator[None]:
        """Return a context in which gradients are not added to parameters."""
        previous, self.discards = self.discards, True
        try:
            yield
        finally:
            self.discards = previous

    @contextlib.contextmanager
    def aside(self) -> Iterator[dict[StoredParameter, Tensor]]:
        """Return a context in which gradients are kept in a dictionary of their own, for ``add_scaled``."""
        previous, self._aside = self._aside, {}
        try:
            yield self._aside
        finally:
            self._aside = previous

    def add_scaled(self, kept: dict[StoredParameter, Tensor], factor: Tensor) -> None:
        """Add the gradients that were kept aside to ``.grad``, each multiplied by a number; ``kept`` is empty then."""
        while kept:
            stored, gradient = kept.popitem()
            if stored.parameter.requires_grad:
                self.add(stored, gradient * factor.to(gradient.device), None)
        self.finish()

    @contextlib.contextmanager
    def without_hooks(self) -> Iterator[None]:
        """Return a context in which hooks of parameters are not called."""
        previous, self._calls_hooks = self._calls_hooks, False
        try:
            yield
        finally:
            self._calls_hooks = previous


class ParameterSlot:
    """Takes the gradients that one rank computes for one parameter: a ``passes.ir.comm.unsummed.GradientSlot``.

    Args:
        stored: the parameter.
        block: the rank's block of it; None: all of it.
        owner: the lowest rank that holds the same block.
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
        is_duplicate = self._rank != self._owner and self._owner not in unsummed_over
        if not parameter.requires_grad or is_duplicate or self._store.discards:
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
        term, parameter.grad = parameter.grad, None
        del parameter._unsummed_gradient  # type: ignore[attr-defined]  # noqa: SLF001
        return term


def set_gradient(stored: StoredParameter, gradient: Tensor | None, *, is_sum: bool = True) -> None:
    """Set ``.grad`` to a tensor of the class that refuses norms which would be wrong (``_class_of``).

    Args:
        is_sum: whether the gradient is complete; if not, it is this process's term of a sum over ranks.
    """
    kind = _class_of(stored.membership, is_sum=is_sum)
    if gradient is not None and type(gradient) is not kind:
        gradient = plain(gradient) if kind is Tensor else plain(gradient).as_subclass(kind)
    if isinstance(gradient, PartGradient):
        gradient.share = stored.share if is_sum else None
    if stored.parameter.grad is not gradient:
        stored.parameter.grad = gradient


def _class_of(membership: Membership, *, is_sum: bool) -> type[Tensor]:
    """Return the class of a parameter's gradient in this process: it decides which norms are refused (``part_gradient``)."""
    if membership.is_part or not is_sum:
        return BlockGradient  # a shard, or a term of a sum: no norm is right
    if not membership.has_all:
        return PartGradient  # its own norm is right, one over the gradients of this process is not
    return Tensor


def _add(total: Tensor | None, gradient: Tensor, block: Block | None, parameter: Tensor) -> Tensor:
    """Add a gradient of a parameter, or of a block of it, to ``total`` in place, and return the sum; None is a total of zero."""
    gradient = gradient.to(parameter.device)
    if block is not None:
        total = torch.zeros_like(parameter) if total is None else total
        for target, term in zip(block.within(total), block.unfold(gradient), strict=True):
            target.add_(term)
        return total
    return gradient if total is None else total.add_(gradient)


def _keep_unsummed(stored: StoredParameter, gradient: Tensor, n_ranks: int) -> None:
    """Add to ``.grad`` a term that is later summed over ``n_ranks``; a complete gradient there is divided by that number first."""
    parameter = stored.parameter
    if parameter.grad is not None and not is_unsummed(parameter):
        parameter.grad.div_(n_ranks)
    set_gradient(stored, _add(parameter.grad, gradient, None, parameter), is_sum=False)
    parameter._unsummed_gradient = parameter.grad  # type: ignore[attr-defined]  # noqa: SLF001  # it lives and dies with the parameter
