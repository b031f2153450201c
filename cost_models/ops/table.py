"""Cost of each operator and saved values of its backward: one line an operator.

``saves`` lists what autograd keeps for the backward, by parameter name of the schema:

    self            the argument is kept
    self:other      the argument is kept if ``other`` needs a gradient
    result          the (first) result is kept
    results         all results are kept

An in-place operator (``relu_``) stands on the line of the functional one. The test of this table runs every line and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from cost_models.ops import contractions as recurrent
from cost_models.ops.contractions import Products, as_attention, attention, attention_gradients, contraction, operand_gradients
from cost_models.ops.work import Family, Work
from passes.ir.tensor_spec import Size, TensorSpec, numel
from passes.normalize.randomness.fused_attention import fused_attention
from passes.rules.call import Call, tensors_in
from passes.rules.ops.channel_statistics import channel_statistics
from passes.rules.ops.grouped_mm import grouped_mm, grouped_outer
from passes.spmd.decompose.attention_block import attention_block, attention_block_backward

aten = torch.ops.aten


Kernels: TypeAlias = tuple[Work, ...]


@dataclass(frozen=True)
class Operation:
    """One line of the table.

    Attributes:
        products: of the forward; None when it multiplies no operands.
        gradients: argument -> the products of its gradient.
        saves: see the module.
        keeps: bytes that the backward keeps besides arguments and results.
        working: bytes that the backward makes and frees besides: a loss reads a gradient of logarithms of probabilities.
        sparse_read: reads only as much of its first argument as it writes (a table lookup).
        writes_alone: reads no element of its arguments (zeros like a tensor).
        gives_kept: the kernel of a forward that trains writes ``keeps``, and that of the backward reads it (indices of maxima).
        decomposed: further kernels of the forward and of the backward, where autograd decomposes the call.
        launches: kernels of the forward.
        copies: how often further kernels of the forward, and of the backward, move the bytes of the first argument: a loss is computed from
            logarithms of probabilities, which are written and read.
        passes_gradient: whether the gradient of an argument of as many bytes as the result is that of the result, or views of it: no kernel
            runs.
        family: whose kernels are like its own.
    """

    products: Callable[[Call], Products] | None = None
    gradients: Callable[[Call], Mapping[str, Products]] | None = None
    saves: tuple[str, ...] = ()
    keeps: Callable[[Call], Size] | None = None
    working: Callable[[Call], Size] | None = None
    sparse_read: bool = False
    writes_alone: bool = False
    gives_kept: bool = False
    decomposed: Callable[[Call], tuple[Kernels, Kernels]] | None = None
    launches: int = 1
    copies: tuple[int, int] = (0, 0)
    passes_gradient: bool = False
    family: Family = "other"


def _saving(saves: str = "", **fields: Any) -> Operation:
    return Operation(saves=tuple(saves.split()), **fields)


def _product(*names: str, family: Family = "matrix product") -> Operation:
    """Return the line of a product: the gradient of each operand saves the others. The rule of the operator gives the sums."""
    if len(names) == 2:
        one, other = names
        saves: tuple[str, ...] = (f"{one}:{other}", f"{other}:{one}")
    else:
        saves = names
    windowed = family == "convolution"
    return Operation(contraction(*names, windowed=windowed), operand_gradients(*names, windowed=windowed), saves, family=family)


def _lines(operation: Operation, *operators: Any) -> dict[Any, Operation]:
    return dict.fromkeys(operators, operation)


def _row_statistics(per_row: int) -> Callable[[Call], Size]:
    """Return the bytes of ``per_row`` float32 numbers (float64 for float64) for each row that is normalised over its last dimensions."""

    def keeps(call: Call) -> Size:
        rows = call.shape("input")[: len(call.shape("input")) - len(call.arguments["normalized_shape"])]
        return per_row * numel(rows) * max(4, call.result.itemsize)

    return keeps


def _group_statistics(call: Call) -> Size:
    return 2 * call.shape("input")[0] * call.arguments["num_groups"] * max(4, call.result.itemsize)


def _channel_statistics(call: Call) -> Size:
    return 2 * call.shape("input")[1] * max(4, call.result.itemsize)


def _instance_statistics(call: Call) -> Size:
    return 2 * numel(call.shape("input")[:2]) * max(4, call.result.itemsize)


def _attention_rows(call: Call) -> Size:
    """Return the bytes of the logarithm of each row's sum of scores, and of a mask of booleans in the type of the scores."""
    mask = call.arguments.get("attn_mask")
    converted = mask.numel * call.result.itemsize if isinstance(mask, TensorSpec) and mask.dtype is torch.bool else 0
    return numel(call.shape("query")[:-1]) * max(4, call.result.itemsize) + converted


def _pool_indices(call: Call) -> Size:
    return call.result.numel * torch.int64.itemsize


def _by_indices(call: Call) -> tuple[Kernels, Kernels]:
    """Return the kernels that compute the indices of nearest elements along each dimension, and zeros to which gradients are added."""
    (size,) = (tensor.bytes for tensor in tensors_in(call.values[0][1]))
    return (Work(0, 0, 1, "pointwise"),) * (4 * (len(call.result.shape) - 2)), (Work(0, size, 1, "movement"),)


def _dropout_mask(call: Call) -> Size:
    return call.result.bytes if call.arguments["train"] and call.arguments["p"] > 0 else 0


def _feature_dropout_mask(call: Call) -> Size:
    kept = numel(call.shape("input")[:2]) * call.result.itemsize
    return kept if call.arguments["train"] and call.arguments["p"] > 0 else 0


def _log_probabilities(call: Call) -> Size:
    """Log-softmax of the scores, and one number: the total weight."""
    return numel(call.shape("self")) * call.result.itemsize + call.result.itemsize


def _recurrent_steps(vectors: int) -> Callable[[Call], Size]:
    """Return the bytes that each step saves: so many vectors of the hidden size for each layer and direction, and earlier states."""

    def keeps(call: Call) -> Size:
        rows = numel(call.shape("input")[:-1])
        matrices = [tensor.shape for tensor in call.arguments["params"] if len(tensor.shape) == 2]
        directions = 2 if call.arguments["bidirectional"] else 1
        hidden = sum(shape[1] for shape in matrices[1::2])
        between = sum(shape[1] for shape in matrices[2 * directions :: 2 * directions])
        return rows * (vectors * hidden + between) * call.result.itemsize

    return keeps


def _difference(call: Call) -> Size:
    return numel(call.shape("self")) * call.result.itemsize


def _root_mean_square(call: Call) -> Size:
    """Return the bytes of one number a row, and the normalised rows."""
    return _row_statistics(1)(call) + call.result.bytes


def _recurrent(saves: tuple[str, ...], vectors: int) -> Operation:
    def gradients(call: Call) -> Mapping[str, Products]:
        return {"params": recurrent.weight_gradients(call), "input": recurrent.input_gradient(call)}

    return Operation(recurrent.layers, gradients, saves, _recurrent_steps(vectors), family="recurrent")


def _recurrent_cell(vectors: int) -> Operation:
    def gradients(call: Call) -> Mapping[str, Products]:
        return dict.fromkeys(("input", "w_ih"), recurrent.cell(call))

    saves = ("input", "hx", "w_ih", "w_hh")
    return Operation(recurrent.cell, gradients, saves, lambda call: vectors * call.result.bytes, family="recurrent")


CONTRACTIONS: Mapping[Any, Operation] = {
    **_lines(_product("input", "weight"), aten.linear),
    **_lines(_product("self", "mat2"), aten.mm, aten.bmm),
    aten.mv: _product("self", "vec"),
    aten.dot: _product("self", "tensor"),
    **_lines(_product("self", "other"), aten.matmul, aten.inner, aten.tensordot),
    aten.addmm: _product("mat1", "mat2"),
    **_lines(_product("batch1", "batch2"), aten.addbmm, aten.baddbmm),
    aten.addmv: _product("mat", "vec"),
    aten.einsum: _product("tensors"),
    grouped_mm: replace(_product("input", "weight"), saves=("input:weight", "weight:input", "group"), launches=4),
    grouped_outer: replace(_product("input", "other"), saves=("input:other", "other:input", "group"), launches=4),
    aten.bilinear: _product("input1", "weight", "input2"),
    **_lines(_product("input", "weight", family="convolution"), aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution),
    **_lines(_product("input", "weight", family="convolution"), aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d),
    aten.scaled_dot_product_attention: Operation(
        products=attention,
        gradients=lambda call: {"query": attention_gradients(call)},
        saves=("query", "key", "value", "attn_mask", "result"),
        keeps=_attention_rows,
        family="attention",
    ),
    fused_attention: Operation(lambda call: attention(as_attention(call)), family="attention"),
    attention_block: Operation(lambda call: attention(as_attention(call)), family="attention"),
    attention_block_backward: Operation(lambda call: attention_gradients(as_attention(call)), family="attention"),
    **_lines(_recurrent(("input",), vectors=7), aten.lstm, aten.gru),
    **_lines(_recurrent(("input", "hx"), vectors=1), aten.rnn_tanh, aten.rnn_relu),
    aten.lstm_cell: _recurrent_cell(5),
    aten.gru_cell: _recurrent_cell(6),
}

NORMALISATIONS: Mapping[Any, Operation] = {
    aten.layer_norm: _saving("input weight bias", keeps=_row_statistics(2)),
    aten.rms_norm: _saving("input weight", keeps=_root_mean_square),
    aten.group_norm: _saving("input weight", keeps=_group_statistics),
    aten.batch_norm: _saving("input weight running_mean running_var", keeps=_channel_statistics),
    aten.instance_norm: _saving("input weight", keeps=_instance_statistics),
    **_lines(_saving("result"), aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax),  # noqa: SLF001
}

REDUCTIONS: Mapping[Any, Operation] = {
    **_lines(_saving(), aten.sum, aten.mean, aten.cumsum, aten.diff, aten.all, aten.any, aten.argmax, aten.argmin, aten.histc),
    **_lines(_saving("self result"), aten.amax, aten.amin, aten.prod, aten.norm, aten.linalg_vector_norm, aten.std),
    **_lines(_saving("self result"), aten.cumprod, aten.logsumexp, aten.max.default, aten.min.default),
    **_lines(_saving("self"), aten.var),
    channel_statistics: _saving(),
    **_lines(_saving(keeps=_pool_indices), aten.topk, aten.sort, aten.median.dim, aten.max.dim, aten.min.dim),
    **_lines(_saving("self other"), aten.max.other, aten.min.other),
}

LOSSES: Mapping[Any, Operation] = {
    aten.cross_entropy_loss: _saving("target", keeps=_log_probabilities, working=_log_probabilities, launches=2, copies=(2, 4)),
    aten.nll_loss: _saving("self target"),
    aten.nll_loss_nd: _saving("self target"),
    aten.mse_loss: _saving("self target"),
    aten.l1_loss: _saving(keeps=_difference),
    aten.smooth_l1_loss: _saving("self target"),
    aten.huber_loss: _saving("self target"),
    aten.binary_cross_entropy: _saving("self target weight"),
    aten.binary_cross_entropy_with_logits: _saving("self target weight"),
    aten.kl_div: _saving("self target"),
}

POOLING: Mapping[Any, Operation] = {
    **_lines(_saving("self"), aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d),
    **_lines(_saving("self"), aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d),
    **_lines(_saving("self", keeps=_pool_indices, gives_kept=True), aten.max_pool1d, aten.max_pool2d, aten.max_pool3d),
    **_lines(_saving("self", keeps=_pool_indices, gives_kept=True), aten.adaptive_max_pool1d, aten.adaptive_max_pool2d),
    **_lines(_saving(decomposed=_by_indices, copies=(0, 1)), aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d),
    **_lines(
        _saving(),
        aten.upsample_linear1d,
        aten.upsample_bilinear2d,
        aten.upsample_bicubic2d,
        aten.upsample_trilinear3d,
        aten.pad,
        aten.constant_pad_nd,
    ),
    aten.grid_sampler: _saving("input grid"),
}

POINTWISE: Mapping[Any, Operation] = {
    aten.add: _saving(passes_gradient=True),
    **_lines(_saving(), aten.sub, aten.rsub, aten.neg, aten.floor, aten.ceil, aten.round, aten.sign, aten.trunc),
    **_lines(_saving("self:other other:self"), aten.mul, aten.multiply),
    aten.outer: _saving("self:vec2 vec2:self"),
    aten.div: _saving("self:other other"),
    aten.remainder: _saving("self:other other:other"),
    aten.fmod: _saving("self:other other:other"),
    aten.pow: _saving("self exponent result:exponent", copies=(0, 4)),
    **_lines(_saving("self other"), aten.maximum, aten.minimum, aten.atan2),
    **_lines(_saving("self"), aten.abs, aten.square, aten.log, aten.log1p, aten.log2, aten.sin, aten.cos, aten.erf, aten.elu, aten.gelu),
    **_lines(_saving("self"), aten.silu, aten.mish, aten.softplus, aten.leaky_relu, aten.hardtanh, aten.relu6, aten.hardswish),
    **_lines(_saving("self"), aten.hardsigmoid, aten.clamp, aten.clamp_min, aten.clamp_max, aten.glu, aten.celu),
    **_lines(_saving("result"), aten.relu, aten.tanh, aten.sigmoid, aten.exp, aten.exp2, aten.expm1, aten.sqrt, aten.rsqrt),
    aten.reciprocal: _saving("result"),
    **_lines(_saving("self"), aten.selu, aten.hardshrink, aten.softshrink),
    aten.log_sigmoid: _saving("self", keeps=_difference),
    aten.prelu: _saving("self weight"),
    aten.lerp: _saving("self weight end"),
    aten.addcmul: _saving("tensor1:tensor2 tensor2:tensor1"),
    aten.addcdiv: _saving("tensor1:tensor2 tensor2"),
    aten.where: _saving("condition"),
    aten.masked_fill: _saving("mask"),
    **_lines(_saving(keeps=_dropout_mask), aten.dropout),
    **_lines(_saving(keeps=_feature_dropout_mask), aten.feature_dropout),
}

MOVEMENT: Mapping[Any, Operation] = {
    aten.embedding: _saving("indices", sparse_read=True),
    aten.index: _saving("indices", sparse_read=True),
    aten.index_select: _saving("index", sparse_read=True),
    aten.gather: _saving("self index", sparse_read=True),
    aten.take_along_dim: _saving("self indices", sparse_read=True),
    **_lines(_saving("index"), aten.scatter, aten.scatter_add),
    **_lines(_saving("index source"), aten.index_add, aten.index_copy),
    aten.index_put: _saving("indices"),
    aten.masked_scatter: _saving("mask"),
    aten.masked_select: _saving("self mask", sparse_read=True),
    **_lines(_saving(passes_gradient=True), aten.cat, aten.stack),
    **_lines(_saving(), aten.clone, aten.contiguous, aten.copy, aten.to, aten.type_as, aten.lift_fresh_copy),
    **_lines(_saving(), aten.repeat, aten.repeat_interleave, aten.tile, aten.roll, aten.flip, aten.tril, aten.triu),
    **_lines(_saving(sparse_read=True), aten.slice, aten.select, aten.narrow, aten.slice_scatter, aten.select_scatter),
    **_lines(_saving(writes_alone=True), aten.zeros, aten.zeros_like, aten.ones, aten.ones_like, aten.full, aten.full_like, aten.arange),
    **_lines(_saving(writes_alone=True), aten.new_zeros, aten.new_ones, aten.new_full, aten.linspace, aten.eye, aten.scalar_tensor),
    **_lines(_saving(writes_alone=True), aten.empty, aten.empty_like, aten.new_empty, aten.rand, aten.randn, aten.rand_like),
    **_lines(_saving(writes_alone=True), aten.randn_like, aten.fill, aten.zero),
    aten.one_hot: _saving(),
    **_lines(_saving(), aten.reshape, aten.flatten, aten.unflatten, aten.unfold, aten.im2col, aten.col2im),
    **_lines(_saving(), aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle),
    **_lines(_saving(), aten.detach, aten.alias),
    **_lines(_saving(), aten.nonzero, aten.bincount, aten.searchsorted, aten.bucketize, aten.item),
}


def _of_family(family: Family, lines: Mapping[Any, Operation]) -> dict[Any, Operation]:
    return {operator: replace(line, family=family) for operator, line in lines.items()}


OPERATIONS: Mapping[Any, Operation] = {
    **CONTRACTIONS,
    **_of_family("normalisation", NORMALISATIONS),
    **_of_family("reduction", REDUCTIONS),
    **_of_family("reduction", LOSSES),
    **_of_family("movement", POOLING),
    **_of_family("pointwise", POINTWISE),
    **_of_family("movement", MOVEMENT),
}
"""Operator (``torch.ops.aten.linear``) -> its line."""
