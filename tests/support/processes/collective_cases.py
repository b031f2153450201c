"""Collectives with what they must give, from whole tensors that are cut by ``torch.split`` and summed by ``torch.sum``.

All numbers are small integers, so that sums are exact in every dtype and any order. Run in one process by
``tests/partitioner/runtime/test_collectives.py`` and in several by ``tests/end_to_end/processes/test_torchrun.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from passes.ir.comm.primitives import all_gather, all_reduce, all_to_all, reduce_scatter

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class Part:
    """Part of one rank of the group in a case.

    Attributes:
        tensors: what it gives.
        keywords: what else it passes, besides the group.
        expected: what it gets.
    """

    tensors: Sequence[Tensor]
    keywords: dict[str, Any]
    expected: Sequence[Tensor]


@dataclass(frozen=True)
class CollectiveCase:
    """A collective of any number of ranks.

    Attributes:
        name: says what is special about it.
        function: the collective.
        parts: number of ranks -> what each one does.
    """

    name: str
    function: Callable[..., Any]
    parts: Callable[[int], list[Part]]


def numbers(seed: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw integers from 0 to 7, in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 8, tuple(shape), generator=generator)
    return torch.complex(drawn.double(), drawn.double() + 1).to(dtype) if dtype.is_complex else drawn.to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """Return the same values in memory that is not contiguous."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor.repeat_interleave(2)[::2]


def unlike(n_ranks: int) -> tuple[int, ...]:
    """Return different sizes of pieces; the last of four is empty."""
    return (4, 1, 3, 0)[:n_ranks]


# -- what each rank gives and gets -----------------------------------------------------------------------------------------------------


def reduced(
    n_ranks: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    operation: str | None = None,
    change: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
) -> list[Part]:
    given = [given_by(rank, shapes, dtypes, change) for rank in range(n_ranks)]
    function: Any = {None: torch.sum, "sum": torch.sum, "max": torch.amax, "min": torch.amin}[operation]
    stacked = [torch.stack([tensors[index] for tensors in given]) for index in range(len(shapes))]
    expected = [function(whole, 0).to(whole.dtype) for whole in stacked]
    return [Part(tensors, {} if operation is None else {"operation": operation}, expected) for tensors in given]


def given_by(rank: int, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [change(numbers(10 * rank + i, shape, dtype)) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]


def gathered(wholes: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Sequence[int] | None] | None, n_ranks: int) -> list[Part]:
    cuts = [cut(whole, dim, None if sizes is None else sizes[i], n_ranks) for i, (whole, dim) in enumerate(zip(wholes, dims, strict=True))]
    keywords = {"dims": tuple(dims), **({} if sizes is None else {"sizes": tuple(sizes)})}
    return [Part([parts[rank] for parts in cuts], keywords, wholes) for rank in range(n_ranks)]


def scattered(
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    sizes: Sequence[Sequence[int] | None] | None,
    n_ranks: int,
    dtypes: Sequence[torch.dtype],
    change: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
) -> list[Part]:
    given = [given_by(rank, shapes, dtypes, change) for rank in range(n_ranks)]
    sums = [torch.stack([tensors[index] for tensors in given]).sum(0).to(dtypes[index]) for index in range(len(shapes))]
    cuts = [cut(whole, dim, None if sizes is None else sizes[i], n_ranks) for i, (whole, dim) in enumerate(zip(sums, dims, strict=True))]
    keywords = {"dims": tuple(dims), **({} if sizes is None else {"sizes": tuple(sizes)})}
    return [Part(given[rank], keywords, [parts[rank] for parts in cuts]) for rank in range(n_ranks)]


def resharded(
    wholes: Sequence[Tensor],
    split_dims: Sequence[int],
    concat_dims: Sequence[int],
    n_ranks: int,
    split_sizes: Sequence[Sequence[int] | None] | None = None,
    concat_sizes: Sequence[Sequence[int] | None] | None = None,
) -> list[Part]:
    """Return each whole, cut along ``concat_dims`` before and along ``split_dims`` afterwards."""
    before = [
        cut(w, dim, None if concat_sizes is None else concat_sizes[i], n_ranks)
        for i, (w, dim) in enumerate(zip(wholes, concat_dims, strict=True))
    ]
    after = [
        cut(w, dim, None if split_sizes is None else split_sizes[i], n_ranks)
        for i, (w, dim) in enumerate(zip(wholes, split_dims, strict=True))
    ]
    keywords: dict[str, Any] = {"split_dims": tuple(split_dims), "concat_dims": tuple(concat_dims)}
    keywords |= {} if split_sizes is None else {"split_sizes": tuple(split_sizes)}
    keywords |= {} if concat_sizes is None else {"concat_sizes": tuple(concat_sizes)}
    return [Part([parts[rank] for parts in before], keywords, [parts[rank] for parts in after]) for rank in range(n_ranks)]


def routed(n_ranks: int) -> list[Part]:
    """Return blocks of different sizes from rank r to rank s, as a mixture of experts routes tokens."""
    blocks = [[numbers(10 * r + s, ((3 * r + 2 * s) % 4, 5)) for s in range(n_ranks)] for r in range(n_ranks)]
    return [
        Part(
            [torch.cat(blocks[rank])],
            {
                "split_dims": (0,),
                "concat_dims": (0,),
                "split_sizes": (tuple(len(block) for block in blocks[rank]),),
                "concat_sizes": (tuple(len(blocks[other][rank]) for other in range(n_ranks)),),
            },
            [torch.cat([blocks[other][rank] for other in range(n_ranks)])],
        )
        for rank in range(n_ranks)
    ]


def cut(whole: Tensor, dim: int, sizes: Sequence[int] | None, n_ranks: int) -> list[Tensor]:
    return list(torch.chunk(whole, n_ranks, dim) if sizes is None else torch.split(whole, list(sizes), dim))


def total(n_ranks: int) -> int:
    return sum(unlike(n_ranks))


CASES: tuple[CollectiveCase, ...] = (
    CollectiveCase("one_tensor", all_reduce, lambda n: reduced(n, [(5, 3)], [torch.float32])),
    CollectiveCase("every_dtype", all_reduce, lambda n: reduced(n, [(7,)] * len(DTYPES), DTYPES)),
    CollectiveCase("no_dimension_and_empty", all_reduce, lambda n: reduced(n, [(), (0, 3), (2,)], [torch.float64] * 3)),
    CollectiveCase("maximum", all_reduce, lambda n: reduced(n, [(5, 3), (4,)], [torch.float32, torch.int64], "max")),
    CollectiveCase("minimum", all_reduce, lambda n: reduced(n, [(5, 3), (4,)], [torch.bfloat16, torch.int16], "min")),
    CollectiveCase("strided", all_reduce, lambda n: reduced(n, [(40, 3), (9,)], [torch.float32, torch.int64], None, strided)),
    CollectiveCase("large", all_reduce, lambda n: reduced(n, [(300, 1000), (7,)], [torch.float32, torch.float32])),
    CollectiveCase("one_on_first_dimension", all_gather, lambda n: gathered([numbers(0, (3 * n, 4))], [0], None, n)),
    CollectiveCase("large", all_gather, lambda n: gathered([numbers(0, (300 * n, 1000))], [0], None, n)),
    CollectiveCase("one_on_last_dimension", all_gather, lambda n: gathered([numbers(0, (4, 3 * n))], [-1], None, n)),
    CollectiveCase("leading_ones", all_gather, lambda n: gathered([numbers(0, (1, 3 * n, 4))], [1], None, n)),
    CollectiveCase("strided", all_gather, lambda n: gathered([strided(numbers(0, (3 * n, 4)))], [0], None, n)),
    CollectiveCase(
        "every_dtype",
        all_gather,
        lambda n: gathered([numbers(i, (2 * n, 3), dtype) for i, dtype in enumerate(DTYPES)], [0] * len(DTYPES), None, n),
    ),
    CollectiveCase("truths", all_gather, lambda n: gathered([numbers(0, (2 * n, 3)) > 3], [0], None, n)),
    CollectiveCase(
        "channels_last",
        all_gather,
        lambda n: gathered([numbers(0, (2 * n, 4, 3, 2)).contiguous(memory_format=torch.channels_last)], [0], None, n),
    ),
    CollectiveCase("strided_line", all_gather, lambda n: gathered([strided(numbers(0, (3 * n,)))], [0], None, n)),
    CollectiveCase(
        "several_dimensions", all_gather, lambda n: gathered([numbers(i, (2 * n, 4 * n, n)) for i in range(3)], [0, 1, 2], None, n)
    ),
    CollectiveCase("uneven", all_gather, lambda n: gathered([numbers(0, (total(n), 3))], [0], [unlike(n)], n)),
    CollectiveCase("uneven_inside", all_gather, lambda n: gathered([numbers(0, (3, total(n), 2))], [1], [unlike(n)], n)),
    CollectiveCase(
        "uneven_and_even",
        all_gather,
        lambda n: gathered(
            [numbers(0, (total(n), 3)), numbers(1, (2, n)), numbers(2, (2, total(n)), torch.int64)],
            [0, 1, -1],
            [unlike(n), None, unlike(n)[::-1]],
            n,
        ),
    ),
    CollectiveCase("one_on_first_dimension", reduce_scatter, lambda n: scattered([(3 * n, 4)], [0], None, n, [torch.float32])),
    CollectiveCase("strided_line", reduce_scatter, lambda n: scattered([(3 * n,)], [0], None, n, [torch.float32], strided)),
    CollectiveCase("one_on_last_dimension", reduce_scatter, lambda n: scattered([(4, 3 * n)], [1], None, n, [torch.float32])),
    CollectiveCase("strided", reduce_scatter, lambda n: scattered([(3 * n, 4)], [0], None, n, [torch.float32], strided)),
    CollectiveCase("every_dtype", reduce_scatter, lambda n: scattered([(n, 2)] * len(DTYPES), [0] * len(DTYPES), None, n, DTYPES)),
    CollectiveCase(
        "uneven_and_even",
        reduce_scatter,
        lambda n: scattered([(total(n), 3), (2, n), (2, total(n))], [0, 1, -1], [unlike(n), None, unlike(n)[::-1]], n, [torch.float32] * 3),
    ),
    CollectiveCase("uneven", reduce_scatter, lambda n: scattered([(total(n), 3)], [0], [unlike(n)], n, [torch.float64])),
    CollectiveCase("rows_to_columns", all_to_all, lambda n: resharded([numbers(0, (2 * n, 3 * n))], [1], [0], n)),
    CollectiveCase("columns_to_rows", all_to_all, lambda n: resharded([numbers(0, (2 * n, 3 * n))], [0], [-1], n)),
    CollectiveCase("heads_to_sequence", all_to_all, lambda n: resharded([numbers(0, (2, n, 3 * n, 4))], [2], [1], n)),
    CollectiveCase(
        "uneven",
        all_to_all,
        lambda n: resharded([numbers(0, (total(n), total(n) + 1))], [1], [0], n, [(*unlike(n)[:-1], unlike(n)[-1] + 1)], [unlike(n)]),
    ),
    CollectiveCase(
        "several_dtypes",
        all_to_all,
        lambda n: resharded([numbers(i, (2 * n, n), dtype) for i, dtype in enumerate(DTYPES)], [1] * len(DTYPES), [0] * len(DTYPES), n),
    ),
    CollectiveCase("tokens_to_experts", all_to_all, routed),
)
