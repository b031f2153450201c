"""Compare what the unpartitioned model gives with what its partitions give, beyond what rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from tests.fuzz.running.precision import margin_of, rounding_of, tolerance_of

REFUSED = "refused"
"""Stands for a kept tensor that cannot be read."""

DRAWS = 6
"""How often noise is drawn for a value that differs by more than the first noise changes.

A normalisation of what rounding leaves of zero amplifies it by any factor: one draw may move such a value by a thousandth of the next.
"""

AS_INFINITE = 1e12
"""Numbers from here on stand for infinity."""


class DifferenceError(AssertionError):
    """Something is not what the unpartitioned model gives."""

    def __init__(self, what: str, detail: str) -> None:
        self.what = what
        self.detail = detail
        super().__init__(f"{what}: {detail}")


def compare_with_noise(
    what: str,
    wanted: Any,
    got: Any,
    index: int,
    allowed: list[list[tuple[str, Any]]],
    draw: Callable[[int], Any],
    largest: float,
    precision: str | None = None,
) -> None:
    """Compare observation ``index``; ``allowed`` has those of each noise so far, and gets more where these do not explain a difference.

    Raises:
        DifferenceError: no noise changes the model's own value as much.
    """
    if any(_is_explained(what, wanted, got, noisy[index][1], largest, precision) for noisy in allowed):
        return
    while len(allowed) < DRAWS:
        allowed.append(draw(len(allowed) + 1))
        if _is_explained(what, wanted, got, allowed[-1][index][1], largest, precision):
            return
    compare(what, wanted, got, allowed[0][index][1], rounding_of(precision) * largest, precision)


def _is_explained(what: str, wanted: Any, got: Any, noisy: Any, largest: float, precision: str | None) -> bool:
    try:
        compare(what, wanted, got, noisy, rounding_of(precision) * largest, precision)
    except DifferenceError:
        return False
    return True


def disturb(values: Sequence[Tensor], noise: float, draw: int = 1) -> None:
    """Change values in place by a relative noise, that of a draw; those that are all zero by as much as if they were one.

    A bias that starts at zero is not zero after the first step: what a normalisation makes of it then is as large as of anything else.
    """
    generator = torch.Generator().manual_seed(draw)
    for value in values:
        if noise and has_gradient(value):
            plain = value.detach()
            scale = plain.abs() if value.any() else torch.ones_like(plain)
            plain.add_(noise * scale * torch.randn(value.shape, generator=generator))


class LargestValue(TorchDispatchMode):
    """Records the largest number that a model computes, backward included.

    Terms that are much larger than their sum leave an error of rounding in it that depends on the order in which they are added.

    Attributes:
        value: its magnitude; numbers that stand for infinity, as masks of attention do, do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and has_gradient(each) and each.numel():
                magnitudes = each.detach().abs()
                self.value = max(self.value, float(magnitudes.masked_fill(~(magnitudes < AS_INFINITE), 0).max()))
        return results


def compare(what: str, wanted: Any, got: Any, noisy: Any = None, rounding: float = 0.0, precision: str | None = None) -> None:
    """Raise DifferenceError where two observations are not equal, beyond what noise changes in the model's own.

    Args:
        noisy: what the disturbed model gives.
        rounding: what another order of additions may change.
        precision: in which both compute.
    """
    if what == "output of another batch" and got is None:
        return
    if what == "buffers after a call":
        got = {name: got[name] for name in wanted if name in got}
    if what.startswith("kept tensors"):
        readable = [name for name, value in got.items() if not isinstance(value, str) or value != REFUSED]
        wanted, got, noisy = ({name: each[name] for name in readable} if each else each for each in (wanted, got, noisy))
    if isinstance(wanted, dict) and isinstance(got, dict):
        if wanted.keys() != got.keys():
            raise DifferenceError(f"names in {what}", f"{sorted(wanted.keys() ^ got.keys())}")
        got = {name: got[name] for name in wanted}
    wanted_leaves, wanted_structure = tree_flatten(wanted)
    got_leaves, got_structure = tree_flatten(got)
    noisy_leaves = tree_flatten(wanted if noisy is None else noisy)[0]
    if wanted_structure != got_structure:
        raise DifferenceError(f"structure of {what}", f"{wanted_structure} and {got_structure}")
    names = list(wanted) if isinstance(wanted, dict) else list(range(len(wanted_leaves)))
    largest = max((_magnitude(each) for each in wanted_leaves if isinstance(each, Tensor) and each.numel()), default=0.0)
    for place, (one, other, changed) in enumerate(zip(wanted_leaves, got_leaves, noisy_leaves, strict=True)):
        _compare_leaf(what, names[place] if place < len(names) else place, one, other, changed, largest, rounding, precision)


def _compare_leaf(what: str, name: Any, wanted: Any, got: Any, noisy: Any, largest: float, rounding: float, precision: str | None) -> None:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        if type(wanted) is not type(got) or wanted != got:
            raise DifferenceError(what, f"{name}: {_short(wanted)} wanted, {_short(got)} got")
        return
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        raise DifferenceError(
            f"shape of {what}", f"{name}: {tuple(wanted.shape)} {wanted.dtype} wanted, {tuple(got.shape)} {got.dtype} got"
        )
    if not wanted.numel():
        return
    allowed = tolerance_of(precision) * (_magnitude(wanted) + 1e-3 * largest) + 1e-14 + rounding
    difference = float((as_real(wanted) - as_real(got)).abs().max())
    if not difference <= allowed and not difference <= allowed + margin_of(precision) * _distance(wanted, noisy):
        raise DifferenceError(what, f"{name}: largest difference {difference:.3e} of {_magnitude(wanted):.3e}")


def has_gradient(value: Tensor) -> bool:
    """Return whether numbers of this type have gradients."""
    return value.is_floating_point() or value.is_complex()


def as_real(value: Tensor) -> Tensor:
    """Return the numbers of a tensor in float64: a bool as 0 or 1, a complex number as two."""
    found = value.detach()
    return torch.view_as_real(found.resolve_conj()).double() if found.is_complex() else found.double()


def _magnitude(value: Tensor) -> float:
    """Return the largest magnitude of a tensor."""
    return float(as_real(value).abs().max())


def _distance(wanted: Tensor, noisy: Any) -> float:
    """Return the largest difference of two finite tensors; 0 where they cannot be compared."""
    if not isinstance(noisy, Tensor) or noisy.shape != wanted.shape:
        return 0.0
    found = float((as_real(wanted) - as_real(noisy)).abs().max())
    return found if math.isfinite(found) else 0.0


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
