"""Attention by blocks of keys, put together, beside torch's attention to all keys; and the gradients of blocks, added up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from passes.ir.torch_private import flash_attention, flash_attention_gradients
from passes.spmd.decompose.attention_block import attention_block, attention_block_backward, join_blocks, row_totals
from tests.support.running.slow_values import slow

LENGTH, WIDTH, SCALE = 16, 8, 0.3

SHAPES = {
    "plain": ((2,), 4, 4, WIDTH),
    "grouped": ((2,), 4, 2, WIDTH),
    "one_head_of_keys": ((3, 2), 2, 1, WIDTH),
    "narrow_values": ((2,), 6, 2, 5),
}
"""Dimensions before heads, heads of queries, heads of keys, width of values."""

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.04}

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no accelerator")]),
]


def operands(shape: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    lead, heads, kv_heads, width = SHAPES[shape]
    torch.manual_seed(0)
    sizes = ((heads, WIDTH), (kv_heads, WIDTH), (kv_heads, width))
    return [torch.randn(*lead, count, LENGTH, size, dtype=dtype, device=device, requires_grad=True) for count, size in sizes]


def mask_of(kind: str, dtype: torch.dtype, device: str) -> Tensor | None:
    """Return a mask that hides all keys of a row, and all keys of a block of another; or an added mask, or one of least numbers."""
    if kind == "boolean":
        mask = torch.rand(LENGTH, LENGTH) > 0.4
        mask[3], mask[5, : LENGTH // 2] = False, False
        return mask.to(device)
    if kind == "least":
        hidden = mask_of("boolean", dtype, "cpu")
        assert hidden is not None
        return torch.zeros(LENGTH, LENGTH, dtype=dtype).masked_fill(~hidden, torch.finfo(dtype).min).to(device)
    return torch.randn(LENGTH, LENGTH, dtype=dtype, device=device) if kind == "added" else None


def by_blocks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grad: Tensor, *, is_causal: bool) -> list[Tensor]:
    """Return the result and the gradients, from two blocks of keys; from pieces of queries, too, if causal."""
    half = LENGTH // 2
    halves = (slice(0, half), slice(half, LENGTH))
    visits: list[tuple[slice, slice, bool]] = [(slice(None), block, False) for block in halves]
    if is_causal:
        visits = [(halves[0], halves[0], True), (halves[1], halves[0], False), (halves[1], halves[1], True)]

    def block_of(rows: slice, block: slice, causal: bool) -> list[Any]:
        hidden = None if mask is None else mask[..., rows, block]
        return [query[..., rows, :], key[..., block, :], value[..., block, :], hidden, causal, SCALE]

    results: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for visit in visits:
        start, found = visit[0].start or 0, attention_block(*block_of(*visit))
        results[start] = join_blocks(*results[start], *found) if start in results else found
    result, top, total = (torch.cat([results[start][place] for start in sorted(results)], dim) for place, dim in enumerate((-2, -1, -1)))
    result, totals = result.to(query.dtype), row_totals(top, total)
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for rows, block, causal in visits:
        given = (grad[..., rows, :], result[..., rows, :], *totals[..., rows, :].unbind(-1))
        added = attention_block_backward(*given, *block_of(rows, block, causal))
        for whole, place, part in zip(grads, (rows, block, block), added, strict=True):
            whole[..., place, :] += part
    return [result, *grads]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "added", "least"])
@pytest.mark.parametrize("shape", ["grouped", "narrow_values", *slow("plain", "one_head_of_keys")])
@pytest.mark.parametrize("dtype", [torch.float64, *slow(torch.float32, torch.bfloat16)])
def test_blocks_together_are_the_whole(shape: str, kind: str, dtype: torch.dtype, device: str) -> None:
    tolerance = TOLERANCES[dtype]
    query, key, value = operands(shape, dtype, device)
    mask = mask_of(kind, dtype, device)
    is_grouped = query.shape[-3] != key.shape[-3]
    with sdpa_kernel(SDPBackend.MATH):  # gradients of fused kernels are wrong for rows whose scores are all the least number
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=kind == "causal", scale=SCALE, enable_gqa=is_grouped
        )
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), grad)
    with torch.no_grad():
        found = by_blocks(query, key, value, mask, grad, is_causal=kind == "causal")
    for ours, theirs in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_kernel_is_taken_where_there_is_one(device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    query, key, value = (x.detach() for x in operands("plain", dtype, device))
    result = flash_attention(query, key, value, None, is_causal=True, scale=SCALE)
    assert result is not None
    assert result[1].shape == query.shape[:-1]
    assert flash_attention_gradients(query, *result, query, key, value, None, is_causal=True, scale=SCALE) is not None
    narrow = value[..., :5]
    assert flash_attention(query, key, narrow, None, is_causal=False, scale=SCALE) is None
    assert flash_attention_gradients(narrow, narrow, result[1], query, key, narrow, None, is_causal=False, scale=SCALE) is None


def test_rows_without_keys() -> None:
    """They have a total of zero and a result of zero, by themselves and together with others."""
    query, key, value = (x.detach() for x in operands("plain", torch.float64, "cpu"))
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    empty = attention_block(query, key, value, hidden, False, SCALE)
    assert not empty[0].any()
    assert (empty[1] == -torch.inf).all()
    seen = attention_block(query, key, value, None, False, SCALE)
    for one, other in itertools.permutations((empty, seen)):
        for ours, theirs in zip(join_blocks(*one, *other), seen, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert not join_blocks(*empty, *empty)[0].any()
    gradients = attention_block_backward(query, empty[0], *row_totals(*empty[1:]).unbind(-1), query, key, value, hidden, False, SCALE)
    assert not any(gradient.any() for gradient in gradients)


def test_fakes_have_the_shapes_and_strides_of_results() -> None:
    for shape, dtype in itertools.product(SHAPES, (torch.float64, torch.bfloat16)):
        real = [x.detach() for x in operands(shape, dtype, "cpu")]
        meta = [x.to("meta") for x in real]
        block, fake = attention_block(*real, None, False, SCALE), attention_block(*meta, None, False, SCALE)
        rest, fake_rest = (attention_block_backward(each[0], *each, *of, None, False, SCALE) for each, of in ((block, real), (fake, meta)))
        joined, fake_joined = join_blocks(*block, *block), join_blocks(*fake, *fake)
        for ours, theirs in zip((*block, *rest, *joined), (*fake, *fake_rest, *fake_joined), strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
