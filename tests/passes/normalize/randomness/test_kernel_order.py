"""Kernels whose strides differ from their fake results are listed by ``kernel_order``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from passes.ir.torch_private import make_fx
from passes.normalize.randomness.kernel_order import kernel_values

Call = Callable[[Tensor], object]

CALLS: dict[str, Call] = {
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), training=True),
    "batch_norm in evaluation": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "group_norm": lambda x: F.group_norm(x, 1),
    "instance_norm": lambda x: F.instance_norm(x, eps=1e-3),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "local_response_norm": lambda x: F.local_response_norm(x, 3),
    "conv2d": lambda x: F.conv2d(x, torch.ones(3, x.shape[1], 3, 3)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, torch.ones(x.shape[1], 3, 3, 3)),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0),
    "interpolate, bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "pad, reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(2, 1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x], 1),
    "gelu": F.gelu,
    "glu": lambda x: F.glu(torch.cat([x, x], 1), 1),
    "prelu": lambda x: F.prelu(x, torch.ones(x.shape[1])),
    "roll": lambda x: x.roll(1, 1),
    "roll of two dimensions": lambda x: x.roll((1, -2), (1, 3)),
    "roll of all": lambda x: x.roll(1),
    "flip": lambda x: x.flip(1),
    "mean": lambda x: x.mean(1, keepdim=True),
    "amax": lambda x: x.amax(1),
    "var": lambda x: x.var(1),
    "linear": lambda x: F.linear(x, torch.ones(5, x.shape[-1])),
    "matmul": lambda x: x @ torch.ones(x.shape[-1], 5),
    "einsum": lambda x: torch.einsum("bchw,wk->bkch", x, torch.ones(x.shape[-1], 5)),
    "gather": lambda x: x.gather(1, torch.zeros_like(x).long()),
    "index": lambda x: x[:, [0, 1]],
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 1])),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "tril": lambda x: x.tril(),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float64),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2),
    "embedding": lambda x: F.embedding((x > 0).long(), torch.ones(2, 3)),
    "unfold": lambda x: F.unfold(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x, 1),
    "diff": lambda x: x.diff(dim=1),
    "scatter": lambda x: x.scatter(1, torch.zeros_like(x).long(), 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "cummax": lambda x: x.cummax(1),
}

INPUTS = {
    "rows and channels transposed": torch.randn(3, 4, 7, 13).transpose(0, 1),
    "channels last": torch.randn(4, 7, 13, 6).permute(0, 3, 1, 2),
    "width before height": torch.randn(4, 6, 13, 7).transpose(-1, -2),
}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", CALLS)
def test_strides_are_those_of_the_kernels(name: str, given: str) -> None:
    call, x = CALLS[name], INPUTS[given]
    module = make_fx(call, tracing_mode="fake", pre_dispatch=True)(x)
    otherwise = kernel_values(module.graph)
    (returned,) = module.graph.output_node().args
    found = [otherwise.get(node, node.meta["val"]) for node in tree_leaves(returned) if isinstance(node, fx.Node)]
    real = [leaf for leaf in tree_leaves(call(x)) if isinstance(leaf, Tensor)]
    assert [each.stride() for each in found] == [each.stride() for each in real]
