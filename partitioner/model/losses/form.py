"""Look at a loss once, without computing anything: which of the model's results it depends on, and its dtype.

A parameter that the loss does not depend on gets no gradient in eager PyTorch (None, not zero: optimizers treat the two differently).
So the backward is lowered for exactly those results that the loss depends on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partitioner.model.losses.reachable_state import undisturbed
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.program import at_batch, call_loss
from passes.ir.torch_private import FakeTensorMode, pytree

__all__ = ["LossDependence", "LossFunction", "ResultSizes", "fake_tensors", "loss_dependence", "without_warnings_of_fakes"]

LossFunction = Callable[..., Tensor]
"""``loss_fn(output, target)``, a tensor of one number."""


@dataclass(frozen=True)
class LossDependence:
    """What a loss looks like from outside.

    Attributes:
        outputs: nodes of the model's results that the loss depends on differentiably.
        dtype: of the loss.
        own: the node of the model's results that is the loss itself, when one is.
    """

    outputs: frozenset[str]
    dtype: torch.dtype
    own: str | None


@dataclass(frozen=True)
class ResultSizes:
    """How large the results are that a loss takes.

    Attributes:
        batch: what the graph's batch symbol stands for.
        repeats: of a graph that is fixed to the size of a microbatch, how many of them are put together.
        rows: of the batch that these results are of.
    """

    batch: int
    repeats: int
    rows: int


def loss_dependence(
    graph: ModelGraph, requiring: frozenset[str], loss_fn: LossFunction | None, target: Any, sizes: ResultSizes, device: torch.device
) -> LossDependence:
    """Call the loss on fake results (where it reads values: on zeros) and ask autograd which of them it reached.

    Args:
        requiring: nodes whose values autograd tracks.
        target: for these results.
        device: where the loss is computed.

    Raises:
        ConfigError: it is no number, or no gradient flows from it to the model's results alone.
    """
    with undisturbed(loss_fn, device):
        try:
            with fake_tensors() as faked:
                fake_target = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), faked(target))
                return _dependence(graph, requiring, loss_fn, fake_target, sizes, device, torch.empty)
        except Exception:  # noqa: BLE001  whatever a user's loss raises on fake tensors, it is asked again with real ones
            # A loss that reads values (an `if` on a tensor) has none to read in a fake tensor.
            real_target = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().to(device), target)
            return _dependence(graph, requiring, loss_fn, real_target, sizes, device, torch.zeros)


@contextlib.contextmanager
def fake_tensors() -> Iterator[Callable[[Any], Any]]:
    """Compute nothing inside; yields what makes fake tensors of those in a value."""
    with without_warnings_of_fakes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield lambda value: pytree.tree_map_only(Tensor, mode.from_tensor, value)


@contextlib.contextmanager
def without_warnings_of_fakes() -> Iterator[None]:
    """Keep torch from logging what fails on fake tensors: it is asked again with real ones, or raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _dependence(
    graph: ModelGraph,
    requiring: frozenset[str],
    loss_fn: LossFunction | None,
    target: Any,
    sizes: ResultSizes,
    device: torch.device,
    make: Callable[..., Tensor],
) -> LossDependence:
    nodes = {node.name: node for node in graph.graph.nodes}
    leaves: list[Any] = []
    tracked: dict[str, Tensor] = {}
    for output in graph.outputs:
        if output.node is None:
            leaves.append(at_batch(output.constant, sizes.rows))
            continue
        if output.node not in tracked:
            value = nodes[output.node].meta["val"]
            shape = [at_batch(size_of(size), sizes.batch) for size in value.shape]
            if output.combine == "concatenate" and output.batch_dim is not None:
                shape[output.batch_dim] *= sizes.repeats
            tracked[output.node] = make(shape, dtype=value.dtype, device=device, requires_grad=output.node in requiring)
        leaves.append(tracked[output.node])
    with torch.enable_grad():
        loss = call_loss(pytree.tree_unflatten(leaves, graph.output_tree), target, loss_fn, graph.autocast)
    own = next((name for name, tensor in tracked.items() if tensor is loss), None)
    roots = {name: tensor for name, tensor in tracked.items() if tensor.requires_grad}
    _check_gradients(loss, list(roots.values()))
    if not roots:
        return LossDependence(frozenset(), loss.dtype, own)
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, list(roots.values()), allow_unused=True)
    reached = frozenset(name for name, gradient in zip(roots, found, strict=True) if gradient is not None)
    return LossDependence(reached, loss.dtype, own)


def _check_gradients(loss: Tensor, results: Sequence[Tensor]) -> None:
    """Raise ConfigError where ``loss.backward()`` would fail, or reach more than the model's results."""
    if results and not loss.requires_grad:
        raise ConfigError(
            "the loss does not require a gradient: no operation that can be differentiated leads from the model's outputs to it",
            remedy="compute it with tensor operations on the outputs, without .item(), .detach(), torch.no_grad() or integers",
        )
    others = _leaves(loss, results)
    if others:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in others[:3]) + (", ..." if len(others) > 3 else "")
        raise ConfigError(
            f"the loss has gradients for tensors that are no outputs of the model (of shape {shapes}), and train_step would leave them out",
            remedy="make them part of the model: let its forward take the target and return the loss; or .detach() them in loss_fn",
        )


def _leaves(loss: Tensor, known: Collection[Tensor]) -> list[Tensor]:
    """The leaves that autograd would accumulate gradients in, but for those that are known."""
    found: dict[int, Tensor] = {}
    seen, rest = set(), [loss.grad_fn]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not any(variable is each for each in known):
            found[id(variable)] = variable
        rest += [following for following, _ in node.next_functions]
    return list(found.values())
