"""Keep attention with dropout as one kernel, in programs that are simulated for accelerators.

Before:                                                             After:

    y = aten.scaled_dot_product_attention(q, k, v, None, 0.1)           y = partitioner.fused_attention(q, k, v, None, 0.1)

Fused kernels of accelerators draw the mask of dropout themselves. PyTorch's kernel for CPUs takes no dropout, so that autograd would write
scores, their softmax and a mask into the graph. The operator is differentiated as the kernel for CPUs with that probability: it saves and
computes as much as a kernel of an accelerator does. Such a program is timed and never runs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from passes.graph.lazy_graph_module import rewritten
from passes.graph.schemas import draws
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import flash_attention

aten = torch.ops.aten


def attention_with_dropout(graph: ModelGraph) -> set[fx.Node]:
    """Return the calls of attention that draw a mask of dropout."""
    return {node for node in graph.graph.nodes if node.target is aten.scaled_dot_product_attention.default and draws(node)}


def fuse_attention(graph: ModelGraph) -> ModelGraph:
    """Return the graph with attention with dropout as calls of ``fused_attention``; the graph itself if it has none."""
    found = attention_with_dropout(graph)
    if not found:
        return graph
    target = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        copies[node] = target.node_copy(node, copies.__getitem__)
        if node in found:
            copies[node].target = fused_attention
    return rewritten(graph, target, {node.name: copy.name for node, copy in copies.items()})


torch.library.define(
    "partitioner::fused_attention",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, *, float? scale=None, "
    "bool enable_gqa=False) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

fused_attention = torch.ops.partitioner.fused_attention.default
"""``aten.scaled_dot_product_attention`` by a fused kernel, also with dropout; by definition where no such kernel takes the call."""


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    fused = None
    if attn_mask is None or not attn_mask.requires_grad:
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            hidden, seen = (torch.scalar_tensor(number, dtype=query.dtype, device=query.device) for number in (-math.inf, 0.0))
            bias = torch.where(attn_mask, seen, hidden)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        fused = flash_attention(query, key, value, bias, is_causal=is_causal, scale=factor, dropout_p=dropout_p)
    if fused is not None:
        return fused[0]
    result: Tensor = aten.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result


torch.library.impl("partitioner::fused_attention", "CompositeImplicitAutograd", _attention)
