"""The operator ``grouped_mm``: each row times the matrix of its group, as in a mixture of experts without capacity.

    result[row] = input[row] @ weight[group[row]]

The group of a row is the index of its matrix; rows have any order. So rows are independent of each other, and rules may cut them. torch's
own ``grouped_mm`` takes rows in the order of their groups, where one more row in the first group moves all others. The kernel sorts the
rows by itself. A row whose group has no matrix gives zeros, and so a rank with a part of the matrices gives its part of a sum.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.rules.call import Call

torch.library.define("partitioner::grouped_mm", "(Tensor input, Tensor weight, Tensor group, bool transposed=False) -> Tensor")
torch.library.define("partitioner::grouped_outer", "(Tensor input, Tensor other, Tensor group, int n_groups) -> Tensor")

grouped_mm = torch.ops.partitioner.grouped_mm.default
"""``input``, (rows, in), times ``weight``, (groups, in, out), of each row's ``group``, (rows,): (rows, out).

``transposed``: ``weight`` is (groups, out, in), as that of ``linear``.
"""

grouped_outer = torch.ops.partitioner.grouped_outer.default
"""The sum of ``input[row]``, (in,), times ``other[row]``, (out,), over the rows of each group: (groups, in, out); gradients of weights."""


def product(call: Call) -> str:
    """Multiply independent rows; a row picks one matrix, and reads all of it."""
    return f"rows in, experts! {'out in' if call.get('transposed') else 'in out'}, rows -> rows out; linear input | weight"


_ALIGNMENT = 16
"""Bytes that strides must be a multiple of for torch's kernel."""


def _sorted_rows(group: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Return the rows in the order of their groups, and where each group ends in it; rows of no group come last."""
    known = torch.where((group >= 0) & (group < n_groups), group, n_groups)
    ordered, rows = known.sort(stable=True)
    return rows, torch.searchsorted(ordered, torch.arange(n_groups, dtype=group.dtype, device=group.device), right=True)


def _rows_of_groups(group: Tensor, n_groups: int) -> list[tuple[int, Tensor]]:
    """Return each group that has rows, with these."""
    rows, ends = _sorted_rows(group, n_groups)
    bounds = [0, *ends.tolist()]
    return [(index, rows[start:end]) for index, (start, end) in enumerate(pairwise(bounds)) if start < end]


def _fits_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a kernel without a loop over groups: for bfloat16 on GPUs of compute capability 8 and more, if aligned."""
    if {rows.dtype, weight.dtype} != {torch.bfloat16} or not rows.is_cuda or not rows.numel():
        return False
    widths = [size * rows.itemsize for size in (rows.shape[1], *weight.shape[1:])]
    is_aligned = all(width % _ALIGNMENT == 0 for width in widths) and all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in (rows, weight))
    return is_aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _by_kernel(rows: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """Multiply rows, sorted by group, in torch's kernel; return the products in the order of ``rows``.

    A copy of one row is appended and its product set to zero: rows of no group take that product.
    """
    n_rows, n_groups = rows.shape[0], weight.shape[0]
    order, ends = _sorted_rows(group, n_groups)
    multiplied = F.grouped_mm(rows[torch.cat([order, order[:1]])], weight, offs=ends.to(torch.int32))
    multiplied[n_rows] = 0
    places = torch.empty_like(order)
    places[order] = torch.arange(n_rows, device=order.device)
    return multiplied[torch.where((group >= 0) & (group < n_groups), places, n_rows)]


def _grouped_mm(rows: Tensor, weight: Tensor, group: Tensor, transposed: bool = False) -> Tensor:
    weight = weight.transpose(1, 2) if transposed else weight
    if _fits_kernel(rows, weight):
        return _by_kernel(rows, weight, group)
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    for index, rows_of_group in _rows_of_groups(group, weight.shape[0]):
        result[rows_of_group] = rows[rows_of_group] @ weight[index]
    return result


def _outer_by_kernel(rows: Tensor, other: Tensor, group: Tensor, n_groups: int) -> Tensor:
    """Sum products of sorted rows in torch's kernel, which leaves out rows after the end of the last group."""
    order, ends = _sorted_rows(group, n_groups)
    return F.grouped_mm(rows[order].t(), other[order], offs=ends.to(torch.int32))


def _grouped_outer(rows: Tensor, other: Tensor, group: Tensor, n_groups: int) -> Tensor:
    if _fits_kernel(rows, other.unsqueeze(0)):
        return _outer_by_kernel(rows, other, group, n_groups)
    result = rows.new_zeros(n_groups, rows.shape[1], other.shape[1])
    for index, rows_of_group in _rows_of_groups(group, n_groups):
        result[index] = rows[rows_of_group].t() @ other[rows_of_group]
    return result


def _fake_grouped_mm(rows: Tensor, weight: Tensor, group: Tensor, transposed: bool = False) -> Tensor:
    width, result_width = reversed(weight.shape[1:]) if transposed else weight.shape[1:]
    if rows.dim() != 2 or group.dim() != 1 or rows.shape[1] != width:
        raise RuntimeError(f"rows of {tuple(rows.shape)} in groups of {tuple(group.shape)} do not fit matrices {tuple(weight.shape)}")
    return rows.new_empty(rows.shape[0], result_width)


def _fake_grouped_outer(rows: Tensor, other: Tensor, group: Tensor, n_groups: int) -> Tensor:  # noqa: ARG001  the signature
    return rows.new_empty(n_groups, rows.shape[1], other.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001  torch passes them by these names
    rows, weight, group, ctx.transposed = (*inputs, False)[:4]
    row_grad, weight_grad = ctx.needs_input_grad[:2]
    ctx.save_for_backward(rows if weight_grad else None, weight if row_grad else None, group)
    ctx.n_groups = weight.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, group = ctx.saved_tensors
    row_grad = None if weight is None else grouped_mm(grad, weight, group, not ctx.transposed)
    operands = (grad, rows) if ctx.transposed else (rows, grad)
    weight_grad = None if rows is None else grouped_outer(*operands, group, ctx.n_groups)
    return row_grad, weight_grad, None, None


def _save_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    rows, other, group, _ = inputs
    rows_grad, other_grad = ctx.needs_input_grad[:2]
    ctx.save_for_backward(rows if other_grad else None, other if rows_grad else None, group)


def _backward_of_outer(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, other, group = ctx.saved_tensors
    rows_grad = None if other is None else grouped_mm(other, grad, group, True)
    other_grad = None if rows is None else grouped_mm(rows, grad, group)
    return rows_grad, other_grad, None, None


for _operator, _run, _fake in ((grouped_mm, _grouped_mm, _fake_grouped_mm), (grouped_outer, _grouped_outer, _fake_grouped_outer)):
    torch.library.impl(_operator.name(), "CompositeExplicitAutograd", _run)
    torch.library.register_fake(_operator.name(), _fake)
torch.library.register_autograd(grouped_mm.name(), _backward, setup_context=_save)
torch.library.register_autograd(grouped_outer.name(), _backward_of_outer, setup_context=_save_outer)
