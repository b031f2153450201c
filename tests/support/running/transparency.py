"""The proof that a partitioned model is the model: the same training run twice, compared number by number.

    reference = reference_steps(case)                                    # the model unchanged
    partitioned = partitioned_steps(case, devices=4, mode="pipeline")    # the model partitioned
    assert compare(reference, partitioned, case.tolerance) is None       # or the first difference, by name
    assert first_difference(case, devices=4, mode="pipeline") is None    # all of that in one line

Where a model trains with batch normalisation, microbatches normalise over their own rows; the reference is then the model trained on
the same microbatches, one after the other, each loss weighted by its part of the rows.
"""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from partitioner import PartitionedModel, PartitionWarning, partition
from tests.support.models.case import BATCH_SIZE, Case, Instance, mean_squared_error

N_MICROBATCHES = 4

LEARNING_RATE = 1e-2
"""So large that a wrong gradient of the first step is plain to see in the weights after the last."""

ADAM_EPSILON = 1e-8
"""AdamW's addend to the root of the mean of squares: torch's default."""

UNITS = 8
"""Rounding units of the largest gradient of a step that any gradient of that step may differ by.

Some gradients are sums whose terms cancel: that of a key's bias in attention is zero, that of the last bias is the mean of what the model
misses the target by. What is left of them is the rounding of their terms, and has the scale of those. The zoo shows a quarter of a unit.
"""

MOVED_BY_NOISE = 1e-3
"""The part of the tolerance, relative to the largest weight, that any weight may differ by after the last step.

AdamW divides a gradient by its size, so it blows up the rounding that is left of a gradient that is zero (see ``UNITS``), up to the size
of its own epsilon, and moves the weight by it.
"""


@dataclass(frozen=True)
class Steps:
    """Results of training.

    Attributes:
        losses: of each step, over the whole batch.
        gradients: of each step, by parameter name; None for a parameter that has no gradient.
        state: parameters and buffers by name, after the last step.
    """

    losses: tuple[Tensor, ...]
    gradients: tuple[Mapping[str, Tensor | None], ...]
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ.

    Attributes:
        place: ``"step 1, gradient of head.weight"``.
        problem: what differs there.
        error: largest absolute difference; infinite when the two cannot be subtracted.
    """

    place: str
    problem: str
    error: float = float("inf")

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


def microbatch_sizes(rows: int, count: int) -> tuple[int, ...]:
    """Return rows of each microbatch as ``torch.tensor_split`` cuts; a microbatch without rows is dropped.

    >>> microbatch_sizes(9, 4), microbatch_sizes(2, 4)
    ((3, 2, 2, 2), (1, 1))
    """
    return tuple(len(part) for part in torch.arange(rows).tensor_split(count) if len(part))


def reference_sizes(case: Case, batch_size: int = BATCH_SIZE, n_microbatches: int = N_MICROBATCHES) -> tuple[int, ...] | None:
    """Return the microbatches that the reference trains on: None, the whole batch, unless the case normalises over it."""
    return microbatch_sizes(batch_size, n_microbatches) if case.batch_norm else None


def loss_of(case: Case, output: Any, target: Any) -> Tensor:
    """Return the loss of one output: the case's loss function, or the model's own result."""
    if case.loss_fn is not None:
        return case.loss_fn(output, target)
    return output if isinstance(output, Tensor) else output.loss


@functools.cache
def reference_steps(
    case: Case,
    n_steps: int = 3,
    batch_size: int = BATCH_SIZE,
    microbatch_sizes: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Steps:
    """Train the unpartitioned model with AdamW; with microbatch sizes, one microbatch after the other."""
    instance = case.build(batch_size=batch_size, dtype=dtype, device=device)
    model = instance.model
    microbatches = [instance] if microbatch_sizes is None else _cut(case, instance, batch_size, microbatch_sizes, dtype)
    weights = [1.0] if microbatch_sizes is None else [size / batch_size for size in microbatch_sizes]

    counters = [buffer for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")]

    def step() -> Tensor:
        losses, counted = [], [counter.clone() for counter in counters]
        for part, weight in zip(microbatches, weights, strict=True):
            losses.append(loss_of(case, model(*part.args, **part.kwargs), part.target) * weight)
            losses[-1].backward()
            for counter, before in zip(counters, counted, strict=True):
                counter.copy_(before + (1 if model.training else 0))  # one forward, however many microbatches it has
        return torch.stack(losses).sum()

    def gradients() -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    return _train(n_steps, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), step, gradients, model.state_dict)


def make_partitioned(instance: Instance, **partition_arguments: Any) -> PartitionedModel:
    """Partition the model of an instance with its batch as the example.

    Where microbatches are asked for, the reference has the same ones, and the warning that BatchNorm differs by them is ignored.
    """
    with warnings.catch_warnings():
        if (partition_arguments.get("n_microbatches") or 1) > 1:
            warnings.simplefilter("ignore", PartitionWarning)
        return partition(
            instance.model, example_inputs=instance.args, example_kwargs=dict(instance.kwargs), progress=False, **partition_arguments
        )


def partitioned_steps(
    case: Case,
    n_steps: int = 3,
    batch_size: int = BATCH_SIZE,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **partition_arguments: Any,
) -> Steps:
    """Train the partitioned model with AdamW through ``train_step``; the original model must stay as it was."""
    instance = case.build(batch_size=batch_size, dtype=dtype, device=device)
    with _unchanged(instance.model):
        pm = make_partitioned(instance, **partition_arguments)

        def step() -> Tensor:
            return pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)

        return _train_partitioned(pm, n_steps, step)


def backward_steps(
    case: Case,
    n_steps: int = 3,
    batch_size: int = BATCH_SIZE,
    dtype: torch.dtype = torch.float64,
    **partition_arguments: Any,
) -> Steps:
    """Train the partitioned model as any module is trained: call, loss, ``backward()``, AdamW."""
    instance = case.build(batch_size=batch_size, dtype=dtype)
    with _unchanged(instance.model):
        pm = make_partitioned(instance, **partition_arguments)

        def step() -> Tensor:
            loss = loss_of(case, pm(*instance.args, **instance.kwargs), instance.target)
            loss.backward()
            return loss

        return _train_partitioned(pm, n_steps, step)


def assert_step_equals(pm: PartitionedModel, model: nn.Module, *inputs: Tensor, target: Tensor) -> None:
    """Assert that the loss and every gradient of one training step are those of the model."""
    loss = pm.train_step(*inputs, target=target, loss_fn=mean_squared_error)
    expected = mean_squared_error(model(*inputs), target)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def first_difference(
    case: Case, batch_size: int = BATCH_SIZE, n_microbatches: int = N_MICROBATCHES, device: str = "cpu", **partition_arguments: Any
) -> Difference | None:
    """Train in one piece and partitioned, on one device, through ``train_step``, and compare; in one microbatch where rows are compared."""
    n_microbatches = case.microbatches(n_microbatches)
    sizes = reference_sizes(case, batch_size, n_microbatches)
    reference = reference_steps(case, batch_size=batch_size, microbatch_sizes=sizes, device=device)
    other = partitioned_steps(case, batch_size=batch_size, n_microbatches=n_microbatches, device=device, **partition_arguments)
    return compare(reference, other, case.tolerance)


def compare(reference: Steps, other: Steps, tolerance: float) -> Difference | None:
    """Return the first difference in the order of training: each step's loss and gradients, and the state after all steps.

    Two tensors agree when no element differs by more than ``tolerance`` times the largest element of the reference, plus what rounding
    leaves of a tensor that is zero in exact arithmetic: see ``UNITS`` and ``MOVED_BY_NOISE``.
    """
    for index, (loss, gradients) in enumerate(zip(reference.losses, reference.gradients, strict=True), start=1):
        difference = _compare_tensor(f"step {index}, loss", loss, other.losses[index - 1], tolerance, 0.0)
        difference = difference or compare_gradients(gradients, other.gradients[index - 1], tolerance, f"step {index}, gradient of ")
        if difference is not None:
            return difference
    moved = _moved_by_rounding(reference, other)
    return _compare_named("after the last step, ", reference.state, other.state, tolerance, MOVED_BY_NOISE * tolerance, moved)


def _moved_by_rounding(reference: Steps, other: Steps) -> dict[str, float]:
    """Return parameters whose gradients are rounding errors of zero, in every step of both runs -> their allowed distance after AdamW.

    A step moves a weight by the rate times a mean of its gradients over ``epsilon`` and the root of a mean of their squares, which is
    nothing beside ``epsilon``: so steps differ by no more than the rate times the largest difference of gradients over ``epsilon``.
    """
    found: dict[str, float] = {}
    for name in reference.gradients[0] if reference.gradients else ():
        differences = []
        for one, two in zip(reference.gradients, other.gradients, strict=True):
            rounding = UNITS * _unit(one) * max((_largest(value) for value in one.values() if value is not None), default=0.0)
            pair = [value for value in (one[name], two[name]) if value is not None]
            if len(pair) < 2 or max(map(_largest, pair)) > rounding:
                break
            differences.append(_largest(pair[0] - pair[1]))
        else:
            found[name] = len(differences) * LEARNING_RATE / ADAM_EPSILON * max(differences)
    return found


def compare_gradients(
    reference: Mapping[str, Tensor | None], other: Mapping[str, Tensor | None], tolerance: float, prefix: str = "gradient of "
) -> Difference | None:
    """Return the first difference between the gradients of one step, each relative to the largest of them all: see ``UNITS``."""
    return _compare_named(prefix, reference, other, tolerance, UNITS * _unit(reference))


def _unit(gradients: Mapping[str, Tensor | None]) -> float:
    """Return the rounding unit of their type."""
    return max((torch.finfo(value.dtype).eps for value in gradients.values() if value is not None), default=0.0)


def compare_values(reference: Any, other: Any, tolerance: float) -> Difference | None:
    """Return the first difference between two nested values: their structure, their tensors, their other leaves."""
    leaves, tree = pytree.tree_flatten(reference)
    other_leaves, other_tree = pytree.tree_flatten(other)
    if tree != other_tree:
        return Difference("output", f"structure {other_tree} instead of {tree}")
    for index, (leaf, other_leaf) in enumerate(zip(leaves, other_leaves, strict=True)):
        place = f"output, leaf {index}"
        if isinstance(leaf, Tensor) and isinstance(other_leaf, Tensor):
            difference = _compare_tensor(place, leaf, other_leaf, tolerance, 0.0)
        else:
            difference = None if leaf == other_leaf else Difference(place, f"{other_leaf!r} instead of {leaf!r}")
        if difference is not None:
            return difference
    return None


def _train(
    n_steps: int,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], Tensor],
    gradients: Callable[[], Mapping[str, Tensor | None]],
    state: Callable[[], Mapping[str, Tensor]],
) -> Steps:
    losses, history = [], []
    for _ in range(n_steps):
        optimizer.zero_grad()
        losses.append(step().detach().clone())
        history.append({name: None if value is None else value.detach().clone() for name, value in gradients().items()})
        optimizer.step()
    return Steps(tuple(losses), tuple(history), {name: value.detach().clone() for name, value in state().items()})


def _train_partitioned(pm: PartitionedModel, n_steps: int, step: Callable[[], Tensor]) -> Steps:
    return _train(n_steps, torch.optim.AdamW(pm.parameters(), lr=LEARNING_RATE), step, pm.full_gradients, pm.full_state_dict)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Fail when the model's state or gradients are not afterwards what they were before."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0, msg="the original model was changed")
    assert all(parameter.grad is None for parameter in model.parameters()), "the original model got gradients"


def _cut(case: Case, instance: Instance, rows: int, sizes: Sequence[int], dtype: torch.dtype) -> list[Instance]:
    """Return one instance a microbatch, all of the same model. The batch dimension is the one that grows with the batch."""
    leaves, tree = pytree.tree_flatten((instance.args, instance.kwargs, instance.target))
    grown = case.build(batch_size=rows + 1, dtype=dtype)
    grown_leaves = pytree.tree_leaves((grown.args, grown.kwargs, grown.target))
    parts = [list(_cut_leaf(leaf, grown_leaf, sizes)) for leaf, grown_leaf in zip(leaves, grown_leaves, strict=True)]
    trees = (pytree.tree_unflatten(list(leaf_parts), tree) for leaf_parts in zip(*parts, strict=True))
    return [Instance(instance.model, args, kwargs, target) for args, kwargs, target in trees]


def _cut_leaf(leaf: Any, grown: Any, sizes: Sequence[int]) -> Iterator[Any]:
    if not isinstance(leaf, Tensor) or leaf.shape == grown.shape:
        return iter([leaf] * len(sizes))
    dimension = next(index for index, size in enumerate(leaf.shape) if size != grown.shape[index])
    return iter(leaf.split(list(sizes), dim=dimension))


def _compare_named(
    prefix: str,
    reference: Mapping[str, Tensor | None],
    other: Mapping[str, Tensor | None],
    tolerance: float,
    noise: float,
    moved: Mapping[str, float] | None = None,
) -> Difference | None:
    """Return the first difference between tensors of one kind.

    Args:
        noise: what rounding may leave, relative to the largest of them all.
        moved: how much more each tensor may differ by.
    """
    if reference.keys() != other.keys():
        names = sorted(reference.keys() ^ other.keys())
        return Difference(prefix + names[0], "missing" if names[0] in reference else "unknown to the model")
    largest = max((_largest(value) for value in reference.values() if value is not None and value.is_floating_point()), default=0.0)
    for name, value in reference.items():
        other_value = other[name]
        if value is None or other_value is None:
            if value is not None or other_value is not None:
                return Difference(prefix + name, f"{_presence(other_value)} instead of {_presence(value)}")
            continue
        difference = _compare_tensor(prefix + name, value, other_value, tolerance, noise * largest + (moved or {}).get(name, 0.0))
        if difference is not None:
            return difference
    return None


def _compare_tensor(place: str, reference: Tensor, other: Tensor, tolerance: float, noise: float) -> Difference | None:
    if (reference.shape, reference.dtype) != (other.shape, other.dtype):
        return Difference(
            place, f"{other.dtype} of shape {tuple(other.shape)} instead of {reference.dtype} of shape {tuple(reference.shape)}"
        )
    allowed = tolerance * _largest(reference) + noise if reference.is_floating_point() else 0.0
    error = _largest(other.detach().double() - reference.detach().double())
    if error <= allowed:
        return None
    return Difference(place, f"differs by {error:.2e}, allowed {allowed:.2e}, largest value {_largest(reference):.2e}", error)


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude; 0 for an empty tensor, nan when there is one."""
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _presence(value: Tensor | None) -> str:
    return "no gradient" if value is None else "a gradient"
