"""What stands for indices and weights while a loop over chosen experts is traced: objects that torch functions hand to ``ChosenExperts``.

for expert in chosen:                           Expert
    rows, places = torch.where(mask[expert])    Pairs, two of them; or Nothing, if another expert stands for all
    y = x[rows] @ weight[expert]                a plain tensor; WeightOfEach
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from passes.normalize.rows.expert_rows import ChosenExpertsError, expert_rows

__all__ = ["Choice", "Expert", "MaskRow", "Nothing", "Pairs", "StandIn", "WeightOfEach"]


@dataclass(eq=False)
class Choice:
    """Which experts each token has chosen.

    Attributes:
        experts: their numbers, (tokens, choices).
        traced: the number of the expert that stands for all.
        n_classes: how many experts the mask of the choice tells apart; None if it is made for one expert after the other.
        count: how many experts have weights; None: not known yet.
        visited: the numbers of the experts whose tokens the model has asked for.
    """

    experts: Tensor
    traced: int
    n_classes: int | None
    count: int | None = None
    visited: set[int] = field(default_factory=set)

    def visit(self, number: int | None) -> None:
        """Note that the model asks for the tokens of an expert; None: of each of them."""
        self.visited.update(range(self.n_classes or 0) if number is None else (number,))

    @property
    def is_visited(self) -> bool:
        """Whether the model has asked for the tokens of an expert."""
        return bool(self.visited)

    @property
    def group(self) -> Tensor:
        """The expert of each pair of a token and a choice, token by token."""
        group: Tensor = expert_rows(self.experts.reshape(-1))
        return group

    @property
    def may_be_none(self) -> bool:
        """Whether a pair may be of no expert: a mask of as many classes as there are experts has none of these."""
        return self.count is None or self.n_classes != self.count

    def known(self, numbers: Tensor) -> Tensor:
        """Return numbers of experts, with that of some expert for a pair of none."""
        return numbers.clamp(0, (self.count or 1) - 1) if self.may_be_none else numbers

    def without_none(self, rows: Tensor) -> Tensor:
        """Return rows of all pairs with zeros for those of no expert, which a loop does not visit."""
        if not self.may_be_none:
            return rows
        is_none = (self.group < 0) | (self.group >= (self.count or 0))
        return rows.masked_fill(is_none.reshape(-1, *(1,) * (rows.dim() - 1)), 0)

    @property
    def n_choices(self) -> int:
        """How many experts a token chooses."""
        return int(self.experts.shape[1])


class StandIn:
    """An object that is no tensor, and whose methods and operators are those of tensors, as ``dispatch`` computes them.

    Attributes:
        dispatch: takes a torch function and its arguments.
    """

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        self.dispatch = dispatch

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args:
            if isinstance(value, StandIn):
                return value.dispatch(func, *args, **(kwargs or {}))
        raise ChosenExpertsError(f"calls {getattr(func, '__name__', func)} with the experts that tokens chose")

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if method is None or name.startswith("__"):
            raise AttributeError(name)
        if not callable(method):  # a property, as T and shape
            return self.dispatch(method.__get__, self)
        return lambda *args, **kwargs: self.dispatch(method, self, *args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: StandIn, *args: Any) -> Any:
        return self.dispatch(getattr(Tensor, name), self, *args)

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "getitem", "eq", "ne", "gt", "lt"):
    setattr(StandIn, f"__{_name}__", _operator(f"__{_name}__"))
StandIn.__hash__ = object.__hash__  # type: ignore[method-assign]


class Expert(StandIn):
    """The number of an expert of a loop over those that are chosen: of each of them at once.

    Attributes:
        n_dims: of the tensor that it stands for; 1: of one element.
    """

    def __init__(self, dispatch: Callable[..., Any], choice: Choice, n_dims: int) -> None:
        super().__init__(dispatch)
        self.choice, self.n_dims = choice, n_dims

    def __index__(self) -> int:
        return self.choice.traced


class MaskRow(StandIn):
    """The part of a mask that is about one expert.

    Attributes:
        mask: of all experts.
        number: of the expert; None: of each of them.
        dims: what its dimensions are of, "token" and "choice"; in front of them, "one" of size 1.
    """

    def __init__(self, dispatch: Callable[..., Any], choice: Choice, mask: Tensor, number: int | None, dims: tuple[str, ...]) -> None:
        super().__init__(dispatch)
        self.choice, self.mask, self.number, self.dims = choice, mask, number, dims

    def tensor(self) -> Tensor:
        """Return the part itself, for attributes that any tensor has.

        Raises:
            ChosenExpertsError: it is that of each expert.
        """
        if self.number is None:
            raise ChosenExpertsError("asks a mask of the tokens of one expert more than where it is true")
        return torch.select(self.mask, 0, self.number)


class Pairs(StandIn):
    """An index over all pairs of a token and a choice.

    Attributes:
        of: "token" or "choice".
    """

    def __init__(self, dispatch: Callable[..., Any], choice: Choice, of: str) -> None:
        super().__init__(dispatch)
        self.choice, self.of = choice, of

    @property
    def shape(self) -> tuple[int, ...]:
        """One element a pair."""
        return (self.choice.experts.shape[0] * self.choice.n_choices,)

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        """Return the number of pairs."""
        return self.shape[0]

    def size(self, dim: int | None = None) -> Any:
        """Return the sizes, as ``Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]


class Nothing(StandIn):
    """An index of no rows, and all that is computed with it: another expert stands for all of them."""

    shape = (0,)

    def __len__(self) -> int:
        return 0

    def numel(self) -> int:
        """Return zero elements."""
        return 0

    def size(self, dim: int | None = None) -> Any:
        """Return the sizes, as ``Tensor.size``."""
        return self.shape if dim is None else 0


class WeightOfEach(StandIn):
    """A weight of each expert.

    Attributes:
        stacked: those of all experts, which are its first dimension.
        is_transposed: whether the matrix of an expert is the transpose of its part of ``stacked``.
        n_leading: how many dimensions of size 1 stand in front.
    """

    def __init__(
        self, dispatch: Callable[..., Any], choice: Choice, stacked: Tensor, *, is_transposed: bool = False, n_leading: int = 0
    ) -> None:
        super().__init__(dispatch)
        self.choice, self.stacked, self.is_transposed, self.n_leading = choice, stacked, is_transposed, n_leading

    @property
    def dtype(self) -> torch.dtype:
        """That of all experts."""
        return self.stacked.dtype

    @property
    def device(self) -> torch.device:
        """That of all experts."""
        return self.stacked.device

    @property
    def shape(self) -> tuple[int, ...]:
        """That of one expert's."""
        sizes = tuple(self.stacked.shape[1:])
        return (1,) * self.n_leading + (tuple(reversed(sizes)) if self.is_transposed else sizes)
