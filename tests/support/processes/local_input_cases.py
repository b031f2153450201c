"""Functions of worker processes in the tests of local inputs: each has a loader of its own; each function runs on every rank at once."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from partitioner import PartitionedModel
from tests.support.models.case import BATCH_SIZE, Case, Instance
from tests.support.models.zoo import case_named
from tests.support.running.transparency import N_MICROBATCHES, Steps, compare, compare_gradients, compare_values, loss_of, make_partitioned

Mode = str | Mapping[str, int]
N_BATCHES = 3


def rank() -> int:
    return int(os.environ["RANK"])


class Rows(Dataset[tuple[Any, ...]]):
    """Rows of inputs and targets, one after another."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self.leaves = leaves

    def __len__(self) -> int:
        return len(self.leaves[0])

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(leaf[index] for leaf in self.leaves)


def partitioned(case: Case, instance: Instance, mode: Mode) -> PartitionedModel:
    n_microbatches = N_MICROBATCHES // 2 if "pipeline" in mode else 1
    return make_partitioned(instance, devices=int(os.environ["WORLD_SIZE"]), mode=mode, n_microbatches=n_microbatches, inputs="local")


def loader(rows: Rows, n_parts: int, part: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(rows, n_parts, part, shuffle=True, seed=3)
    return DataLoader(rows, batch_size=BATCH_SIZE // n_parts, sampler=sampler)


def batches(rows: Rows, n_parts: int, part: int) -> Iterator[list[Tensor]]:
    """Yield a rank's own rows of three batches."""
    return iter(list(loader(rows, n_parts, part)))


def whole_batches(rows: Rows, n_parts: int) -> Iterator[list[Tensor]]:
    """Yield the rows of all ranks, those of the first part first."""
    for parts in zip(*(loader(rows, n_parts, part) for part in range(n_parts)), strict=True):
        yield [torch.cat(leaves) for leaves in zip(*parts, strict=True)]


def placeholders(pm: PartitionedModel) -> list[str]:
    """Return the arguments of this rank's program."""
    return [str(node.target) for node in pm.graph(rank()).graph.nodes if node.op == "placeholder"]


def data_of(case: Case) -> tuple[Rows, pytree.TreeSpec]:
    many = case.build(batch_size=BATCH_SIZE * N_BATCHES)
    leaves, tree = pytree.tree_flatten((many.args, dict(many.kwargs), many.target))
    return Rows([leaf for leaf in leaves if isinstance(leaf, Tensor)]), tree


def as_call(tree: pytree.TreeSpec, batch: list[Tensor]) -> tuple[Any, Any, Any]:
    """Positional and keyword inputs, and the target."""
    missing = [None] * (tree.num_leaves - len(batch))
    args, kwargs, target = pytree.tree_unflatten([*batch, *missing], tree)
    return args, kwargs, target


def train(n_steps: int, model: nn.Module, step: Any, gradients: Any, state: Any) -> Steps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, history = [], []
    for _ in range(n_steps):
        optimizer.zero_grad()
        losses.append(step().detach().clone())
        history.append({name: None if value is None else value.detach().clone() for name, value in gradients().items()})
        optimizer.step()
    return Steps(tuple(losses), tuple(history), {name: value.detach().clone() for name, value in state().items()})


def training_difference(name: str, mode: Mode, leave_out: bool = False) -> str | None:
    """Compare loss, gradients and weights of three steps with the unpartitioned model on the union of the ranks' rows.

    Args:
        leave_out: let ranks whose stages read no input pass none, and those that compute no loss no target.
    """
    case = case_named(name)
    reference = case.build().model
    rows, tree = data_of(case)
    pm = partitioned(case, case.build(), mode)
    mine, whole = batches(rows, pm.data_parallel_size, pm.data_parallel_rank), whole_batches(rows, pm.data_parallel_size)
    inputs = {leaf.placeholder for leaf in pm.traced.graph.inputs}
    reads = not leave_out or not inputs.isdisjoint(placeholders(pm))
    computes_loss = not leave_out or "target" in placeholders(pm)

    def step() -> Tensor:
        args, kwargs, target = as_call(tree, next(mine))
        given, named = (args, kwargs) if reads else ((), {})
        return pm.train_step(*given, target=target if computes_loss else None, loss_fn=case.loss_fn, **named)

    def reference_step() -> Tensor:
        args, kwargs, target = as_call(tree, next(whole))
        loss = loss_of(case, reference(*args, **kwargs), target)
        loss.backward()
        return loss

    found = train(N_BATCHES, pm, step, pm.full_gradients, pm.full_state_dict)
    expected = train(
        N_BATCHES, reference, reference_step, lambda: {name: each.grad for name, each in reference.named_parameters()}, reference.state_dict
    )
    assert not (leave_out and reads and computes_loss and rank() % 2), "a rank that could leave something out is among these"
    difference = compare(expected, found, case.tolerance)
    return None if difference is None else str(difference)


def call_difference(name: str, mode: Mode) -> str | None:
    """Compare results of local rows; after ``backward()`` of their loss, local gradients of inputs, and mean ones of parameters."""
    case = case_named(name)
    reference = case.build().model
    rows, tree = data_of(case)
    pm = partitioned(case, case.build(), mode)
    own = next(batches(rows, pm.data_parallel_size, pm.data_parallel_rank))
    args, kwargs, target = as_call(tree, [require_gradient(leaf) for leaf in own])
    result = pm(*args, **kwargs)
    loss_of(case, result, target).backward()
    reference_args, reference_kwargs, _ = as_call(tree, [require_gradient(leaf) for leaf in own])
    expected = reference(*reference_args, **reference_kwargs)
    loss_of(case, expected, target).backward()
    difference = compare_values(expected, result, case.tolerance) or compare_gradients(
        gradients_of(reference_args, reference_kwargs), gradients_of(args, kwargs), case.tolerance, "gradient of input "
    )
    reference.zero_grad()
    whole_args, whole_kwargs, whole_target = as_call(tree, next(whole_batches(rows, pm.data_parallel_size)))
    loss_of(case, reference(*whole_args, **whole_kwargs), whole_target).backward()
    found = pm.full_gradients()  # on every rank, also on one that has found a difference
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    difference = difference or compare_gradients(gradients, found, case.tolerance)
    return None if difference is None else str(difference)


def require_gradient(leaf: Tensor) -> Tensor:
    return leaf.detach().clone().requires_grad_(leaf.is_floating_point())


def gradients_of(args: Any, kwargs: Any) -> dict[str, Tensor | None]:
    """Return the gradients of inputs. A target may have a gradient with respect to a loss, too: it has none here."""
    return {str(index): leaf.grad for index, leaf in enumerate(pytree.tree_leaves((args, kwargs))) if leaf.requires_grad}


def check_report(name: str, mode: Mode) -> tuple[bool, str]:
    """Return the report of ``check`` for a whole batch."""
    case = case_named(name)
    instance = case.build()
    report = partitioned(case, instance, mode).check(*instance.args, **instance.kwargs)
    return bool(report), str(report)


def unequal_rows(other: int) -> None:
    """Make two steps of equal rows, then one in which a rank has fewer."""
    case = case_named("perceptron")
    pm = partitioned(case, case.build(), "data")
    for rows in (4, 4, 3 if rank() == other else 4):
        instance = case.build(batch_size=rows)
        pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)


def nothing_where_inputs_are_read(everywhere: bool) -> None:
    """Make a step in which the first rank, or all, pass no input."""
    case = case_named("perceptron")
    instance = case.build()
    pm = partitioned(case, instance, {"data": 2})
    args = () if everywhere or rank() == 0 else instance.args
    pm.train_step(*args, target=instance.target, loss_fn=case.loss_fn)


def rows_that_mix() -> None:
    """Pass a local target for a loss of a matrix over all pairs of rows."""
    model = Similarity().double()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pm = make_partitioned(Instance(model, (x,), {}, None), devices=2, mode="data", inputs="local")
    part = x.chunk(2)[rank()]
    computed = pm.train_step(part, loss_fn=lambda scores, _: nn.functional.cross_entropy(scores, torch.arange(len(scores))))
    torch.testing.assert_close(computed, nn.functional.cross_entropy(model(x), torch.arange(8)))
    pm.train_step(part, target=torch.arange(4), loss_fn=nn.functional.cross_entropy)


class Similarity(nn.Module):
    """Scores of all pairs of rows, as in contrastive training."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self.project = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        features = self.project(x)
        return features @ features.T
