"""Rules of calls, compared with hand-written lines."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch._ops import OpOverload

from passes.rules.loops import Dimension, Factor, LocalCall, Loops
from passes.rules.ops.shape import refine
from passes.rules.registry import loops_of
from passes.rules.validate import call_node
from tests.support.samples.rule_samples_values import flags, real, whole

aten: Any = torch.ops.aten


def text(loops: Loops | None) -> str:
    """Return the loops of one call as a line of the language, with a mark on every factor that has one."""
    assert loops is not None

    def name(number: int) -> str:
        factor = loops.factors[number]
        return factor.name + {None: "", "whole": "!"}.get(factor.reduction, f":{factor.reduction}")

    def term(dimensions: tuple[Dimension, ...], operand: int | None = None) -> str:
        names = [" ".join(name(each) for each in dimension) for dimension in dimensions]
        for window in loops.windows:
            if window.operand == operand and window.factor is not None:
                names[window.dimension] = f"{name(window.factor)}~"
        return " ".join(f"({each})" if len(dimension) > 1 else each or "1" for each, dimension in zip(names, dimensions, strict=True))

    operands = [
        ("+" if number in loops.added else "") + ("_" if number in loops.unread else term(dimensions, number))
        for number, dimensions in enumerate(loops.operands)
    ]
    return f"{', '.join(operands)} -> {', '.join(map(term, loops.results))}"


def line(operator: OpOverload, *args: Any, **kwargs: Any) -> str:
    return text(loops_of(call_node(operator, *args, **kwargs)))


def test_contractions() -> None:
    assert line(aten.linear.default, real(2, 3, 4), real(5, 4), real(5)) == "batch0 batch1 in:sum, out in:sum, +out -> batch0 batch1 out"
    assert line(aten.linear.default, real(3, 4), real(5, 4)) == "batch in:sum, out in:sum -> batch out"
    assert line(aten.matmul.default, real(2, 3, 4), real(4, 5)) == "batch rows in:sum, in:sum columns -> batch rows columns"
    assert line(aten.addmm.default, real(5), real(3, 4), real(4, 5)) == "+columns, rows in:sum, in:sum columns -> rows columns"
    assert line(aten.einsum.default, "bi,ij->b", [real(2, 3), real(3, 4)]) == "dim_b dim_i:sum, dim_i:sum dim_j:sum -> dim_b"


def test_attention() -> None:
    query, key = real(2, 6, 4, 8), real(2, 3, 5, 8)
    assert (
        line(aten.scaled_dot_product_attention.default, query, key, key, real(4, 5), enable_gqa=True)
        == "batch (heads group) queries qk!, batch heads keys! qk!, batch heads keys! head, queries keys! -> "
        "batch (heads group) queries head"
    )
    assert (
        line(aten.scaled_dot_product_attention.default, query, query, query, None, 0.0, True)
        == "batch heads queries! qk!, batch heads keys! qk!, batch heads keys! head -> batch heads queries! head"
    )


def test_convolutions_and_normalisations() -> None:
    image = real(2, 4, 6, 6)
    assert (
        line(aten.conv2d.default, image, real(8, 4, 3, 3), real(8))
        == "batch channels_in:sum height~ width~, channels_out channels_in:sum kernel_height! kernel_width!, +channels_out -> "
        "batch channels_out height width"
    )
    assert (
        line(aten.conv2d.default, image, real(8, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], 2)
        == "batch (groups channels_in:sum) height~ width~, (groups channels_out) channels_in:sum kernel_height! kernel_width! -> "
        "batch (groups channels_out) height width"
    )
    assert line(aten.group_norm.default, real(2, 4, 3), 2) == "batch (groups channels!) space! -> batch (groups channels!) space!"
    statistics = [real(4), real(4), real(4), real(4).abs()]
    assert (
        line(aten.batch_norm.default, image, *statistics, True, 0.1, 1e-5, False)
        == "batch! channels space0! space1!, channels, channels, channels, channels -> batch! channels space0! space1!"
    )
    assert (
        line(aten.batch_norm.default, image, *statistics, False, 0.1, 1e-5, False)
        == "batch channels space0 space1, channels, channels, channels, channels -> batch channels space0 space1"
    )
    assert (
        line(aten.layer_norm.default, real(2, 3, 4), [4], real(4), real(4))
        == "batch0 batch1 features!, features!, features! -> batch0 batch1 features!"
    )
    assert line(aten.embedding.default, real(9, 4), whole(9, 2, 3)) == "vocab! embedding, batch0 batch1 -> batch0 batch1 embedding"


def test_losses() -> None:
    scores, probabilities = real(4, 5), torch.rand(4, 5, dtype=torch.float64)
    assert line(aten.cross_entropy_loss.default, scores, whole(5, 4)) == "batch! classes!, batch! -> "
    assert line(aten.cross_entropy_loss.default, scores, whole(5, 4), None, 2) == "batch:sum classes!, batch:sum -> "
    assert line(aten.cross_entropy_loss.default, scores, whole(5, 4), None, 0) == "batch classes!, batch -> batch"
    assert line(aten.cross_entropy_loss.default, scores, probabilities) == "batch:mean classes!, batch:mean classes! -> "
    assert line(aten.mse_loss.default, scores, probabilities) == "dim0:mean dim1:mean, dim0:mean dim1:mean -> "


def test_views_and_pieces() -> None:
    assert line(aten.view.default, real(2, 3, 8), [6, 2, 4]) == "dim0 dim1 (dim2 dim3) -> (dim0 dim1) dim2 dim3"
    assert line(aten.view.default, real(4, 6, 5), [6, 4, 5]) == "(dim0 dim1!) dim3! dim5 -> (dim0 dim2!) dim4! dim5"
    assert line(aten.expand.default, real(3, 1), [4, 3, 5]) == "dim1 1 -> dim0 dim1 dim2"
    assert line(aten.chunk.default, real(2, 12), 3, 1) == "dim0 (pieces! dim1) -> dim0 dim1, dim0 dim1, dim0 dim1"
    assert line(aten.split_with_sizes.default, real(2, 12), [8, 4], 1) == "dim0 (pieces0! dim1) -> dim0 (pieces1! dim1), dim0 dim1"
    assert line(aten.cat.default, [real(2, 4), real(2, 8)], 1) == "dim0 dim1, dim0 (pieces2! dim1) -> dim0 (pieces0! dim1)"
    assert line(aten.cat.default, [real(2, 4), real(2, 5)], 1) == "dim0 dim1!, dim0 dim1! -> dim0 dim1!"
    assert line(aten.slice.Tensor, real(2, 12), 1, 4, 8) == "dim0 (pieces! dim1) -> dim0 dim1"
    assert line(aten.slice.Tensor, real(2, 12), 1, 1, None, 2) == "dim0 (dim1 step!) -> dim0 dim1"
    assert line(aten.slice.Tensor, real(2, 12), 1, 1, 12) == "dim0 dim1~ -> dim0 dim1"
    assert line(aten.slice.Tensor, real(2, 12), 1, 0, 12) == "dim0 dim1 -> dim0 dim1"
    assert line(aten.repeat.default, real(2, 3), [4, 1, 2]) == "dim1 dim2 -> copies0 dim1 (copies2 dim2)"
    assert line(aten.squeeze.dim, real(2, 3), 1) == "dim0 dim1! -> dim0 dim1!"
    assert line(aten.new_zeros.default, real(2), [3, 4]) == "_ -> dim0 dim1"


def test_reductions_and_indices() -> None:
    assert line(aten.sum.dim_IntList, real(2, 3), [1]) == "dim0 dim1:sum -> dim0"
    assert line(aten.mean.dim, real(2, 3), [0], True) == "dim0:mean dim1 -> 1 dim1"
    assert line(aten.amax.default, real(2, 3), [1]) == "dim0 dim1:max -> dim0"
    assert line(aten.all.default, flags(2, 3)) == "dim0:min dim1:min -> "
    assert line(aten.max.dim, real(2, 3), 1) == "dim0 dim1! -> dim0, dim0"
    assert line(aten.softmax.int, real(2, 3), -1) == "dim0 dim1! -> dim0 dim1!"
    assert line(aten.gather.default, real(2, 3), 1, whole(3, 2, 5)) == "dim0 dim1!, dim0 picks -> dim0 picks"
    assert line(aten.index.Tensor, real(2, 3, 4), [None, whole(3, 5)]) == "dim0 dim1! dim2, picks0 -> dim0 picks0 dim2"
    assert line(aten.index_add.default, real(9, 4), 0, whole(9, 5), real(5, 4)) == "+dim0! dim1, picks:sum, picks:sum dim1 -> dim0! dim1"
    assert line(aten.one_hot.default, whole(3, 2), 4) == "dim0 -> dim0 classes!"


@pytest.mark.parametrize(
    ("operator", "args", "linear"),
    [
        (aten.linear.default, (real(3, 4), real(5, 4), real(5)), [{0, 2}, {1, 2}]),
        (aten.add.Tensor, (real(3), real(3)), [{0, 1}]),
        (aten.add.Tensor, (real(3), 1.0), []),
        (aten.mul.Tensor, (real(3), real(3)), [{0}, {1}]),
        (aten.mul.Tensor, (real(3), 2.0), [{0}]),
        (aten.div.Tensor, (real(3), real(3)), [{0}]),
        (aten.where.self, (flags(3), real(3), real(3)), [{1, 2}]),
        (aten.masked_fill.Scalar, (real(3), flags(3), 0.0), [{0}]),
        (aten.masked_fill.Scalar, (real(3), flags(3), -1.0), []),
        (aten.view.default, (real(6), [2, 3]), [{0}]),
        (aten.cat.default, ([real(3), real(3)],), [{0, 1}]),
        (aten.to.dtype, (real(3), torch.int64), []),
        (aten.dropout.default, (real(3), 0.5, True), []),
        (aten.dropout.default, (real(3), 0.5, False), [{0}]),
        (aten.gelu.default, (real(3),), []),
        (aten.pow.Tensor_Scalar, (real(3), 2), []),
    ],
)
def test_linearity(operator: OpOverload, args: tuple[Any, ...], linear: list[set[int]]) -> None:
    loops = loops_of(call_node(operator, *args))
    assert loops is not None
    assert [set(each) for each in loops.linear] == linear


def test_symbolic_sizes_are_refined() -> None:
    batch = sympy.Symbol("batch", integer=True, positive=True)

    def sizes(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[list[Any], Any, Any]:
        factors, *dimensions = refine(before, after)
        return [(factor.size, factor.reduction) for factor in factors], dimensions[0], dimensions[1]

    assert sizes((batch * 16, 4), (batch, 16, 4)) == ([(batch, None), (16, None), (4, None)], ((0, 1), (2,)), ((0,), (1,), (2,)))
    assert sizes((16 * batch, 4), (16, batch, 4)) == ([(16, None), (batch, None), (4, None)], ((0, 1), (2,)), ((0,), (1,), (2,)))
    assert sizes((batch, 6), (6, batch)) == (
        [(batch, "whole"), (6, "whole"), (6, "whole"), (batch, "whole")],
        ((0,), (2,)),
        ((1,), (3,)),
    )
    assert sizes((batch * (batch + 1), 4), (batch, (batch + 1) * 4))[0] == [(batch, None), (batch + 1, None), (4, None)]


def test_localized_arguments() -> None:
    """Sizes in the arguments of a part, for a call whose other arguments do not change."""
    view = loops_of(call_node(aten.view.default, real(2, 12), [2, 3, 4]))
    assert view is not None
    assert view.localize is not None
    part = LocalCall({"size": [2, 3, 4]}, ((2, 8),), ((2, 2, 4),), (2, 2, 4))
    assert view.localize(part) == {"size": [2, 2, 4]}
    linear = loops_of(call_node(aten.linear.default, real(2, 12), real(3, 12)))
    assert linear is not None
    assert linear.localize is None


def test_equal_calls_have_equal_loops() -> None:
    first, second = (loops_of(call_node(aten.linear.default, real(2, 12), real(3, 12))) for _ in range(2))
    assert first is second
    assert first is not None
    assert first.factors[0] == Factor("batch", 2)


@pytest.mark.parametrize(
    ("operator", "args"),
    [(aten.bucketize.Scalar, (0.5, real(5))), (aten.isin.Scalar_Tensor, (1, whole(3, 5)))],
)
def test_an_overload_whose_operands_are_others_has_no_rule(operator: OpOverload, args: tuple[Any, ...]) -> None:
    assert loops_of(call_node(operator, *args)) is None


def test_a_random_mask_is_not_the_same_in_two_calls() -> None:
    """A sum of parts is not kept as parts where each would draw its own mask."""
    query = real(2, 3, 4, 5)
    for dropout, linear in ((0.0, (frozenset({2}),)), (0.5, ())):
        loops = loops_of(call_node(aten.scaled_dot_product_attention.default, query, query, query, None, dropout))
        assert loops is not None
        assert loops.linear == linear
