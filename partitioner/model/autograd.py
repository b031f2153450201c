"""Autograd over a whole partitioned forward: ``pm(x)`` then ``.backward()``, as with any module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.lowering.lowering import Lowering
from partitioner.model.calls import Calls
from partitioner.model.gradient_accumulation import Accumulation
from partitioner.runtime.arguments import BoundInputs
from partitioner.runtime.base import Runtime
from passes.autograd.staged_model import Differentiation
from passes.emit.communication_plan import differentiated_outputs
from passes.emit.place_on_mesh import Gradients
from passes.ir.errors import ConfigError

__all__ = ["PartitionedForward"]

Forward = Callable[[], tuple[tuple[Tensor, ...], Any]]
"""Gives the results, and what the backward needs."""

Backward = Callable[[Any, tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]
"""Takes that and the gradients of the results, None where there is none; gives those of the inputs that autograd tracks."""


class _PartitionedCall(torch.autograd.Function):
    """One forward of all ranks as one node of the autograd graph. Parameter gradients are added to ``.grad`` by the backward programs."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Backward, tracked: Sequence[bool], anchor: Tensor, *inputs: Tensor) -> Any:
        outputs, saved = forward()
        ctx.saved = saved
        ctx.run = backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output, track in zip(outputs, tracked, strict=True) if not track))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise RuntimeError("the backward of this call has run already: a partitioned forward keeps nothing for a second one")
        return None, None, None, None, *ctx.run(saved, gradients)


class PartitionedForward:
    """One call that autograd tracks: its forward, and the backward for gradients of its results.

    Args:
        calls: runs programs.
        runtime: where they run.
        lowering: of the model.
        differentiation: what is differentiated.
        count: how many microbatches.
        inputs: of the call.
        accumulation: what becomes of gradients. A call inside ``no_sync()`` keeps its parts also where its backward runs outside.
    """

    def __init__(
        self,
        calls: Calls,
        runtime: Runtime,
        lowering: Lowering,
        differentiation: Differentiation,
        count: int,
        inputs: BoundInputs,
        accumulation: Accumulation,
    ) -> None:
        self._calls = calls
        self._runtime = runtime
        self._lowering = lowering
        self._differentiation = differentiation
        self._count = count
        self._inputs = inputs
        self._accumulation = accumulation
        self._holds = accumulation.gradients == "keep"
        self._training = lowering.training(differentiation)
        self._differentiated = differentiated_outputs(self._training)
        self._names = calls.differentiated(differentiation.inputs)
        self._shapes: dict[str, torch.Size] = {}

    def tracked(self) -> tuple[Tensor, ...]:
        """Run the forward; ``.backward()`` on its results runs the backward, or says why it cannot."""
        # Autograd runs a function's backward only if one of its inputs requires grad: parameters do not appear among ours.
        anchor = torch.empty(0, requires_grad=True)
        reachable = self._runtime.backward_anywhere or self._lowering.n_stage_ranks == 1
        leaves = [self._inputs.tensors[name] for name in self._names if name in self._inputs.tensors]
        differentiated = tuple(name in self._differentiated for name in self._training.returned)
        backward = self._backward if reachable else _refuse_backward
        results: tuple[Tensor, ...] = _PartitionedCall.apply(self._forward, backward, differentiated, anchor, *leaves)  # type: ignore[no-untyped-call]
        return results

    @property
    def _here(self) -> int:
        return self._runtime.local_ranks[0]

    def _forward(self) -> tuple[tuple[Tensor, ...], Any]:
        """Run the training forward; return the model's outputs, and the saved tensors of each rank of this process."""
        lowering = self._lowering
        found = self._calls.run(lowering, lowering.training_forward(self._differentiation, self._count), self._inputs)
        outputs = found[self._here][0]
        self._shapes.update({name: output.shape for name, output in zip(self._training.returned, outputs, strict=True)})
        return outputs, {rank: result[1] for rank, result in found.items()}

    def _backward(self, saved: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        lowering, names = self._lowering, self._differentiated
        given = {name: each for name, each in zip(self._training.returned, gradients, strict=True) if each is not None}
        example = next(iter(given.values()))
        filled = tuple(given[name].contiguous() if name in given else example.new_zeros(self._shapes[name]) for name in names)
        extra = {
            rank: {"saved": saved[rank], "output_gradients": lowering.rows.of_results(lowering.graph, names, filled, rank)}
            for rank in self._runtime.local_ranks
        }
        mode: Gradients = "keep" if self._holds else self._accumulation.gradients
        programs = lowering.backward(self._differentiation, self._count, frozenset(given), mode)
        found = self._calls.run(lowering, programs, self._inputs, extra)[self._here]
        of_inputs = lowering.rows.of_input_gradients(lowering.graph, self._names, found)
        return tuple(gradient for name, gradient in zip(self._names, of_inputs, strict=True) if name in self._inputs.tensors)


def _refuse_backward(_saved: Any, _gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The backward of a pipeline whose stages are in several processes.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        ".backward() on the result cannot reach the other processes of a pipeline",
        remedy="loss = pm.train_step(*inputs, target=target, loss_fn=loss_fn) runs forward and backward on all ranks",
    )
