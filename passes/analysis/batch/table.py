"""Which rule an operation follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from passes.analysis.batch import contractions, creation, elementwise, layers, losses, views
from passes.analysis.batch.call import Call
from passes.analysis.batch.elementwise import keep_total
from passes.analysis.batch.reductions import along, compared, reduce
from passes.analysis.batch.role import Role
from passes.graph.schemas import functional, packet
from passes.ir.torch_private import OpOverload

__all__ = ["RULES", "Rule", "reads_sizes", "rule_of"]

aten = torch.ops.aten

Rule = Callable[[Call], Role | tuple[Role, ...]]
"""What an operation makes of the roles of its operands: one role, or one for each of its results."""


def rule_of(target: Any) -> Rule | None:
    """The rule of an operation; an in-place one follows that of the functional one; None when there is none."""
    target = functional(target) or target
    found = RULES.get(packet(target))
    if found is None and isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
        return elementwise.elementwise
    return found


def reads_sizes(rule: Rule) -> bool:
    """Whether the rule itself looks at numbers that depend on the batch; others must not meet any."""
    return rule in _SIZED


def _by_operand(name: str, present: Rule, absent: Rule) -> Rule:
    """For operations whose overloads differ in what they do."""

    def rule(call: Call) -> Role | tuple[Role, ...]:
        return present(call) if name in call.arguments else absent(call)

    return rule


_moving: dict[Callable[[Call], Role], list[Any]] = {
    views.reshape: [
        aten._reshape_alias, aten._unsafe_view,  # noqa: SLF001
        aten.flatten, aten.ravel, aten.reshape, aten.reshape_as, aten.unflatten, aten.view, aten.view_as,
    ],
    views.permute: [aten.permute],
    views.move: [aten.movedim, aten.moveaxis],
    views.swap("dim0", "dim1"): [aten.transpose, aten.swapdims],
    views.swap("axis0", "axis1"): [aten.swapaxes],
    views.swap(0, 1): [aten.t],
    views.swap(-2, -1): [aten.mT, aten.adjoint],
    views.unsqueeze: [aten.unsqueeze],
    views.squeeze: [aten.squeeze],
    views.expand: [aten.broadcast_to, aten.expand, aten.expand_as],
    views.repeat: [aten.repeat],
    views.repeat_interleave: [aten.repeat_interleave],
    views.select: [aten.select],
    views.slice_: [aten.slice],
    views.narrow: [aten.narrow],
    views.split: [aten.chunk, aten.split, aten.split_with_sizes, aten.tensor_split],
    views.unbind: [aten.unbind],
    views.cat: [aten.cat, aten.concat],
    views.stack: [aten.stack],
    views.flipped: [aten.flip, aten.roll],
    views.padded: [aten.constant_pad_nd, aten.pad],
    views.positions: [aten.tril, aten.triu],
    views.unchanged: [aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh_copy, aten.lift_fresh],
}  # fmt: skip

_moved: dict[Rule, list[Any]] = {keep_total(rule): operations for rule, operations in _moving.items()}

_other: dict[Rule, list[Any]] = {
    elementwise.elementwise: [
        aten._to_copy,  # noqa: SLF001
        aten.add, aten.alpha_dropout, aten.bitwise_and, aten.copy, aten.dropout, aten.feature_alpha_dropout, aten.feature_dropout,
        aten.fill, aten.masked_fill, aten.nan_to_num, aten.softplus, aten.to, aten.type_as, aten.where, aten.zero,
        aten.__and__, aten.__or__, aten.__xor__, aten.clamp, aten.clip, aten.hardtanh, aten.relu6, aten.selu, aten.celu, aten.prelu,
        aten.rrelu, aten.square,
        aten.logical_not, aten.floor_divide, aten.remainder, aten.true_divide, aten.bernoulli, aten.isclose, aten.isfinite, aten.isinf,
        aten.absolute, aten.negative, aten.multiply, aten.divide, aten.subtract, aten.greater, aten.less, aten.not_equal,
        aten.log_sigmoid, aten.real, aten.imag,
    ],
    views.broadcast: [aten.broadcast_tensors],
    views.new_last: [aten.one_hot],
    views.same_dimensions("dim"): [aten.diff, aten.slice_scatter],
    views.select_scatter: [aten.select_scatter],
    views.unfold: [aten.unfold],
    views.take: [aten.index_select],
    creation.arange: [aten.arange],
    creation.created: [
        aten.empty, aten.empty_like, aten.full, aten.full_like, aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros,
        aten.ones, aten.ones_like, aten.rand, aten.rand_like, aten.randint, aten.randint_like, aten.randn, aten.randn_like,
        aten.zeros, aten.zeros_like,
    ],
    creation.gather: [aten.gather, aten.take_along_dim],
    creation.scatter: [aten.scatter, aten.scatter_add, aten.scatter_reduce],
    creation.index: [aten.index],
    reduce("sum"): [aten.sum, aten.nansum, aten.count_nonzero],
    reduce("mean"): [aten.mean],
    _by_operand("other", elementwise.elementwise, reduce(None)): [aten.max, aten.min],
    reduce(None): [
        aten.all, aten.amax, aten.amin, aten.aminmax, aten.any, aten.argmax, aten.argmin, aten.kthvalue, aten.linalg_vector_norm,
        aten.logsumexp, aten.median, aten.mode, aten.nanmean, aten.norm, aten.prod, aten.std, aten.std_mean, aten.var, aten.var_mean,
    ],
    along(): [
        aten._log_softmax, aten._softmax,  # noqa: SLF001
        aten.argsort, aten.cummax, aten.cummin, aten.cumprod, aten.cumsum, aten.glu, aten.log_softmax,
        aten.logcumsumexp, aten.softmax, aten.sort, aten.topk,
    ],
    compared: [aten.cosine_similarity, aten.pairwise_distance],
    contractions.linear: [aten.linear],
    contractions.matmul: [aten.bmm, aten.matmul, aten.mm, aten.mv],
    contractions.matmul_with_bias: [aten.addmm, aten.baddbmm],
    contractions.einsum: [aten.einsum],
    contractions.attention: [aten.scaled_dot_product_attention],
    layers.convolution: [
        aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d,
        aten.convolution,
    ],
    layers.instances: [aten.batch_norm, aten.group_norm, aten.instance_norm],
    layers.normalized: [aten.layer_norm, aten.rms_norm],
    layers.embedding: [aten.embedding],
    layers.recurrent: [aten.gru, aten.lstm, aten.rnn_relu, aten.rnn_tanh],
    layers.per_row("input", "grid"): [aten.grid_sampler],
    layers.spatial(1): [aten.adaptive_avg_pool1d, aten.adaptive_max_pool1d, aten.avg_pool1d, aten.max_pool1d, aten.upsample_linear1d,
                        aten.upsample_nearest1d],
    layers.spatial(2): [aten.adaptive_avg_pool2d, aten.adaptive_max_pool2d, aten.avg_pool2d, aten.max_pool2d, aten.max_pool2d_with_indices,
                        aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_nearest2d],
    layers.spatial(3): [aten.adaptive_avg_pool3d, aten.adaptive_max_pool3d, aten.avg_pool3d, aten.channel_shuffle, aten.max_pool3d,
                        aten.pixel_shuffle, aten.pixel_unshuffle, aten.upsample_nearest3d, aten.upsample_trilinear3d],
    losses.elementwise_loss: [
        aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits, aten.hinge_embedding_loss, aten.huber_loss, aten.kl_div,
        aten.l1_loss, aten.mse_loss,
        aten.poisson_nll_loss, aten.smooth_l1_loss, aten.soft_margin_loss,
    ],
    losses.vector_loss("self", "target"): [aten.multi_margin_loss, aten.multilabel_margin_loss],
    losses.vector_loss("anchor", "positive", "negative"): [aten.triplet_margin_loss],
    losses.vector_loss("input1", "input2", "target"): [aten.cosine_embedding_loss],
    losses.classification: [aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss2d, aten.nll_loss_nd],
}  # fmt: skip

RULES: dict[Any, Rule] = {
    **{operation: rule for rule, operations in _moved.items() for operation in operations},
    **{operation: rule for rule, operations in _other.items() for operation in operations},
}
"""Operation -> its rule."""

_SIZED = frozenset(
    RULES[operation]
    for operation in (
        aten.add, aten.arange, aten.chunk, aten.expand, aten.repeat, aten.select, aten.slice, aten.view, aten.zeros,
    )
)  # fmt: skip
"""Rules that look at numbers themselves."""
