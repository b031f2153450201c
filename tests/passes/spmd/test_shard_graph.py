"""Random graphs, random axes over random meshes: results and gradients are always those of the unpartitioned model.

Hypothesis draws a program of operations that have rules, and which axes each mesh dimension cuts, whether that is wise or not.
"""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.analysis.axis_names import batch_axes
from passes.ir.comm.functional import COLLECTIVES
from passes.ir.mesh import Mesh
from passes.spmd.shard_graph import AxisCut, cut_axes
from tests.support.running.lockstep import run_cut
from tests.support.running.traced import assert_equal_runs, run_model

BATCH_SIZE = 6
"""Sizes that two, three and two times three ranks divide."""

LARGEST = 1500
"""Elements of a value."""

Step = Callable[[Sequence[Tensor], Sequence[nn.Parameter]], Tensor]
"""A new value from the values so far and the model's parameters."""


class Drawn(nn.Module):
    """A drawn program; it returns its last values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], steps: Sequence[Step]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes)
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [x]
        weights = list(self.weights)
        for step in self.steps:
            values.append(step(values, weights))
        return tuple(values[-3:])


class Writer:
    """Draws one step after the other; shapes are those of real values."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self._draw = draw
        self.shapes: list[tuple[int, ...]] = []
        self.steps: list[Step] = []
        self.values: list[Tensor] = [torch.ones(BATCH_SIZE, 4, 6)]

    def pick(self, count: int) -> int:
        return self._draw(st.integers(0, count - 1))

    def weight(self, *shape: int) -> int:
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def write(self, step: Step) -> None:
        value = step(self.values, [torch.ones(shape) for shape in self.shapes])  # type: ignore[misc]
        if 0 < value.numel() <= LARGEST and value.dim() <= 5:
            self.steps.append(step)
            self.values.append(value)

    def step(self) -> None:
        place = len(self.values) - 1 - min(self.pick(4), len(self.values) - 1)
        writers = (self._linear, self._elementwise, self._with_weight, self._permute, self._merge, self._split, self._reduce,
                   self._softmax, self._layer_norm, self._matmul, self._view_of_batch)  # fmt: skip
        writers[self.pick(len(writers))](place, self.values[place])

    def _linear(self, place: int, value: Tensor) -> None:
        if value.dim() == 0:
            return
        out = (4, 5, 6)[self.pick(3)]
        weight = self.weight(out, value.shape[-1])
        bias = self.weight(out) if self.pick(2) else None
        self.write(lambda values, weights: F.linear(values[place], weights[weight], None if bias is None else weights[bias]))

    def _elementwise(self, place: int, value: Tensor) -> None:
        alike = [other for other, each in enumerate(self.values) if each.shape == value.shape]
        other = alike[self.pick(len(alike))]
        function = (torch.add, torch.mul, lambda one, _: torch.relu(one))[self.pick(3)]
        self.write(lambda values, _: function(values[place], values[other]))

    def _with_weight(self, place: int, value: Tensor) -> None:
        shape = tuple(value.shape)[-1 - self.pick(2) :]
        if len(shape) == value.dim() or not shape:
            return
        weight = self.weight(*(size if self.pick(4) else 1 for size in shape))
        function = (torch.add, torch.mul)[self.pick(2)]
        self.write(lambda values, weights: function(values[place], weights[weight]))

    def _permute(self, place: int, value: Tensor) -> None:
        if value.dim() > 1:
            one, other = self.pick(value.dim()), self.pick(value.dim())
            self.write(lambda values, _: values[place].transpose(one, other))

    def _merge(self, place: int, value: Tensor) -> None:
        if value.dim() > 1:
            start = self.pick(value.dim() - 1)
            self.write(lambda values, _: values[place].flatten(start, start + 1))

    def _split(self, place: int, value: Tensor) -> None:
        dims = [(dim, part) for dim, size in enumerate(value.shape) for part in (2, 3) if size % part == 0 and size > part]
        if dims:
            dim, part = dims[self.pick(len(dims))]
            sizes = [(part, -1), (-1, part)][self.pick(2)]
            self.write(lambda values, _: values[place].unflatten(dim, sizes))

    def _view_of_batch(self, place: int, value: Tensor) -> None:
        """Everything into rows of a new length."""
        length = (4, 6, 8, 12)[self.pick(4)]
        if value.numel() % length == 0:
            self.write(lambda values, _: values[place].reshape(-1, length))

    def _reduce(self, place: int, value: Tensor) -> None:
        if value.dim() > 1:
            dim, keepdim = self.pick(value.dim()), bool(self.pick(2))
            function = (torch.sum, torch.mean)[self.pick(2)]
            self.write(lambda values, _: function(values[place], dim=dim, keepdim=keepdim))

    def _softmax(self, place: int, value: Tensor) -> None:
        if value.dim() > 0:
            dim = self.pick(value.dim())
            self.write(lambda values, _: torch.softmax(values[place], dim))

    def _layer_norm(self, place: int, value: Tensor) -> None:
        if value.dim() > 0 and value.shape[-1] > 2:
            size = value.shape[-1]
            weight, bias = self.weight(size), self.weight(size)
            self.write(lambda values, weights: F.layer_norm(values[place], [size], weights[weight], weights[bias]))

    def _matmul(self, place: int, value: Tensor) -> None:
        if value.dim() > 1:
            alike = [other for other, each in enumerate(self.values) if each.shape == value.shape]
            other = alike[self.pick(len(alike))]
            scale = 1 / math.sqrt(value.shape[-1])
            self.write(lambda values, _: values[place] @ values[other].transpose(-1, -2) * scale)


MESHES = (
    (("tensor", 2),),
    (("tensor", 3),),
    (("data", 2),),
    (("data", 3),),
    (("fsdp", 2),),
    (("tensor", 2), ("sequence", 3)),
    (("data", 2), ("tensor", 3)),
    (("tensor", 2), ("data", 3)),
    (("data", 3), ("fsdp", 2)),
    (("zero1", 2), ("tensor", 2)),
)
ROWS = ("data", "fsdp", "zero1")
STORED = ("fsdp", "zero1")


def check_one(data: st.DataObject) -> int:
    """Draw a model and a cut, compare; how many collectives the cut model has."""
    writer = Writer(data.draw)
    for _ in range(data.draw(st.integers(2, 9))):
        writer.step()
    hypothesis.assume(writer.steps)
    model = Drawn(writer.shapes, writer.steps)
    args = (torch.randn(BATCH_SIZE, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)
    graph = trace(model, args, batch_size=data.draw(st.sampled_from([None, BATCH_SIZE])))
    axes = find_axes(graph.graph)
    mesh = Mesh(data.draw(st.sampled_from(MESHES)))
    batch = tuple(sorted(batch_axes(graph, axes)))
    rows = tuple(name for name in mesh.names if name in ROWS)
    free = [axis for axis in range(len(axes.sizes)) if axis not in batch]
    assigned: dict[str, tuple[int, ...]] = {}
    for name in mesh.names:
        if name in ROWS:
            assigned[name] = batch
        else:
            chosen = data.draw(st.sets(st.sampled_from(free), max_size=6)) if free else set()
            assigned[name] = tuple(sorted(chosen))
            free = [axis for axis in free if axis not in chosen]
    hypothesis.note(str(graph.graph))
    hypothesis.note(f"{mesh.dimensions} {assigned} of {axes.sizes}")
    made = cut_axes(graph, axes, AxisCut(mesh, assigned, rows, tuple(name for name in mesh.names if name in STORED)), "whole")
    assert_equal_runs(run_cut(made, model, args), run_model(model, args, {}), 1e-9)
    return sum(node.target in COLLECTIVES for node in made.parts[0].graph.nodes)


@pytest.mark.slow
@hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.data())
def test_any_cut_of_any_graph(data: st.DataObject) -> None:
    check_one(data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@hypothesis.settings(max_examples=500, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(st.data())
def test_any_cut_of_any_of_many_graphs(data: st.DataObject) -> None:
    check_one(data)


class RowsTimesRows(nn.Module):
    """Every row with every row: one axis in both dimensions of the product."""

    up: Tensor
    across: Tensor
    of_rows: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"up": (4, 6), "across": (4, 4), "of_rows": (4, 24)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = F.linear(x.flatten(0, 1), self.up)
        product = F.linear(rows, self.across) @ rows.transpose(-1, -2)
        if self.kind == "summed":
            return product.sum(0), F.linear(product.sum(0), self.of_rows)
        return product.flatten(0, 1), product * 2


@pytest.mark.parametrize("kind", ["summed", "flat"])
@pytest.mark.parametrize("mesh", [(("data", 3),), (("data", 3), ("fsdp", 2)), (("data", 2), ("zero1", 3))], ids=str)
def test_rows_times_rows(kind: str, mesh: tuple[tuple[str, int], ...]) -> None:
    """Summed, each rank needs its rows of a sum over the rows of all; flat, one dimension holds the axis twice."""
    model = RowsTimesRows(kind)
    args = (torch.randn(BATCH_SIZE, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)
    graph = trace(model, args)
    axes = find_axes(graph.graph)
    names = tuple(name for name, _ in mesh)
    cut = AxisCut(Mesh(mesh), dict.fromkeys(names, tuple(batch_axes(graph, axes))), names, tuple(name for name in names if name in STORED))
    made = cut_axes(graph, axes, cut, "whole")
    assert any(node.target in COLLECTIVES for node in made.parts[0].graph.nodes)
    assert_equal_runs(run_cut(made, model, args), run_model(model, args, {}), 1e-9)


class TakenApartOtherwise(nn.Module):
    """Rows made flat with what follows them, and taken apart in two halves: no axis of the one is an axis of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = F.linear(x, self.weight).flatten()
        return flat, (flat + flat).unflatten(0, [2, -1])


def test_what_is_taken_apart_otherwise_is_read_whole() -> None:
    model = TakenApartOtherwise()
    args = (torch.randn(BATCH_SIZE, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)
    graph = trace(model, args)
    axes = find_axes(graph.graph)
    outputs = {axis for output in graph.outputs if output.node is not None for each in axes.of(output.node) for axis in each}
    fixed = tuple(axis for axis in sorted(outputs) if isinstance(axes.sizes[axis], int))
    made = cut_axes(graph, axes, AxisCut(Mesh((("tensor", 2),)), {"tensor": fixed}, (), ()), "whole")
    assert_equal_runs(run_cut(made, model, args), run_model(model, args, {}), 1e-9)


class WeightsOfScores(nn.Module):
    """A weight for scores made flat: its columns are places times places."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = (nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64)) for shape in ((8, 6), (5, 16)))

    def forward(self, x: Tensor) -> Tensor:
        values = F.linear(x, self.up)
        return F.linear((values @ values.transpose(-1, -2)).flatten(1, 2), self.down)


def test_a_weight_that_holds_an_axis_twice_is_stored_by_another() -> None:
    model = WeightsOfScores()
    args = (torch.randn(BATCH_SIZE, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64),)
    graph = trace(model, args)
    axes = find_axes(graph.graph)
    made = cut_axes(graph, axes, AxisCut(Mesh((("fsdp", 2),)), {"fsdp": tuple(batch_axes(graph, axes))}, ("fsdp",), ("fsdp",)), "whole")
    assert_equal_runs(run_cut(made, model, args), run_model(model, args, {}), 1e-9)
