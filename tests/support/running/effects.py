"""Models whose forward does more than return: it writes into its arguments; compared with the model over several calls."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.torch_private import pytree

How = Literal["no_grad", "backward", "train_step"]


class Writes(nn.Module):
    """Two layers, of which a function writes into the second argument."""

    def __init__(self, write: Callable[[Writes, Tensor, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()
        self.write = write

    def forward(self, x: Tensor, state: Any) -> Any:
        return self.write(self, x, state)


def _slice(model: Writes, x: Tensor, cache: Tensor) -> Tensor:
    cache[:, 1:3] = model.first(x)[:, :2]
    return model.second(cache).sum(1)


def _returned(model: Writes, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    cache.add_(model.first(x))
    return cache, model.second(x)


def _by_index(model: Writes, x: Tensor, cache: Tensor) -> Tensor:
    cache.index_put_((torch.tensor([0, 1]), torch.tensor([2, 0])), model.first(x)[0, :2])
    return model.second(x) + cache.sum()


def _through_a_view(model: Writes, x: Tensor, cache: Tensor) -> Tensor:
    cache.view(-1, 8)[::2].copy_(model.first(x).view(-1, 8)[::2])
    return model.second(x)


def _after_a_copy(model: Writes, x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    before = cache.clone()[:, :1]
    cache.add_(1)
    return model.second(x), before


def _nested(model: Writes, x: Tensor, state: dict[str, Any]) -> Tensor:
    state["keys"].add_(model.first(x))
    state["steps"][0].add_(1)
    return model.second(state["keys"]) * state["steps"][0]


def _mean_of_rows(model: Writes, x: Tensor, total: Tensor) -> Tensor:
    total.add_(x.mean((0, 1)))
    return model.second(x) + total


def _without_gradient(model: Writes, x: Tensor, cache: Tensor) -> Tensor:
    with torch.no_grad():
        cache.copy_(model.first(x))
    return model.second(x) + cache


def _zeros() -> Tensor:
    return torch.zeros(4, 3, 8, dtype=torch.float64)


WRITES: dict[str, tuple[Callable[[Writes, Tensor, Any], Any], Callable[[], Any]]] = {
    "slice": (_slice, _zeros),
    "returned": (_returned, _zeros),
    "by_index": (_by_index, _zeros),
    "through_a_view": (_through_a_view, _zeros),
    "after_a_copy": (_after_a_copy, _zeros),
    "nested": (_nested, lambda: {"keys": _zeros(), "steps": [torch.zeros(1, dtype=torch.long)]}),
    "mean_of_rows": (_mean_of_rows, lambda: torch.zeros(8, dtype=torch.float64)),
    "without_gradient": (_without_gradient, _zeros),
    "transposed": (_returned, lambda: torch.zeros(4, 8, 3, dtype=torch.float64).transpose(1, 2)),
    "part_of_a_tensor": (_slice, lambda: torch.zeros(4, 3, 16, dtype=torch.float64)[..., 8:]),
}
"""Name -> what forward does, and its second argument."""


def writes_difference(name: str, how: How, devices: int, mode: Any, options: Mapping[str, Any]) -> str | None:
    """Return the first difference between a model and its partition over two calls; None if there is none."""
    write, state = WRITES[name]
    model = Writes(write)
    pm = partition(model, devices, mode, example_inputs=(_zeros(), state()), **options)
    pairs = zip(_run(model, how, state()), _run(pm, how, state()), strict=True)
    for place, (expected, actual) in enumerate(pairs):
        if expected.shape != actual.shape or not torch.allclose(expected, actual, rtol=1e-9, atol=1e-9):
            return f"{name}, {mode}, {how}: value {place} is {actual.flatten()[:3]}, and the model's {expected.flatten()[:3]}"
    return None


def _run(model: nn.Module, how: How, state: Any) -> list[Tensor]:
    """Call a model twice; return its results, gradients, and what it left in the caller's tensors."""
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    for _ in range(2):
        x = torch.randn(4, 3, 8, dtype=torch.float64, generator=generator)
        if how == "no_grad":
            with torch.no_grad():
                result = model(x, state)
            found += [torch.tensor([leaf is kept for leaf in tensors_of(result) for kept in tensors_of(state)]).double()]
        elif how == "backward" or not isinstance(model, PartitionedModel):
            result = model(x.requires_grad_(), state)
            loss = _loss(result, None)
            kept = [leaf for leaf in tensors_of(state) if leaf.requires_grad] if how == "backward" else []
            (loss + sum(leaf.pow(3).sum() for leaf in kept)).backward()
            found += [loss.detach()]
        else:
            found += [model.train_step(x, state, target=torch.zeros(4), loss_fn=_loss)]
            result = None
        found += [] if how == "train_step" else [leaf.detach() for leaf in tensors_of(result)]
        state = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach(), state)
        found += [leaf.double().clone() for leaf in tensors_of(state)]
    gradients = model.full_gradients() if isinstance(model, PartitionedModel) else {n: p.grad for n, p in model.named_parameters()}
    return [*found, *(gradient for gradient in gradients.values() if gradient is not None)]


def _loss(result: Any, _target: Any) -> Tensor:
    return torch.stack([leaf.pow(2).mean() for leaf in tensors_of(result) if leaf.is_floating_point()]).sum()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested value."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


class Leaves(nn.Module):
    """Blocks that leave tensors, sizes and numbers in attributes, lists and dicts."""

    def __init__(self, n_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(LeavingBlock() for _ in range(n_blocks))
        self.mixed: Tensor | None = None
        self.last: dict[str, Any] = {}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.mixed = (x.mean((0, 1)) ** 2).sum()
        self.last = {"x": x, "pair": (x.sum(-1), 3)}
        return x.mean(1)


class LeavingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.aux: Tensor | None = None
        self.maps: list[Tensor] = []
        self.stats: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.inner(x) @ x.transpose(1, 2), -1)
        self.aux = weights.pow(2).mean()
        self.maps.append(weights.detach())
        self.stats["rows"], self.stats["twice"], self.stats["kind"] = x.shape[0], x * 2, "self"
        return x + self.outer(weights @ x)


def left_difference(how: How, devices: int, mode: Any, options: Mapping[str, Any], with_mixed: bool = False) -> str | None:
    """Return the first difference in what a model and its partition leave in attributes, and in gradients through it."""
    model = Leaves()
    pm = partition(model, devices, mode, example_inputs=(torch.zeros(4, 3, 8, dtype=torch.float64),), **options)
    for place, (expected, actual) in enumerate(zip(_left(model, how, with_mixed), _left(pm, how, with_mixed), strict=True)):
        if expected.shape != actual.shape or not torch.allclose(expected, actual, rtol=1e-9, atol=1e-9):
            return f"{mode}, {how}: value {place} is {actual.flatten()[:3]}, and the model's {expected.flatten()[:3]}"
    return None


def _left(model: Any, how: How, with_mixed: bool) -> list[Tensor]:
    """Call a model twice; return what it has left, losses that read it, and gradients."""
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []

    def loss_of(result: Tensor, target: Tensor) -> Tensor:
        total = nn.functional.mse_loss(result, target) + model.mixed if with_mixed else nn.functional.mse_loss(result, target)
        return total + torch.stack([block.aux for block in model.blocks]).sum()

    for _ in range(2):
        x, target = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((4, 3, 8), (4, 8)))
        if how == "train_step" and isinstance(model, PartitionedModel):
            found.append(model.train_step(x, target=target, loss_fn=loss_of))
            continue
        with torch.set_grad_enabled(how != "no_grad"):
            result = model(x)
        loss = loss_of(result, target) + (0 if how == "train_step" else model.blocks[0].stats["twice"].mean())
        if how != "no_grad":
            loss.backward()
        found.append(loss.detach())
        if how != "train_step":
            left = [(block.aux, block.maps, block.stats) for block in model.blocks]
            found += [leaf.detach().clone() for leaf in tensors_of((left, model.last))]
            found.append(torch.tensor([block.stats["rows"] + len(block.maps) + len(block.stats) for block in model.blocks]))
    gradients = model.full_gradients() if isinstance(model, PartitionedModel) else {n: p.grad for n, p in model.named_parameters()}
    return [*found, *(gradient for gradient in gradients.values() if gradient is not None)]
