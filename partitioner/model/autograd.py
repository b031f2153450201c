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

__all__ = ["tracked_forward"]

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


def tracked_forward(
    calls: Calls,
    runtime: Runtime,
    lowering: Lowering,
    differentiation: Differentiation,
    count: int,
    inputs: BoundInputs,
    accumulation: Accumulation,
) -> tuple[Tensor, ...]:
    """Run the forward of one call; ``.backward()`` on its results runs the backward, or says why it cannot.

    Args:
        count: how many microbatches.
        accumulation: what becomes of gradients. A call inside ``no_sync()`` keeps its parts also where its backward runs outside.
    """
    here = runtime.local_ranks[0]
    holds = accumulation.gradients == "keep"
    training = lowering.training(differentiation)
    differentiated = differentiated_outputs(training)
    names = calls.differentiated(differentiation.inputs)
    shapes: dict[str, torch.Size] = {}

    def forward() -> tuple[tuple[Tensor, ...], Any]:
        """Run the training forward; return the model's outputs, and the saved tensors of each rank of this process."""
        found = calls.run(lowering, lowering.training_forward(differentiation, count), inputs)
        outputs = found[here][0]
        shapes.update({name: output.shape for name, output in zip(training.returned, outputs, strict=True)})
        return outputs, {rank: result[1] for rank, result in found.items()}

    def backward(saved: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        given = {name: each for name, each in zip(training.returned, gradients, strict=True) if each is not None}
        example = next(iter(given.values()))
        filled = tuple(given[name].contiguous() if name in given else example.new_zeros(shapes[name]) for name in differentiated)
        extra = {
            rank: {"saved": saved[rank], "output_gradients": lowering.rows.of_results(lowering.graph, differentiated, filled, rank)}
            for rank in runtime.local_ranks
        }
        mode: Gradients = "keep" if holds else accumulation.gradients
        found = calls.run(lowering, lowering.backward(differentiation, count, frozenset(given), mode), inputs, extra)[here]
        of_inputs = lowering.rows.of_input_gradients(lowering.graph, names, found)
        return tuple(gradient for name, gradient in zip(names, of_inputs, strict=True) if name in inputs.tensors)

    # Autograd runs a function's backward only if one of its inputs requires grad: parameters do not appear among ours.
    anchor = torch.empty(0, requires_grad=True)
    reachable = runtime.backward_anywhere or lowering.n_stage_ranks == 1
    leaves = [inputs.tensors[name] for name in names if name in inputs.tensors]
    tracked = tuple(name in differentiated for name in training.returned)
    way_back = backward if reachable else _refuse_backward
    results: tuple[Tensor, ...] = _PartitionedCall.apply(forward, way_back, tracked, anchor, *leaves)  # type: ignore[no-untyped-call]
    return results


def _refuse_backward(_saved: Any, _gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The backward of a pipeline whose stages are in several processes.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        ".backward() on the result cannot reach the other processes of a pipeline",
        remedy="loss = pm.train_step(*inputs, target=target, loss_fn=loss_fn) runs forward and backward on all ranks",
    )
