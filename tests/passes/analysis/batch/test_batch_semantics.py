"""Claims about results over microbatches hold: each claim is executed on parts of a batch and on the whole.

Every rule is met by one operation at least, with the batch where it stays and, where there is such a thing, with the batch where it is
lost. The claim expected is written beside the operation, so that a rule that gives up is noticed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import ConfigError, partition
from partitioner.tracing.trace import trace
from passes.analysis.batch_semantics import EXCEPTIONS
from passes.graph.schemas import packet
from passes.ir.graph import ModelGraph

BATCH = 5
PARTS = (2, 3)


class Function(nn.Module):
    """A function of rows, a table and labels as a module."""

    table: Tensor

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("table", torch.randn(6, 6, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.function(x, labels, self.table)


def rows(batch: int) -> tuple[Tensor, Tensor]:
    """Return ``(batch, 4, 6)`` numbers and ``(batch,)`` classes below 6."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, 4, 6, generator=generator, dtype=torch.float64), torch.randint(6, (batch,), generator=generator)


def image(x: Tensor) -> Tensor:
    """Return a tensor of shape ``(batch, 2, 3, 4)``."""
    return x.reshape(x.shape[0], 2, 3, 4)


def evaluate(graph: ModelGraph, model: Function, x: Tensor, labels: Tensor) -> tuple[Any, ...]:
    values = {"x": x, "labels": labels, "batch": x.shape[0], "b_table": model.table, **graph.constants}
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    return tuple(graph.module(*(values[name] for name in names)))


def put_together(combine: str, dimension: int | None, parts: list[Any]) -> Any:
    """Combine the parts as a claim says."""
    if combine == "concatenate":
        return torch.cat(parts, dim=dimension or 0)
    if combine == "same":
        return parts[0]
    weights = [part / BATCH if combine == "mean" else 1 for part in PARTS]
    return sum(weight * part for weight, part in zip(weights, parts, strict=True))


KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "reshape of no elements": lambda x, y, w: x[:, 4:].transpose(0, 1).reshape(0, x.shape[0], 2, 3),
    "add": lambda x, y, w: x + w[:4],
    "mul_rows": lambda x, y, w: x * x[:, :1] - x.mean(1, keepdim=True),
    "where": lambda x, y, w: torch.where(x > 0, x, w[:4].exp()),
    "clamp": lambda x, y, w: x.clamp(-1, 1).pow(2).rsqrt(),
    "in_place": lambda x, y, w: (x * 1).add_(1).relu_().mul_(w[:4]),
    "dropout_without_effect": lambda x, y, w: F.dropout(x, 0.0),
    "to": lambda x, y, w: x.float().double().type_as(w),
    "masked_fill": lambda x, y, w: x.masked_fill(w[:4] > 0, 2.0),
    "view": lambda x, y, w: x.view(x.shape[0], 24).view(-1, 6).view(-1, 2, 12),
    "view_merged": lambda x, y, w: x.view(-1, 6) @ w,
    "view_behind": lambda x, y, w: x.transpose(0, 1).reshape(-1, 6).view(4, x.shape[0], 6).transpose(0, 1),
    "flatten": lambda x, y, w: x.flatten(1).unflatten(1, (4, 6)).flatten(0, 1),
    "permute": lambda x, y, w: x.permute(2, 0, 1).movedim(1, 0).swapaxes(1, 2),
    "transpose": lambda x, y, w: (x.mT, x[:, 0].t(), x.transpose(0, 1)),
    "unsqueeze": lambda x, y, w: x.unsqueeze(0).unsqueeze(-1).squeeze(0).squeeze(),
    "expand": lambda x, y, w: w.unsqueeze(0).expand(x.shape[0], -1, -1) @ x.transpose(1, 2),
    "repeat": lambda x, y, w: (x.repeat(1, 2, 1), w.repeat(x.shape[0], 1, 1), x.repeat_interleave(2, 0), x.repeat_interleave(2, dim=1)),
    "select": lambda x, y, w: x[:, 0] + x[..., 1].sum(1, keepdim=True) + x.select(1, 2),
    "slice": lambda x, y, w: (x[:, 1:3], x[:, ::2], x[: x.shape[0]]),
    "narrow": lambda x, y, w: x.narrow(1, 1, 2),
    "split": lambda x, y, w: (*x.split(3, dim=2), *x.chunk(2, dim=1), *x.split([1, 5], dim=-1), *x.tensor_split(2, dim=1)),
    "unbind": lambda x, y, w: x.unbind(1),
    "cat": lambda x, y, w: torch.cat([x, x + 1, w[:4].expand(x.shape[0], 4, 6)], dim=1),
    "stack": lambda x, y, w: (torch.stack([x, x + 1], dim=1), torch.stack([x, x], dim=-1)),
    "flip": lambda x, y, w: x.flip(1, 2) + x.roll(1, 1),
    "pad": lambda x, y, w: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 1, 0)), F.pad(image(x), (1, 1, 1, 1), mode="reflect")),
    "triangle": lambda x, y, w: x.tril() + x.triu(1),
    "diff": lambda x, y, w: x.diff(dim=1),
    "unfold": lambda x, y, w: x.unfold(2, 3, 2),
    "index_select": lambda x, y, w: (x.index_select(2, torch.tensor([0, 2])), w.index_select(0, y)),
    "slice_scatter": lambda x, y, w: torch.slice_scatter(x, x[:, :2] * 2, 1, 0, 2) + torch.select_scatter(x, x[:, 0], 1, 2),
    "written_slices": lambda x, y, w: write_slices(x),
    "row_number_picks": lambda x, y, w: (x[torch.arange(x.shape[0]), y % 4], x[torch.arange(x.shape[0]), :, y]),
    "table_of_rows": lambda x, y, w: (w[y], F.embedding(y, w), F.one_hot(y, 6)),
    "picked_columns": lambda x, y, w: (x[:, torch.tensor([0, 3])], x[:, [0, 1], [2, 3]], x[:, 0, torch.tensor([[1], [2]])]),
    "created": lambda x, y, w: (torch.zeros(x.shape[0], 3), torch.ones_like(x), x.new_full((x.shape[0], 2), 7.0)),
    "counted_positions": lambda x, y, w: torch.arange(4) + torch.linspace(0, 1, 4),
    "gather": lambda x, y, w: x.gather(2, y.view(-1, 1, 1).expand(-1, 4, 1)),
    "scatter": lambda x, y, w: torch.zeros_like(x).scatter(2, y.view(-1, 1, 1).expand(-1, 4, 1), x),
    "reduce": lambda x, y, w: (x.sum(1), x.mean(-1, keepdim=True), x.amax((1, 2)), x.std(1), x.norm(dim=2), x.logsumexp(1), x.prod(2)),
    "compare": lambda x, y, w: (x.max(1), x.min(2), x.argmax(-1), (x > 0).any(1), x.median(dim=1), torch.maximum(x, w[:4]), x.max(w[:4])),
    "along": lambda x, y, w: (x.softmax(-1), x.log_softmax(1), x.cumsum(1), x.sort(-1), x.topk(2, dim=2), x.argsort(1), F.glu(x)),
    "compared_vectors": lambda x, y, w: (
        F.cosine_similarity(x, w[:4]), F.cosine_similarity(x, x.sin(), dim=-1), F.pairwise_distance(x, w[:4]),
        F.pairwise_distance(x[:, 0], x[:, 1], keepdim=True), F.logsigmoid(x),
    ),
    "linear": lambda x, y, w: F.linear(x, w, w[0]),
    "matmul": lambda x, y, w: (x @ w, w[:4].T @ x, x @ x.transpose(1, 2), x @ w[0], torch.bmm(x, x.mT), torch.mm(x[:, 0], w)),
    "addmm": lambda x, y, w: (torch.addmm(w[0], x[:, 0], w), torch.baddbmm(x @ x.mT, x, x.mT)),
    "einsum": lambda x, y, w: (torch.einsum("bij,jk->bik", x, w), torch.einsum("...ij,...kj->...ik", x, x + 1), torch.einsum("bij->b", x)),
    "attention": lambda x, y, w: F.scaled_dot_product_attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), w[:4, :4]),
    "row_masked_attention": lambda x, y, w: F.scaled_dot_product_attention(
        x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1), (x[:, :, 0] > -9).view(-1, 1, 1, 4)
    ),
    "convolution": lambda x, y, w: (F.conv1d(x, w[:, :4, None]), F.conv2d(image(x), w[:3, :2, None, None]),
        F.conv_transpose1d(x, w[:4, :, None])),
    "normalization": lambda x, y, w: (F.layer_norm(x, (6,)), F.layer_norm(x, (4, 6)),
        F.group_norm(x, 2), F.rms_norm(x, (6,)), F.instance_norm(x)),
    "batch_norm_in_evaluation": lambda x, y, w: F.batch_norm(x, w[0, :4], w[1, :4].exp()),
    "pooling": lambda x, y, w: (
        F.max_pool1d(x, 2), F.avg_pool1d(x, 2), F.max_pool2d(image(x), 2), F.avg_pool2d(image(x), 2), F.adaptive_avg_pool2d(image(x), 1),
        F.adaptive_max_pool1d(x, 2), F.lp_pool2d(image(x), 2.0, 2),
    ),
    "resampling": lambda x, y, w: (
        F.interpolate(image(x), scale_factor=2), F.interpolate(image(x), (5, 5), mode="bilinear"), F.interpolate(x, 3, mode="linear"),
        F.pixel_shuffle(x.view(-1, 4, 2, 3), 2), F.grid_sample(image(x), image(x).permute(0, 2, 3, 1)[:, :, :, :2].contiguous()),
    ),
    "losses_of_rows": lambda x, y, w: (F.cross_entropy(x[:, 0], y, reduction="none"), F.mse_loss(x, x * 2, reduction="none")),
    "batch_size": lambda x, y, w: (x, torch.zeros(x.shape[0] * 2)),
    "vmap": lambda x, y, w: torch.vmap(lambda row: (row @ w).relu())(x),
}  # fmt: skip
"""Microbatches concatenate, or are the same."""

MEANS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "mean": lambda x, y, w: x.mean(),
    "mean_over_rows": lambda x, y, w: x.mean(0).reshape(-1)[1:3].unsqueeze(0),
    "sum_by_batch": lambda x, y, w: x.sum() / x.shape[0],
    "combination": lambda x, y, w: 2 * x.mean() - x.pow(2).mean() / 3 + w.sum(),
    "mse": lambda x, y, w: (
        F.mse_loss(x, w[:4].expand_as(x)) + F.l1_loss(x, x * 2) + F.smooth_l1_loss(x, x.sin()) + F.huber_loss(x, x.sin())
    ),
    "binary": lambda x, y, w: F.binary_cross_entropy_with_logits(x, x.sigmoid()) + F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
    "divergence": lambda x, y, w: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
    "cross_entropy": lambda x, y, w: F.cross_entropy(x[:, 0], y),
    "scaled_cross_entropy": lambda x, y, w: F.cross_entropy(x[:, 0], y).double() * 0.5 + F.nll_loss(x[:, 1].log_softmax(-1), y),
    "probabilities": lambda x, y, w: F.cross_entropy(x[:, 0], x[:, 1].softmax(-1)),
    "factor_and_term_without_rows": lambda x, y, w: w.mean() * F.cross_entropy(x[:, 0], y) / w[0].exp().sum() + w.sum(),
    "sum_of_a_list": lambda x, y, w: sum([F.cross_entropy(x[:, 0], y), w[0, 0] * x.mean()]),
    "cross_entropy_without_rows": lambda x, y, w: F.cross_entropy(x[:, 0], y) + F.cross_entropy(w, torch.arange(6)),
    "never_ignored": lambda x, y, w: (
        F.cross_entropy(x[:, 0], x[:, 1].argmax(-1))
        + F.cross_entropy(x[:, 0], x[:, 1].max(-1).indices)
        + F.cross_entropy(x.mT, x.topk(2, dim=-1).indices[..., 0])
        + F.nll_loss(x[:, 1].log_softmax(-1), (x[:, 0, 0] > 0).long())
        + F.cross_entropy(x[:, 0], torch.full((x.shape[0],), 3))
    ),
    "margins": lambda x, y, w: (
        F.multi_margin_loss(x[:, 0], y)
        + F.multilabel_margin_loss(x[:, 0], y.unsqueeze(1).expand(-1, 6))
        + F.hinge_embedding_loss(x, x.sign())
    ),
    "vectors": lambda x, y, w: (
        F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]) + F.cosine_embedding_loss(x[:, 0], x[:, 1], y.sign() * 2 - 1)
    ),
}

SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "sum": lambda x, y, w: x.sum(),
    "sum_over_rows": lambda x, y, w: x.sum(0) * 2,
    "count": lambda x, y, w: (y > 2).sum(),
    "mean_times_batch": lambda x, y, w: x.mean() * x.shape[0],
    "cross_entropy": lambda x, y, w: F.cross_entropy(x[:, 0], y, reduction="sum"),
    "product_over_rows": lambda x, y, w: (x[:, 0].T @ x[:, 0], torch.einsum("bi,bj->ij", x[:, 0], x[:, 1])),
    "sum_of_sums": lambda x, y, w: x.sum() - x.pow(2).sum(),
}

MIXED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "centred": lambda x, y, w: x - x.mean(0),
    "softmax": lambda x, y, w: x.softmax(0),
    "cumsum": lambda x, y, w: x.cumsum(0),
    "sort": lambda x, y, w: x.sort(0).values,
    "flip": lambda x, y, w: x.flip(0),
    "roll": lambda x, y, w: (x.roll(1, 0), x.roll(1)),
    "one_row": lambda x, y, w: x[0],
    "all_but_one_row": lambda x, y, w: x[: x.shape[0] - 1],
    "half_of_the_rows": lambda x, y, w: x[: x.shape[0] // 2],
    "largest": lambda x, y, w: (x.max(), x.amax(0), x.argmax(), x.norm(), x.std(0), x.prod(0), (x > 0).any(0)),
    "compared_rows": lambda x, y, w: (F.cosine_similarity(x[:, :1, 0], x[:, 0, 0], dim=-1), F.cosine_similarity(x, x.sin(), dim=0)),
    "products_of_rows": lambda x, y, w: (x[:, 0] @ x[:, 0].T, torch.einsum("bi,ci->bc", x[:, 0], x[:, 1])),
    "transposed": lambda x, y, w: x.transpose(0, 1).reshape(-1, 6),
    "reshaped": lambda x, y, w: x.reshape(6, -1),
    "row_numbers": lambda x, y, w: (torch.arange(x.shape[0]), x[:, 0, 0] + torch.arange(x.shape[0])),
    "rows_by_other_rows": lambda x, y, w: (x[y * 0], x[torch.arange(x.shape[0]) * 0], x.index_select(0, y * 0)),
    "divided_by_rows": lambda x, y, w: x / x.shape[0],
    "filled_with_rows": lambda x, y, w: torch.full((2,), x.shape[0]),
    "positions_by_row": lambda x, y, w: x[:, 0] + w.repeat(2, 1)[: x.shape[0]] if x.shape[0] < 13 else x[:, 0],
    "concatenated_rows": lambda x, y, w: torch.cat([x, x]),
    "padded_rows": lambda x, y, w: F.pad(x, (0, 0, 0, 0, 1, 0)),
    "repeated_batch": lambda x, y, w: x.repeat(2, 1, 1),
    "statistics_of_rows": lambda x, y, w: F.layer_norm(x.transpose(0, 2), (x.shape[0],)),
    "total_in_a_function": lambda x, y, w: (x.mean().sqrt(), x.mean() * x.sum(), x.mean() / (y > 2).sum(), x.sum() + 1, x.mean() + x.sum()),
    "totals_of_unlike_weight": lambda x, y, w: F.cross_entropy(x[:, 0], y) + 1,
    "unknown_targets": lambda x, y, w: (
        F.cross_entropy(x[:, 0], x[:, 1].argmax(-1) - 1, ignore_index=-1),
        F.cross_entropy(x[:, 0], x[:, 1].argmax(-1), ignore_index=0),
        F.cross_entropy(x[:, 0], x[:, 1].argmax(-1), weight=w[0]),
        F.cross_entropy(x[:, 0], x[:, 1].argmax(-1).masked_fill(x[:, 0, 0] > 0, -100)),
        F.cross_entropy(x[:, 0], x[:, 1].sort(-1).values[:, 0].long()),
    ),
    "mean_times_its_zeros": lambda x, y, w: F.cross_entropy(x[:, 0], y) + x.mean() * torch.zeros_like(F.cross_entropy(x[:, 0], y)),
    "random_rows": lambda x, y, w: x[torch.randperm(x.shape[0])],
    "unknown_operation": lambda x, y, w: torch.linalg.svdvals(x[:, 0]),
    "written_through_row": lambda x, y, w: write_row(x),
}


def write_slices(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 1]
    out[..., 2:4] += x[..., :2]
    return out


def write_row(x: Tensor) -> Tensor:
    out = x.clone()
    out[0] = 0
    return out


def traced(function: Callable[..., Any]) -> tuple[ModelGraph, Function]:
    model = Function(function)
    return trace(model, rows(BATCH)), model


def assert_claims_hold(graph: ModelGraph, model: Function) -> None:
    x, labels = rows(BATCH)
    whole = evaluate(graph, model, x, labels)
    parts = [evaluate(graph, model, *part) for part in zip(x.split(PARTS), labels.split(PARTS), strict=True)]
    for position, output in enumerate(graph.outputs):
        if output.combine == "mixed" or output.node is None:
            continue
        together = put_together(output.combine, output.batch_dim, [part[position] for part in parts])
        torch.testing.assert_close(torch.as_tensor(together), torch.as_tensor(whole[position]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KEPT)
def test_rows_are_kept(name: str) -> None:
    graph, model = traced(KEPT[name])
    assert graph.batch is not None, graph.notes
    assert {output.combine for output in graph.outputs} <= {"concatenate", "same"}, graph.notes
    assert_claims_hold(graph, model)


@pytest.mark.parametrize(("expected", "name"), [("mean", name) for name in MEANS] + [("sum", name) for name in SUMS])
def test_totals(expected: str, name: str) -> None:
    graph, model = traced({"mean": MEANS, "sum": SUMS}[expected][name])
    assert {output.combine for output in graph.outputs} == {expected}, graph.notes
    assert_claims_hold(graph, model)


@pytest.mark.parametrize("name", MIXED)
def test_what_cannot_be_cut_is_named(name: str) -> None:
    graph, _ = traced(MIXED[name])
    assert {output.combine for output in graph.outputs} == {"mixed"}
    assert "test_batch_semantics.py:" in " ".join(graph.notes)


@pytest.mark.slow
def test_every_exception_is_met() -> None:
    """Of every exception from the sharding rules, one operation at least is traced above."""
    exceptions = set(EXCEPTIONS.values())
    graphs = [traced(function)[0] for function in (*KEPT.values(), *MEANS.values(), *SUMS.values())]
    graphs.append(trace(nn.BatchNorm1d(4, momentum=None).train(), (torch.randn(BATCH, 4),)))
    for graph in graphs:
        exceptions -= {EXCEPTIONS.get(target) for node in graph.computing_nodes() for target in (node.target, packet(node.target))}
    assert not exceptions


def test_microbatches_that_the_model_computes_otherwise_are_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x) * 2 if x.shape[0] > 2 else self.first(x))
            return y

    with pytest.raises(ConfigError, match="something else for 2 rows than for 4"):
        partition(Branching(), 2, "pipeline", example_inputs=(torch.randn(4, 4),), n_microbatches=2)
