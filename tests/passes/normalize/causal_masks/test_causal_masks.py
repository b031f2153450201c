"""Masks that are computed from positions: causal ones, and those that hide nothing, lose their tensors; all others stay."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.graph.schemas import bound_arguments
from passes.ir.graph import ModelGraph
from passes.normalize import causal_masks
from tests.support.running.slow_values import slow
from tests.support.running.traced import assert_equal_runs, run_model, run_traced

LENGTH, WIDTH, HEADS = 6, 8, 2

aten = torch.ops.aten


class Masked(nn.Module):
    """Attention with a mask of two positions, as libraries build them: of the whole batch, for each of its rows."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor], keys: int = LENGTH) -> None:
        super().__init__()
        self.mask, self.keys = mask, keys
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.project(x).chunk(3, 2))
        rows, columns = torch.arange(x.shape[1], device=x.device), torch.arange(self.keys, device=x.device)
        mask = self.mask(rows.view(-1, 1), columns.view(1, -1)).expand(x.shape[0], 1, -1, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k[:, :, : self.keys], v[:, :, : self.keys], attn_mask=mask, scale=0.3)
        return mixed.transpose(1, 2).flatten(2)


def traced(model: nn.Module, rows: int = 5) -> ModelGraph:
    """Trace, and compare with the model for a batch of so many rows."""
    torch.manual_seed(0)
    graph = trace(model.double(), (torch.randn(4, LENGTH, WIDTH, dtype=torch.float64),))
    args = (torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64),)
    assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))
    return graph


def attention_of(graph: ModelGraph) -> fx.Node:
    (node,) = (node for node in graph.computing_nodes() if node.target is aten.scaled_dot_product_attention.default)
    return node


def added(shown: Tensor, value: float) -> Tensor:
    return torch.zeros(shown.shape, dtype=torch.float64, device=shown.device).masked_fill(~shown, value)


CAUSAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "boolean": lambda rows, columns: columns <= rows,
    "both_ways": lambda rows, columns: (columns <= rows) & (rows >= 0),
    "infinite": lambda rows, columns: added(columns <= rows, -math.inf),
    "least_number": lambda rows, columns: added(columns <= rows, torch.finfo(torch.float64).min),
    "triangle": lambda rows, columns: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
}

OTHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "strict": lambda rows, columns: (columns < rows) | (columns == 0),
    "window": lambda rows, columns: (columns <= rows) & (columns > rows - 3),
    "prefix": lambda rows, columns: (columns <= rows) | (columns < 2),
    "backwards": lambda rows, columns: columns >= rows,
    "soft": lambda rows, columns: added(columns <= rows, -1e4),
    "slopes": lambda rows, columns: added(columns <= rows, -math.inf) - (rows - columns).abs() / 4,
}


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
def test_a_causal_mask_is_said_to_be_one(mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = traced(Masked(mask))
    arguments = bound_arguments(attention_of(graph))
    assert arguments["is_causal"]
    assert arguments["attn_mask"] is None
    assert arguments["scale"] == 0.3
    assert not any(node.target is aten.arange.default for node in graph.computing_nodes()), "what the mask alone read is gone"


@pytest.mark.parametrize("mask", [CAUSAL["triangle"], *slow(OTHER["window"])])
def test_lengths_that_were_open_in_the_trace(mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    """They are numbers when masks are looked at, and yet sizes of a trace, not of Python."""
    model, x = Masked(mask).double(), torch.randn(4, LENGTH, WIDTH, dtype=torch.float64)
    pm = partition(model, 2, "model", example_inputs=(x,), progress=False)
    torch.testing.assert_close(pm(x), model(x))


def test_a_mask_that_hides_nothing_is_none() -> None:
    arguments = bound_arguments(attention_of(traced(Masked(lambda rows, columns: columns >= rows * 0))))
    assert not arguments["is_causal"]
    assert arguments["attn_mask"] is None


@pytest.mark.parametrize("mask", OTHER.values(), ids=OTHER)
def test_any_other_mask_stays(mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert isinstance(bound_arguments(attention_of(traced(Masked(mask))))["attn_mask"], fx.Node)


def test_queries_and_keys_of_unlike_number() -> None:
    """``is_causal`` counts both from the first: a mask that does so, too, is causal; one that ends with the last query is not."""
    assert bound_arguments(attention_of(traced(Masked(CAUSAL["boolean"], keys=4))))["is_causal"]
    assert not bound_arguments(attention_of(traced(Masked(lambda rows, columns: columns <= rows - 2 + 0 * columns, keys=4))))["is_causal"]


def test_a_mask_that_depends_on_an_input_stays() -> None:
    class Padded(Masked):
        def forward(self, x: Tensor) -> Tensor:
            self.mask = lambda rows, columns: (columns <= rows) & (x[0, 0, 0] > -100)
            return super().forward(x)

    assert isinstance(bound_arguments(attention_of(traced(Padded(CAUSAL["boolean"]))))["attn_mask"], fx.Node)


LATE: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda x: torch.arange(x.shape[0]) > 7,
    "sum_so_far": lambda x: torch.ones(x.shape[0], dtype=torch.long).cumsum(0) > 7,
    "backwards": lambda x: torch.arange(x.shape[0]).flip(0) > 7,
    "first_of_more": lambda x: torch.arange(2 * x.shape[0])[: x.shape[0]] > 7,
    "picked": lambda x: (torch.arange(40) > 7)[torch.arange(x.shape[0])],
    "repeated": lambda x: (torch.arange(6) > 3).repeat(x.shape[0])[torch.arange(x.shape[0])],
    "filled": lambda x: torch.full((x.shape[0],), x.shape[0]) > 7,
    "one_number": lambda x: torch.full((1,), x.shape[0]) > 7,
    "product": lambda x: torch.ones(1) * x.shape[0] > 7,
    "mean": lambda x: torch.ones(x.shape[0]) / x.shape[0] < 0.15,
    "largest": lambda x: torch.arange(x.shape[0]).max(0).values > 6,
    "best": lambda x: torch.arange(x.shape[0]).topk(1).values > 6,
    "statistics": lambda x: torch.var_mean(torch.arange(x.shape[0]).double())[1] > 3,
    "sum": lambda x: torch.ones(x.shape[0]).sum(0) > 7,
}
QUICK = ("numbers", "first_of_more", "one_number", "product", "statistics", "sum", "sum_so_far")
"""True for late rows, or for large batches."""


@pytest.mark.parametrize("late", [pytest.param(LATE[name], marks=() if name in QUICK else pytest.mark.slow, id=name) for name in LATE])
def test_a_mask_that_is_another_for_late_rows_or_large_batches_stays(late: Callable[[Tensor], Tensor]) -> None:
    """It is causal for small batches."""

    class ByRow(Masked):
        def forward(self, x: Tensor) -> Tensor:
            self.mask = lambda rows, columns: (columns <= rows) | late(x).view(-1, 1, 1, 1)
            return super().forward(x)

    assert isinstance(bound_arguments(attention_of(traced(ByRow(CAUSAL["boolean"]), rows=9)))["attn_mask"], fx.Node)


def test_a_mask_of_positions_and_the_size_of_the_batch_stays() -> None:
    class Shifted(Masked):
        def forward(self, x: Tensor) -> Tensor:
            self.mask = lambda rows, columns: columns <= rows + x.shape[0] // 8
            return super().forward(x)

    assert isinstance(bound_arguments(attention_of(traced(Shifted(CAUSAL["boolean"]), rows=9)))["attn_mask"], fx.Node)


def test_as_many_queries_as_rows_of_the_batch() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.latents = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, 5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            shown = torch.arange(5).view(1, -1) < 4
            return nn.functional.scaled_dot_product_attention(self.project(x)[None, :, 0], self.latents, self.latents, attn_mask=shown)[0]

    assert isinstance(bound_arguments(attention_of(traced(Latents())))["attn_mask"], fx.Node)


def test_operators_of_others_are_not_run() -> None:
    ran: list[bool] = []

    @torch.library.custom_op("causal_masks_test::shown", mutates_args=())
    def shown(rows: Tensor) -> Tensor:
        ran.append(True)
        return rows >= rows.t()

    shown.register_fake(lambda rows: rows.new_empty(rows.shape[0], rows.shape[0], dtype=torch.bool))
    model = Masked(lambda rows, columns: shown(rows)).double()
    graph = trace(model, (torch.randn(4, LENGTH, WIDTH, dtype=torch.float64),))
    assert isinstance(bound_arguments(attention_of(graph))["attn_mask"], fx.Node)
    assert not ran


def test_a_mask_that_cannot_be_computed_stays() -> None:
    """Here, for an index that is too large; the model says so when it runs."""
    model = Masked(lambda rows, columns: torch.arange(LENGTH)[columns + 1] <= rows).double()
    graph = trace(model, (torch.randn(4, LENGTH, WIDTH, dtype=torch.float64),))
    assert isinstance(bound_arguments(attention_of(graph))["attn_mask"], fx.Node)


def test_positions_that_both_sides_read() -> None:
    """Values that the mask reads twice are erased once."""

    class Same(Masked):
        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(LENGTH)
            self.mask = lambda rows, columns: positions.view(-1, 1) >= positions
            return super().forward(x)

    assert bound_arguments(attention_of(traced(Same(CAUSAL["boolean"]))))["is_causal"]


def test_the_mask_of_the_library() -> None:
    """Transformers picks sequences by the number of the row, from equal rows."""

    class ByRow(Masked):
        def forward(self, x: Tensor) -> Tensor:
            sequence = torch.arange(LENGTH).unsqueeze(0).expand(x.shape[0], -1).cumsum(1) * 0
            index = torch.arange(x.shape[0]).view(-1, 1, 1)
            self.mask = lambda rows, columns: ((columns <= rows) & (sequence[index, rows] == sequence[index, columns])).unsqueeze(1)
            return super().forward(x)

    assert bound_arguments(attention_of(traced(ByRow(CAUSAL["boolean"]))))["is_causal"]


def test_a_large_mask_is_computed_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of six queries is 6 bytes of a boolean mask: blocks of some of them."""
    monkeypatch.setattr(causal_masks, "LARGEST", 8 * LENGTH)
    assert bound_arguments(attention_of(traced(Masked(CAUSAL["boolean"]))))["is_causal"]
    assert bound_arguments(attention_of(traced(Masked(lambda rows, columns: (columns <= rows) & (rows >= 0)))))["is_causal"]
    window = Masked(lambda rows, columns: (columns <= rows) & (columns > rows - LENGTH + 1))  # but for one element, of the last query
    assert isinstance(bound_arguments(attention_of(traced(window)))["attn_mask"], fx.Node)
    everything = bound_arguments(attention_of(traced(Masked(lambda rows, columns: columns >= 0 * rows))))
    assert everything["attn_mask"] is None
    assert not everything["is_causal"]


def test_a_mask_that_is_too_large_to_look_at_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_masks, "LARGEST", LENGTH)
    assert isinstance(bound_arguments(attention_of(traced(Masked(CAUSAL["boolean"]))))["attn_mask"], fx.Node)


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_on_meta(inside: bool) -> None:
    """Also where meta is the device of all tensors that are made."""
    model = Masked(CAUSAL["boolean"]).to("meta")
    with torch.device("meta") if inside else contextlib.nullcontext():
        graph = trace(model, (torch.empty(4, LENGTH, WIDTH, device="meta"),))
    assert bound_arguments(attention_of(graph))["is_causal"]


def test_a_mask_that_cannot_be_computed_here_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(causal_masks, "_call", fail)
    graph = traced(Masked(lambda rows, columns: columns <= rows))
    assert bound_arguments(attention_of(graph))["attn_mask"] is not None
    assert ["RuntimeError: no kernel" in note for note in graph.notes] == [True]
