"""Work of a device: products, bytes of memory traffic, kernels. Numbers, or formulas in the batch symbol.

A matrix product, and the names of its sizes:

                inner                columns                     columns
           +-----------+          +-----------+               +-----------+
    rows   |           |   @      |           | inner    =    |           | rows          ``batch`` times, independently
           +-----------+          +-----------+               +-----------+
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

from cost_models.ops.call import at_numbers
from passes.ir.tensor_spec import Size
from passes.rules.call import Call

Family = Literal["matrix product", "convolution", "attention", "recurrent", "normalisation", "reduction", "pointwise", "movement", "other"]
"""Operations whose kernels are alike: what an efficiency is known for."""

Half = Literal["forward", "backward_input", "backward_weight"]
"""Part of an operation's work: its own, or the gradients of its activations or of its parameters."""


Gradients: TypeAlias = tuple[tuple[str, str], ...]
"""Arguments of a call whose gradients the backward computes, each ``"activation"`` or ``"weight"``: which half computes it."""


class Values(Protocol):
    """Evaluation of formulas: ``cost_models.formulas.symbols.Numbers``."""

    def __getitem__(self, size: Size, /) -> float:
        """Return the value of a formula."""


@dataclass(frozen=True)
class Product:
    """A batch of matrix products, as drawn above; a convolution is one over unfolded windows.

    Attributes:
        computed: the part that kernels compute: those of attention leave out what a causal mask hides, which FLOPs count by convention.
    """

    batch: Size
    rows: Size
    columns: Size
    inner: Size
    computed: float = 1.0

    @property
    def flops(self) -> Size:
        """A multiplication and an addition count as two."""
        return 2 * self.batch * self.rows * self.columns * self.inner


def flops_of(products: tuple[Product, ...]) -> Size:
    """Return the sum of the FLOPs of products."""
    return sum((product.flops for product in products), start=0)


@dataclass(frozen=True)
class Work:
    """Work of a device.

    Attributes:
        flops: floating-point operations of products; all other arithmetic counts none.
        bytes: memory traffic, read and written.
        launches: kernels.
        family: what kind of operation it is.
        products: what the FLOPs are made of, where it is known.
        call: what is called, for models that measure; None for work of several calls.
        half: which part of the call's work it is.
        gradients: that the backward of the call computes, where it is one of a model that trains: each half becomes several calls then.
        beside: memory traffic of kernels beside those of products, which arithmetic does not overlap: gradients of biases are sums.
        then: work of kernels that run after these and have another limit: small ones take as long as their starts.
    """

    flops: Size
    bytes: Size
    launches: int
    family: Family = "other"
    products: tuple[Product, ...] = ()
    call: Call | None = field(default=None, repr=False)
    half: Half = "forward"
    gradients: Gradients = ()
    beside: Size = 0
    then: tuple[Work, ...] = ()

    def __add__(self, other: Work) -> Work:
        family = self.family if other.launches == 0 or self.flops else other.family
        return Work(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.launches + other.launches,
            family,
            self.products + other.products,
            beside=self.beside + other.beside,
            then=self.then + other.then,
        )

    @staticmethod
    def of_kernels(size: Size, passes: int, launches: int) -> Work:
        """Return the work of pointwise kernels: some pass over ``size`` bytes, about twice each, and the others are small."""
        n_large = min(launches, -(-passes // 2))
        small = (Work(0, 0, launches - n_large, "pointwise"),) if 0 < n_large < launches else ()
        return Work(0, size * passes, n_large or launches, "pointwise", then=small)

    def at(self, values: Values, share: float = 1.0) -> Work:
        """Return the work in numbers.

        Args:
            values: gives the batch symbol its number.
            share: the part of the work that is meant, of a graph whose batch is no symbol. Rows of products shrink with it.
        """
        products = tuple(
            replace(each, batch=values[each.batch], rows=values[each.rows] * share, columns=values[each.columns], inner=values[each.inner])
            for each in self.products
        )
        call = at_numbers(self.call, values) if self.call is not None and share == 1 else None
        flops, moved, beside = (values[each] * share for each in (self.flops, self.bytes, self.beside))
        return replace(self, flops=flops, bytes=moved, products=products, call=call, beside=beside)


NO_WORK = Work(0, 0, 0)
"""Work of a view, or of an unused gradient."""
