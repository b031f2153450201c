"""Find which of the model's results a loss depends on, and its dtype, without computing anything.

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

from partitioner.model.losses.reachable_state import preserve_state
from passes.graph.aliasing import aliasing
from passes.graph.schemas import draws_random_numbers
from passes.graph.symbolic_sizes import size_of
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.program import at_batch, call_loss
from passes.ir.torch_private import FakeTensorMode, TorchDispatchMode, pytree, version_of

LossFunction = Callable[..., Tensor]
"""``loss_fn(output, target)``, a tensor of one number."""


@dataclass(frozen=True)
class LossDependence:
    """Inputs and dtype of a loss.

    Attributes:
        outputs: nodes of the model's results that the loss depends on differentiably.
        dtype: of the loss.
        own: the node of the model's results that is the loss itself, when one is.
        draws: whether it draws random numbers.
        changes: whether it changes results in place, which it is then given as copies.
    """

    outputs: frozenset[str]
    dtype: torch.dtype
    own: str | None
    draws: bool = False
    changes: bool = False


class _DrawWatch(TorchDispatchMode):
    """Notes whether an operator inside draws random numbers."""

    draws = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or draws_random_numbers(function)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ResultSizes:
    """How large the results are that a loss takes.

    Attributes:
        batch: value of the graph's batch symbol.
        repeats: of a graph that is fixed to the size of a microbatch, how many microbatches are concatenated.
        rows: rows of the batch that the results are for; also the value of the batch symbol in results that are sizes.
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
        loss_fn: None: the model returns its loss.
        target: for these results.
        device: where the loss is computed.

    Raises:
        ConfigError: the loss is no number, has no gradient, or has gradients for tensors that are no results of the model.
    """
    with preserve_state(loss_fn, device):
        try:
            with fake_tensors() as make_fake:
                fake_target = pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), make_fake(target))
                return _dependence(graph, requiring, loss_fn, fake_target, sizes, device, torch.empty)
        except (RuntimeError, TypeError, ValueError):
            # Reading a value (an `if` on a tensor) raises one of these on a fake tensor. An error of the loss itself is raised again below.
            real_target = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().to(device), target)
            return _dependence(graph, requiring, loss_fn, real_target, sizes, device, torch.zeros)


@contextlib.contextmanager
def fake_tensors() -> Iterator[Callable[[Any], Any]]:
    """Enter a fake tensor mode; yields a function that replaces the tensors in nested containers by fake ones."""
    with silence_fake_tensor_log(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield lambda value: pytree.tree_map_only(Tensor, mode.from_tensor, value)


@contextlib.contextmanager
def silence_fake_tensor_log() -> Iterator[None]:
    """Keep torch from logging operations that fail on fake tensors: callers retry with real ones, or handle the error."""
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
    allocate: Callable[..., Tensor],
) -> LossDependence:
    """Call the loss on results that ``allocate`` creates; see ``loss_dependence``."""
    nodes = {node.name: node for node in graph.graph.nodes}
    leaves: list[Any] = []
    results: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    for output in graph.loss_results:
        if output.node is None:
            leaves.append(at_batch(output.constant, sizes.rows))
            continue
        if output.node not in results:
            value = nodes[output.node].meta["val"]
            shape = [at_batch(size_of(size), sizes.batch) for size in value.shape]
            if output.combine == "concatenate" and output.batch_dim is not None:
                shape[output.batch_dim] *= sizes.repeats
            results[output.node] = allocate(shape, dtype=value.dtype, device=device, requires_grad=output.node in requiring)
            given[output.node] = results[output.node].clone()  # like a result of the model: no leaf, which cannot be changed in place
        leaves.append(given[output.node])
    with torch.enable_grad(), _DrawWatch() as watch:  # type: ignore[no-untyped-call]  # torch's
        loss = call_loss(pytree.tree_unflatten(leaves, graph.loss_tree), target, loss_fn, graph.autocast)
    own = next((name for name, result in given.items() if result is loss), None)
    changes = any(version_of(result) for result in given.values())
    tracked = {name: result for name, result in results.items() if result.requires_grad}
    _check_gradients(loss, list(tracked.values()))
    if not tracked:
        return LossDependence(frozenset(), loss.dtype, own, watch.draws, changes)
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, list(tracked.values()), allow_unused=True)
    reached = frozenset(name for name, gradient in zip(tracked, gradients, strict=True) if gradient is not None)
    return LossDependence(reached, loss.dtype, own, watch.draws, changes)


def refuse_shared_memory(model: ModelGraph) -> None:
    """Raise ConfigError if results of a model share memory, with each other or with inputs and parameters.

    A loss that changes one in place changes the others in eager PyTorch, where programs give it copies.
    """
    storages = aliasing(model.graph).storages
    seen = {each for node in model.graph.nodes if node.op == "placeholder" for each in storages[node.name]}
    for output in model.loss_results:
        own = storages[output.node] if output.node is not None else frozenset[int]()
        if own & seen:
            raise ConfigError(
                "loss_fn changes a result of the model in place, whose memory another result, an input or a parameter has",
                remedy="change a copy: out = out.clone(), or out = out - target",
            )
        seen |= own


def _check_gradients(loss: Tensor, results: Sequence[Tensor]) -> None:
    """Raise ConfigError where ``loss.backward()`` would fail, or reach more than the model's results."""
    if results and not loss.requires_grad:
        raise ConfigError(
            "the loss does not require a gradient: no operation that can be differentiated leads from the model's outputs to it",
            remedy="compute it with tensor operations on the outputs, without .item(), .detach(), torch.no_grad() or integers",
        )
    others = _other_leaves(loss, results)
    if others:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in others[:3]) + (", ..." if len(others) > 3 else "")
        raise ConfigError(
            f"the loss has gradients for tensors that are no outputs of the model (of shape {shapes}), and train_step would leave them out",
            remedy="make them part of the model: let its forward take the target and return the loss; or .detach() them in loss_fn",
        )


def _other_leaves(loss: Tensor, results: Collection[Tensor]) -> list[Tensor]:
    """Walk the autograd graph of a loss; return the leaves that would get a gradient and are no results of the model."""
    others: dict[int, Tensor] = {}
    seen, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad node
        if leaf is not None and not any(leaf is result for result in results):
            others[id(leaf)] = leaf
        pending += [following for following, _ in node.next_functions]
    return list(others.values())
