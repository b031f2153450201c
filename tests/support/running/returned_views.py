"""Models whose results share memory; the caller writes into them in place, compared with the model."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition

Result = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

RESULTS: dict[str, Result] = {
    "unsqueezed": lambda y, _: (y, y.unsqueeze(0)),
    "columns": lambda y, _: (y[:, 1:3], y),
    "overlapping": lambda y, _: (y[:, :3], y[:, 1:]),
    "apart": lambda y, _: (y[:, :2], y[:, 2:]),
    "strided": lambda y, _: (y[:, ::2], y[:, 1::2]),
    "detached": lambda y, _: (y, y.detach()),
    "same": lambda y, _: (y, y),
    "transposed": lambda y, _: (y.t(), y.t().unflatten(0, (2, 2))),
    "flat": lambda y, _: (y.view(-1), y.view(-1, 2, 2)),
    "halves": lambda y, _: (torch.view_as_complex(y.view(-1, 2, 2)).real, y),
    "input": lambda y, x: (y, x),
    "view_of_an_input": lambda y, x: (y, x.view(-1, 2, 2)),
    "views_of_an_input": lambda y, x: (x[:, 1:] + 0 * y[:, 1:], x[:, :2]),
}
"""Name -> results, of what the layers compute and the input."""

IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda result: result.mul_(3),
    "part": lambda result: result[..., :1].add_(1),
    "fill_": lambda result: result.view(result.shape).zero_(),
}


class Returns(nn.Module):
    def __init__(self, result: Result) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.second(self.first(x).relu()), x)


def example() -> Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def views_differences(name: str, mode: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the in-place operations after which a model and its partition differ, in values, gradients or the caller's input."""
    model = Returns(RESULTS[name])
    pm = partition(model, 2, mode, example_inputs=(example(),), **options)
    return [
        f"{write} of result {place}, {'with' if tracked else 'without'} gradients"
        for write, change in IN_PLACE.items()
        for place in (0, 1)
        for tracked in (False, True)
        if not _equal(_run(model, change, place, tracked), _run(pm, change, place, tracked))
    ]


def _run(model: nn.Module, change: Callable[[Tensor], Any], place: int, tracked: bool) -> list[Tensor | None] | None:
    """Call a model and change one of its results; return all values and gradients, None where autograd refuses the change."""
    leaf = example().requires_grad_(tracked)
    x = leaf * 1  # not a leaf: it may be changed in place
    model.zero_grad()
    with torch.set_grad_enabled(tracked):
        results = model(x)
        try:
            change(results[place])
            if tracked:
                (results[0].pow(2).sum() + results[1].pow(3).sum() + x.pow(2).sum()).backward()
        except (RuntimeError, ValueError):
            return None
    found: list[Tensor | None] = [*(result.detach() for result in results), x.detach(), leaf.grad]
    gradients = model.full_gradients() if isinstance(model, PartitionedModel) else {n: p.grad for n, p in model.named_parameters()}
    return [*found, *(gradients.values() if tracked else ())]


def _equal(expected: list[Tensor | None] | None, actual: list[Tensor | None] | None) -> bool:
    if expected is None or actual is None:
        return expected is actual
    pairs = list(zip(expected, actual, strict=True))
    return all(one is other if one is None or other is None else torch.allclose(one, other, rtol=1e-9, atol=1e-9) for one, other in pairs)
