"""Mixtures of experts: every expert computes every token, or each token goes to a place that its expert has for it.

A row of the batch is a group (Lepikhin et al., GShard, 2021): of its tokens an expert takes the first ``capacity`` that chose it, and
what finds no place keeps what it was.
"""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  it defines the operator
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, mean_squared_error, real

grouped_mm = torch.ops.transformers.grouped_mm_fallback
"""The product of transformers 5 for sorted rows, where torch's own (bfloat16 alone, when it is traced) does not fit."""

WayBack = Callable[[Tensor, Tensor, int], Tensor]
"""(order, sorted rows, rows of a token) -> the sum of the rows of each token."""

WIDTH = 6
LENGTH = 5
EXPERTS = 4
CAPACITY = 2


class Mixture(nn.Module):
    """Each token is given to all experts; what its two best do not give is weighed by zero."""

    def __init__(self, experts: int = EXPERTS, inside: int = 10) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, inside) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, inside, WIDTH) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(dim=-1)
        best, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(dim=-1, keepdim=True))
        inside = nn.functional.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        given = torch.einsum("bsef,efd->bsed", inside, self.down)
        return torch.einsum("bsed,bse->bsd", given, weights)


class Routed(nn.Module, ABC):
    """Each token goes to the expert that it scores best; a group at a time, or all rows of the batch as one."""

    def __init__(self, *, one_group: bool = False, inside: int = 10) -> None:
        super().__init__()
        self.one_group = one_group
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, inside) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, inside, WIDTH) / inside**0.5)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.flatten(0, 1).unsqueeze(0) if self.one_group else x
        scores, chosen = self.gate(groups).softmax(dim=-1).max(dim=-1)
        chose = nn.functional.one_hot(chosen, EXPERTS)
        place = (chose.cumsum(dim=1) * chose).sum(dim=-1) - 1
        return (self.computed(groups, chosen, place) * scores.unsqueeze(-1)).view_as(x)

    @abstractmethod
    def computed(self, groups: Tensor, chosen: Tensor, place: Tensor) -> Tensor:
        """Return the experts' results for the tokens."""

    def experts(self, places: Tensor) -> Tensor:
        """Compute the experts on tokens in their places: (group, expert, place, width)."""
        return torch.einsum("gecf,efd->gecd", nn.functional.silu(torch.einsum("gecd,edf->gecf", places, self.up)), self.down)


class RoutedByProducts(Routed):
    """Tokens move in products with ones and zeros, as GShard and Switch write it."""

    def computed(self, groups: Tensor, chosen: Tensor, place: Tensor) -> Tensor:
        expert = nn.functional.one_hot(chosen, EXPERTS).unsqueeze(-1)
        slot = nn.functional.one_hot(place.clamp(max=CAPACITY), CAPACITY + 1)[..., :CAPACITY].unsqueeze(-2)
        goes = (expert * slot).to(groups.dtype)
        return torch.einsum("gsec,gecd->gsd", goes, self.experts(torch.einsum("gsec,gsd->gecd", goes, groups)))


class RoutedByIndex(Routed):
    """Tokens are written to their places and read from there; after the last is one for all without a place."""

    def computed(self, groups: Tensor, chosen: Tensor, place: Tensor) -> Tensor:
        count = EXPERTS * CAPACITY
        slot = torch.where(place < CAPACITY, chosen * CAPACITY + place, count).unsqueeze(-1).expand(-1, -1, WIDTH)
        slots = groups.new_zeros(groups.shape[0], count + 1, WIDTH).scatter(1, slot, groups)
        given = self.experts(slots[:, :count].unflatten(1, (EXPERTS, CAPACITY))).flatten(1, 2)
        return nn.functional.pad(given, (0, 0, 0, 1)).gather(1, slot)


class Dropless(nn.Module):
    """Each token goes to its two best experts, however many tokens they have: sorted by expert, in two products of groups, and back.

    As transformers 5 and torchtitan write it.
    """

    def __init__(self, width: int = WIDTH, *, back: WayBack | None = None, ends: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.best, self.back, self.ends, inside = 2, back or back_by_inverse, ends or ends_by_histogram, 10
        self.gate = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * inside, width) / width**0.5)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * inside))
        self.down = nn.Parameter(torch.randn(EXPERTS, inside, width) / inside**0.5)

    def sort(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts in the order of the rows, and that order."""
        return chosen.sort()

    def hidden(self, y: Tensor) -> Tensor:
        """Map the sorted rows between the two products."""
        return y

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores, chosen = self.gate(tokens).softmax(dim=-1).topk(self.best, dim=-1)
        keys, order = self.sort(chosen.flatten())
        ends = self.ends(keys)
        gate, up = (grouped_mm(tokens[order // self.best], self.up.transpose(1, 2), ends) + self.up_bias[keys]).chunk(2, dim=-1)
        y = grouped_mm(self.hidden(F.silu(gate) * up), self.down, ends) * scores.flatten()[order].unsqueeze(-1)
        return self.back(order, y, self.best).view_as(x)


def back_by_inverse(order: Tensor, y: Tensor, best: int) -> Tensor:
    """Restore the order as transformers does."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return y[inverse].unflatten(0, (-1, best)).sum(1)


def ends_by_histogram(keys: Tensor) -> Tensor:
    """Return the end of each expert's tokens, counted as transformers does."""
    return torch.histc(keys.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)


def chosen_experts(model: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """Return name of each mixture without a capacity -> the tokens that its router sends to each expert."""
    found: dict[str, tuple[int, ...]] = {}

    def count(name: str, mixture: Dropless, tokens: Tensor) -> None:
        chosen = mixture.gate(tokens.flatten(0, 1)).topk(mixture.best, dim=-1).indices
        found[name] = tuple(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist())

    for name, module in model.named_modules():
        if isinstance(module, Dropless):
            module.register_forward_pre_hook(lambda mixture, args, name=name: count(name, mixture, args[0]))
    model(x)
    return found


class Residual(nn.Module):
    """Two mixtures, each after a normalisation, with a residual connection."""

    def __init__(self, mixture: Callable[[], nn.Module] = Mixture) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixtures = nn.ModuleList(mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


def _tokens(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, LENGTH, WIDTH),), {}


def _target(generator: Generator, batch_size: int) -> Tensor:
    return real(generator, batch_size, LENGTH, 3)


CASES = (Case("mixture_of_experts", Residual, _tokens, _target, mean_squared_error),)

DROPLESS = Case("dropless", lambda: Residual(Dropless), _tokens, _target, mean_squared_error)

ROUTED = {
    "products": Case("routed_by_products", lambda: Residual(RoutedByProducts), _tokens, _target, mean_squared_error),
    "index": Case("routed_by_index", lambda: Residual(RoutedByIndex), _tokens, _target, mean_squared_error),
    "one_group": Case(
        "routed_in_one_group",
        lambda: Residual(lambda: RoutedByIndex(one_group=True)),
        _tokens,
        _target,
        mean_squared_error,
        compares_rows=True,
    ),
}
"""How tokens get to their experts: not of the zoo, but cut over the same ranks as the batch."""
