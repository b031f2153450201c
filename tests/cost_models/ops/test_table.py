"""Every line of the operation table is run: the bytes that autograd keeps must be those that the line says.

The reference is PyTorch itself: ``saved_tensors_hooks`` sees every tensor that the backward of a real call keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from cost_models.ops.cost import operation_cost
from cost_models.ops.table import OPERATIONS
from passes.graph.schemas import bound_arguments, packet
from passes.ir.tensor_spec import TensorSpec
from passes.normalize.randomness.fused_attention import fused_attention
from passes.rules.ops.channel_statistics import channel_statistics
from passes.rules.ops.grouped_mm import grouped_mm, grouped_outer
from passes.spmd.decompose.attention_block import attention_block, attention_block_backward

aten = torch.ops.aten
Arguments = tuple[Any, ...]

NOT_DIFFERENTIABLE = frozenset(
    {
        *(aten.all, aten.any, aten.argmax, aten.argmin, aten.histc, aten.zeros, aten.zeros_like, aten.ones, aten.ones_like, aten.full),
        *(aten.full_like, aten.arange, aten.linspace, aten.new_zeros, aten.new_ones, aten.new_full, aten.eye, aten.one_hot),
        *(aten.scalar_tensor, aten.empty, aten.empty_like, aten.new_empty, aten.rand, aten.randn, aten.rand_like, aten.randn_like),
        *(aten.nonzero, aten.bincount, aten.searchsorted, aten.bucketize, aten.item, aten.fill, aten.zero, aten.detach, aten.alias),
        *map(packet, (fused_attention, attention_block, attention_block_backward, channel_statistics)),
    }
)
"""Operators that nothing flows back through: their lines say that they move bytes, or what a block of attention multiplies."""


RECURRENT = frozenset({aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu})
"""Their weights are left out of the comparison: they are parameters."""


UNARY = """
    neg floor ceil round sign trunc abs square log log1p log2 sin cos erf elu gelu silu mish softplus leaky_relu hardtanh relu6
    hardswish hardsigmoid celu relu tanh sigmoid exp exp2 expm1 sqrt rsqrt reciprocal selu log_sigmoid hardshrink softshrink
"""


def real(*shape: int) -> Tensor:
    return torch.rand(shape) * 0.8 + 0.1


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def image() -> Tensor:
    return real(2, 4, 8, 8)


def table() -> Tensor:
    return real(6, 20)


def one(operators: list[OpOverload], *rest: Any, first: Callable[[], Tensor] = table) -> list[tuple[OpOverload, Arguments]]:
    """Return several operators with the same arguments."""
    return [(operator, (first(), *rest)) for operator in operators]


def doubles(*shape: int) -> Tensor:
    return real(*shape).double()  # float32 on CPU runs in oneDNN, whose workspace is its own affair


def recurrent_layers(gates: int) -> list[Tensor]:
    """Return the parameters of two layers in two directions."""
    widths = (16, 16, 32, 32)
    layers = ((doubles(16 * gates, width), doubles(16 * gates, 16), doubles(16 * gates), doubles(16 * gates)) for width in widths)
    return [tensor for layer in layers for tensor in layer]


def contractions() -> list[tuple[OpOverload, Arguments]]:
    lstm, gru, plain = (recurrent_layers(gates) for gates in (4, 3, 1))
    sequence, state, flags = doubles(8, 4, 16), doubles(4, 4, 16), (True, 2, 0.0, True, True, False)
    return [
        (aten.linear.default, (real(3, 7, 6), real(5, 6), real(5))),
        (aten.mm.default, (real(6, 7), real(7, 5))),
        (aten.bmm.default, (real(3, 6, 7), real(3, 7, 5))),
        (aten.mv.default, (real(6, 7), real(7))),
        (aten.dot.default, (real(40), real(40))),
        (aten.matmul.default, (real(3, 6, 7), real(3, 7, 5))),
        (aten.matmul.default, (real(3, 6, 7), real(7, 5))),
        (aten.inner.default, (real(30, 7), real(50, 7))),
        (aten.addmm.default, (real(5), real(6, 7), real(7, 5))),
        (aten.addbmm.default, (real(6, 5), real(3, 6, 7), real(3, 7, 5))),
        (aten.baddbmm.default, (real(3, 6, 5), real(3, 6, 7), real(3, 7, 5))),
        (aten.addmv.default, (real(6), real(6, 7), real(7))),
        (aten.tensordot.default, (real(6, 7), real(7, 5), [1], [0])),
        (aten.einsum.default, ("bij,bjk->bik", [real(3, 6, 7), real(3, 7, 5)])),
        (grouped_mm, (real(40, 6), real(3, 6, 5), torch.arange(40) % 3)),
        (grouped_mm, (real(40, 6), real(3, 5, 6), torch.arange(40) % 3, True)),
        (grouped_outer, (real(40, 6), real(40, 5), torch.arange(40) % 3, 3)),
        (aten.bilinear.default, (real(30, 4), real(30, 5), real(6, 4, 5))),
        (aten.conv1d.default, (real(2, 4, 8), real(6, 4, 3))),
        (aten.conv2d.default, (image(), real(6, 2, 3, 3), real(6), [1, 1], [1, 1], [1, 1], 2)),
        (aten.conv3d.default, (real(2, 4, 5, 5, 5), real(6, 4, 3, 3, 3))),
        (aten.convolution.default, (image(), real(6, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
        (aten.conv_transpose1d.default, (real(2, 4, 8), real(4, 6, 3))),
        (aten.conv_transpose2d.input, (image(), real(4, 6, 2, 2), None, [2, 2])),
        (aten.conv_transpose3d.input, (real(2, 4, 5, 5, 5), real(4, 6, 2, 2, 2))),
        (aten.scaled_dot_product_attention.default, (real(2, 3, 10, 8), real(2, 3, 12, 8), real(2, 3, 12, 8))),
        (aten.scaled_dot_product_attention.default, (*(real(2, 3, 12, 8) for _ in range(3)), torch.ones(12, 12, dtype=torch.bool).tril())),
        (aten.lstm.input, (sequence, [state, doubles(4, 4, 16)], lstm, *flags)),
        (aten.gru.input, (sequence, state, gru, *flags)),
        (aten.rnn_tanh.input, (sequence, state, plain, *flags)),
        (aten.rnn_relu.input, (sequence, state, plain, *flags)),
        (aten.lstm_cell.default, (real(30, 6), [real(30, 5), real(30, 5)], real(20, 6), real(20, 5), real(20), real(20))),
        (aten.gru_cell.default, (real(30, 6), real(30, 5), real(15, 6), real(15, 5), real(15), real(15))),
    ]


def normalisations() -> list[tuple[OpOverload, Arguments]]:
    softmax = [aten.softmax.int, aten.log_softmax.int]
    return [
        (aten.layer_norm.default, (real(3, 7, 6), [6], real(6), real(6))),
        (aten.rms_norm.default, (real(3, 7, 6), [6], real(6))),
        (aten.group_norm.default, (image(), 2, real(4), real(4))),
        (aten.batch_norm.default, (image(), real(4), real(4), real(4), real(4), True, 0.1, 1e-5, False)),
        (aten.instance_norm.default, (image(), None, None, None, None, True, 0.1, 1e-5, False)),
        *one(softmax, -1),
        *one([aten._softmax.default, aten._log_softmax.default], -1, False),
        *one([aten.logsumexp.default], [-1]),
    ]


def reductions() -> list[tuple[OpOverload, Arguments]]:
    return [
        *one([aten.sum.default, aten.mean.default, aten.std.default, aten.var.default, aten.norm.Scalar, aten.prod.default]),
        *one([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.std.dim, aten.var.dim], [-1]),
        *one([aten.cumsum.default, aten.cumprod.default, aten.prod.dim_int, aten.sort.default, aten.max.dim, aten.min.dim], -1),
        *one([aten.median.dim, aten.diff.default], 1),
        *one([aten.topk.default], 2),
        *one([aten.max.default, aten.min.default]),
        *one([aten.max.other, aten.min.other], table()),
        *one([aten.linalg_vector_norm.default], 2, [-1]),
    ]


def losses() -> list[tuple[OpOverload, Arguments]]:
    both = [aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.kl_div.default]
    return [
        *one([aten.cross_entropy_loss.default, aten.nll_loss.default, aten.nll_loss_nd.default], whole(20, 6)),
        *one(both, table()),
        *one([aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default], table()),
    ]


def pooling() -> list[tuple[OpOverload, Arguments]]:
    line, volume = real(2, 4, 8), real(2, 4, 8, 8, 8)
    return [
        (aten.avg_pool1d.default, (line, [2])),
        (aten.avg_pool2d.default, (image(), [2, 2])),
        (aten.avg_pool3d.default, (volume, [2, 2, 2])),
        (aten.adaptive_avg_pool1d.default, (line, [2])),
        (aten.adaptive_avg_pool2d.default, (image(), [2, 2])),
        (aten.adaptive_avg_pool3d.default, (volume, [2, 2, 2])),
        (aten.max_pool1d.default, (line, [2], [2])),
        (aten.max_pool2d.default, (image(), [2, 2], [2, 2])),
        (aten.max_pool3d.default, (volume, [2, 2, 2], [2, 2, 2])),
        (aten.adaptive_max_pool1d.default, (line, [2])),
        (aten.adaptive_max_pool2d.default, (image(), [2, 2])),
        (aten.upsample_nearest1d.vec, (line, [16], None)),
        (aten.upsample_nearest2d.vec, (image(), [16, 16], None)),
        (aten.upsample_nearest3d.vec, (volume, [16, 16, 16], None)),
        (aten.upsample_linear1d.vec, (line, [16], False, None)),
        (aten.upsample_bilinear2d.vec, (image(), [16, 16], False, None)),
        (aten.upsample_bicubic2d.vec, (image(), [16, 16], False, None)),
        (aten.upsample_trilinear3d.vec, (volume, [16, 16, 16], False, None)),
        (aten.pad.default, (image(), [1, 1])),
        (aten.constant_pad_nd.default, (image(), [1, 1])),
        (aten.grid_sampler.default, (image(), real(2, 5, 5, 2), 0, 0, False)),
    ]


def pointwise() -> list[tuple[OpOverload, Arguments]]:
    unary = [getattr(aten, name).default for name in UNARY.split()]
    binary = [getattr(aten, name).Tensor for name in ("add", "sub", "rsub", "mul", "multiply", "div", "remainder", "fmod")]
    return [
        *one(unary),
        *one(binary, table()),
        *one([aten.maximum.default, aten.minimum.default, aten.atan2.default], table()),
        *one([aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor], 2.0),
        *one([aten.pow.Tensor_Scalar, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default], 3.0),
        *one([aten.pow.Tensor_Tensor], table()),
        *one([aten.glu.default], -1),
        *one([aten.outer.default], real(50), first=lambda: real(40)),
        *one([aten.prelu.default], real(20)),
        *one([aten.lerp.Tensor], table(), table()),
        *one([aten.addcmul.default, aten.addcdiv.default], table(), table()),
        (aten.where.self, (table() > 0.5, table(), table())),
        *one([aten.masked_fill.Scalar], table() > 0.5, 0.0),
        *one([aten.dropout.default, aten.dropout.default], 0.5, True),
        *one([aten.feature_dropout.default], 0.5, True, first=image),
        *one([aten.relu_.default, aten.sigmoid_.default, aten.tanh_.default]),
    ]


def movement() -> list[tuple[OpOverload, Arguments]]:
    index = whole(6, 6, 20)
    return [
        (aten.embedding.default, (real(30, 8), whole(30, 4, 5))),
        (aten.index.Tensor, (real(30, 8), [whole(30, 12)])),
        *one([aten.gather.default], 0, index),
        *one([aten.take_along_dim.default], index, 0),
        *one([aten.index_select.default], 0, whole(6, 40)),
        *one([aten.scatter.src, aten.scatter_add.default], 0, index, table()),
        *one([aten.index_add.default, aten.index_copy.default], 0, torch.randperm(6), table()),
        *one([aten.index_put.default], [torch.randperm(6)], table()),
        *one([aten.masked_scatter.default], table() > 0.5, table()),
        *one([aten.masked_select.default], table() > 0.5),
        (aten.cat.default, ([table(), table()],)),
        (aten.stack.default, ([table(), table()],)),
        *one([aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default]),
        *one([aten.copy.default, aten.copy_.default, aten.type_as.default], table()),
        *one([aten.to.dtype], torch.float64),
        *one([aten.repeat.default, aten.tile.default], [2, 2]),
        *one([aten.repeat_interleave.self_int], 2),
        *one([aten.roll.default, aten.flip.default], [1]),
        *one([aten.tril.default, aten.triu.default, aten.flatten.using_ints]),
        *one([aten.reshape.default], [20, 6]),
        *one([aten.slice.Tensor], 0, 1, 3),
        *one([aten.select.int], 0, 1),
        *one([aten.narrow.default], 0, 1, 2),
        *one([aten.slice_scatter.default], real(2, 20), 0, 1, 3),
        *one([aten.select_scatter.default], real(20), 0, 1),
        *one([aten.unfold.default], 1, 2, 1),
        *one([aten.unflatten.int], 1, [4, 5]),
        *one([aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default], 2, first=image),
        (aten.im2col.default, (image(), [2, 2], [1, 1], [0, 0], [1, 1])),
        (aten.col2im.default, (real(2, 16, 49), [8, 8], [2, 2], [1, 1], [0, 0], [1, 1])),
    ]


EXAMPLES = [
    *contractions(),
    *normalisations(),
    *reductions(),
    *losses(),
    *pooling(),
    *pointwise(),
    *movement(),
]


def kept_bytes(operator: OpOverload, arguments: Arguments) -> int:
    """Return the bytes of all storages that the backward of a real call saves, except single numbers."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def needs_gradient(tensor: Tensor) -> Tensor:
        return (tensor.clone().requires_grad_() * 1) if tensor.is_floating_point() else tensor

    inputs = tree_map_only(Tensor, needs_gradient, arguments)
    if packet(operator) in (aten.batch_norm, aten.instance_norm):
        inputs = (*inputs[:3], *(None if each is None else each.detach() for each in inputs[3:5]), *inputs[5:])
    stationary = {leaf.untyped_storage().data_ptr() for leaf in inputs[2]} if packet(operator) in RECURRENT else set()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = operator(*inputs)
    assert result is not None
    return sum(size for address, size in kept.items() if address not in stationary and size > torch.float64.itemsize)


def told_bytes(operator: OpOverload, arguments: Arguments) -> int:
    """Return the bytes that the table gives for the same call."""
    graph = fx.Graph()
    node = graph.call_function(operator, arguments)
    results = tuple(leaf for leaf in tree_leaves(operator(*tree_map_only(Tensor, Tensor.clone, arguments))) if isinstance(leaf, Tensor))
    described = tree_map_only(Tensor, lambda tensor: TensorSpec(tuple(tensor.shape), tensor.dtype), bound_arguments(node))
    described = {name: tuple(value) if isinstance(value, list) else value for name, value in described.items()}
    flowing = {
        name: "activation"
        for name, value in bound_arguments(node).items()
        if any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(value)) and not name.startswith("running")
    }
    shapes = tuple(TensorSpec(tuple(result.shape), result.dtype) for result in results)
    cost = operation_cost(node, shapes, described, flowing, is_view=False)
    assert cost.known
    sizes = {"result": shapes[:1], "results": shapes}
    for name, value in described.items():
        sizes[name] = tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, TensorSpec))
    return int(sum(tensor.bytes for name in cost.saves for tensor in sizes[name]) + cost.keeps)


@pytest.mark.parametrize(("operator", "arguments"), EXAMPLES, ids=[str(operator) for operator, _ in EXAMPLES])
def test_the_line_keeps_what_autograd_keeps(operator: OpOverload, arguments: Arguments) -> None:
    assert told_bytes(operator, arguments) == pytest.approx(kept_bytes(operator, arguments), rel=0.02, abs=16)


def test_every_line_has_an_example() -> None:
    shown = {packet(operator) for operator, _ in EXAMPLES} | NOT_DIFFERENTIABLE
    assert {str(operator) for operator in OPERATIONS if packet(operator) not in shown} == set()
