"""Custom autograd functions train as in the model: through their own forward and backward, cut where both can be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.analysis.axes import find_axes
from passes.rules.loops import Loops
from tests.partitioner.tracing.autograd.applied_functions import (
    CUT,
    FUNCTIONS,
    Model,
    Reversed,
    Rounded,
    Swish,
    apply,
    averaged,
    clipped,
    normed,
    product,
    rows,
    spread,
)
from tests.support.running.slow_values import all_but, slow


def _inputs(n_rows: int) -> Tensor:
    return torch.randn(n_rows, 5, 6, dtype=torch.float64)


def _assert_equal(model: nn.Module, pm: Any, x: Tensor) -> None:
    """Compare results, gradients of the input and of every parameter."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    wanted, found = model(inputs[0]), pm(inputs[1])
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    wanted.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-9, atol=1e-9)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:a batch of 3 rows does not divide")
@pytest.mark.parametrize("n_rows", [4, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["data", "tensor", *slow("model", "fsdp", {"data": 2, "tensor": 2})])
@pytest.mark.parametrize("function", all_but([rows], FUNCTIONS), ids=lambda function: function.__name__)
def test_gradients_are_those_of_the_function(function: Callable[..., Any], mode: Any, n_rows: int) -> None:
    torch.manual_seed(0)
    model, x = Model(function).double(), _inputs(n_rows)
    devices = 4 if isinstance(mode, dict) else 2
    pm = partition(copy.deepcopy(model), devices, mode, example_inputs=(x,))
    _assert_equal(model, pm, x)


@pytest.mark.parametrize("function", all_but([spread], FUNCTIONS), ids=lambda function: function.__name__)
def test_one_row_a_rank(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = Model(function).double(), _inputs(4)
    _assert_equal(model, partition(copy.deepcopy(model), 4, "data", example_inputs=(x,)), x)


@pytest.mark.parametrize(
    "function", all_but([normed], [each for each in FUNCTIONS if CUT[each][0] is None]), ids=lambda function: function.__name__
)
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_microbatches(function: Callable[..., Any], recompute: str) -> None:
    torch.manual_seed(0)
    model, x = Model(function).double(), _inputs(4)
    pm = partition(copy.deepcopy(model), 2, "pipeline", example_inputs=(x,), n_microbatches=2, recompute=recompute)
    _assert_equal(model, pm, x)


@pytest.mark.parametrize("function", all_but([averaged, clipped, rows, spread], FUNCTIONS), ids=lambda function: function.__name__)
def test_how_it_may_be_cut(function: Callable[..., Any]) -> None:
    graph = trace(Model(function), (_inputs(4).float(),))
    calls = [node for node in graph.computing_nodes() if "autograd_function" in str(node.target)]
    loops: Loops = find_axes(graph.graph).loops[calls[0].name]
    assert tuple(loops.factors[factor].reduction for (factor,) in loops.operands[0]) == CUT[function]


class Nested(Function):
    """Applies another function in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return apply(Swish, x, 1.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return apply(Rounded, gradient * 8) * torch.cosh(x)


class Sized(Function):
    """Takes a size that follows the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, n_rows: int) -> Tensor:
        ctx.n_rows = n_rows
        return x / n_rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 3 / ctx.n_rows, None


def nested(model: Model, x: Tensor) -> Any:
    return apply(Nested, x)


def sized(model: Model, x: Tensor) -> Any:
    return apply(Sized, x, x.shape[0])


def twice(model: Model, x: Tensor) -> Any:
    """Apply the same function to other shapes."""
    return apply(Swish, apply(Swish, x, 1.0).transpose(1, 2).contiguous(), 1.0).transpose(1, 2)


def without_gradients(model: Model, x: Tensor) -> Any:
    with torch.no_grad():
        rounded = apply(Rounded, x)
    return x + rounded


@pytest.mark.parametrize("mode", all_but(["pipeline"], ["tensor", "pipeline", "data", "fsdp"]))
@pytest.mark.parametrize("function", [nested, *slow(sized, twice, without_gradients)], ids=lambda function: function.__name__)
def test_unusual_calls(function: Callable[..., Any], mode: str) -> None:
    torch.manual_seed(0)
    model, x = Model(function).double(), _inputs(4)
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), n_microbatches=1 if mode == "pipeline" else None)
    _assert_equal(model, pm, x)


class Blocks(nn.Module):
    """Blocks that do the same, each with a function, under a checkpoint or not."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
        self.use_reentrant = use_reentrant

    def block(self, index: int, x: Tensor) -> Any:
        return x + apply(Swish, self.blocks[index](x), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for index in range(len(self.blocks)):
            if self.use_reentrant is None:
                x = self.block(index, x)
            else:
                x = torch.utils.checkpoint.checkpoint(self.block, index, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("mode", ["data", *slow("tensor", "pipeline")])
@pytest.mark.parametrize("use_reentrant", [*slow(None), False, *slow(True)])
def test_blocks_under_checkpoints(use_reentrant: bool | None, mode: str) -> None:
    torch.manual_seed(0)
    model, x = Blocks(use_reentrant).double(), _inputs(4)
    _assert_equal(model, partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), n_microbatches=2 if mode == "pipeline" else None), x)


def test_a_reentrant_checkpoint_of_inputs_without_gradients_has_none() -> None:
    """As PyTorch warns: the parameters inside get no gradient where no argument of the checkpoint requires one."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.last(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True))

    model, x = First(), _inputs(4).float()
    pm = partition(copy.deepcopy(model), 2, "pipeline", example_inputs=(x,))
    with pytest.warns(UserWarning, match="None of the inputs"):
        model(x).sum().backward()
    pm(x).sum().backward()
    assert model.inner.weight.grad is None
    assert pm.full_gradients()["inner.weight"] is None
    torch.testing.assert_close(pm.full_gradients()["last.weight"], model.last.weight.grad)


class Halves(Function):
    """Divides numbers, of any type, with gradients disabled twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.double() / 2


def checkpointed(x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(torch.Tensor.double, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("call", [Halves.apply, checkpointed])
def test_functions_of_integers_leave_gradients_enabled(call: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8, dtype=torch.float64))

        def forward(self, x: Tensor) -> Any:
            return call(x) * self.weight

    model, x = Scaled(), torch.arange(32).reshape(4, 8)
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,))
    model(x).square().sum().backward()
    pm(x).square().sum().backward()
    torch.testing.assert_close(pm.full_gradients()["weight"], model.weight.grad)


class Cast(Function):
    """Multiplies inside, which autocast does in lower precision in forward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight.t(), x.flatten(0, -2).t() @ gradient.float().flatten(0, -2)


@pytest.mark.parametrize("mode", ["pipeline", *slow("data", "tensor")])
def test_mixed_precision_is_that_of_autocast(mode: str) -> None:
    torch.manual_seed(0)
    model, x = Model(lambda model, x: apply(Cast, x.float(), model.weight)), _inputs(4).float()
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), precision="bf16-mixed")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
    found = pm(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    wanted.float().sum().backward()
    found.float().sum().backward()
    torch.testing.assert_close(pm.full_gradients()["weight"], model.weight.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:a batch of .* rows does not divide")
def test_another_batch_size() -> None:
    torch.manual_seed(0)
    model = Model(product).double()
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=(_inputs(4),))
    for n_rows in (4, 2, 7):
        model.zero_grad()
        pm.zero_grad()
        _assert_equal(model, pm, _inputs(n_rows))


@pytest.mark.slow
def test_tiles() -> None:
    """A convolution on both sides of a function, its rows of pixels in tiles."""

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Any:
            return self.last(apply(Swish, self.first(x), 1.0))

    torch.manual_seed(0)
    model, x = Convolutions().double(), torch.randn(2, 2, 9, 8, dtype=torch.float64)
    for devices, mode in ((2, "tile"), (1, {"tile": 3})):
        model.zero_grad()
        _assert_equal(model, partition(copy.deepcopy(model), devices, mode, example_inputs=(x,)), x)


@pytest.mark.parametrize("mode", [*slow("data", "tensor"), "pipeline"])
def test_a_view_of_what_is_written_later(mode: str) -> None:
    """A function that gives its input back gives its memory back: a later write shows."""

    def written(_: Model, x: Tensor) -> Any:
        x = x.clone()
        view = apply(Reversed, x.detach())
        x.mul_(3)
        return x + view

    torch.manual_seed(0)
    model, x = Model(written).double(), _inputs(4)
    _assert_equal(model, partition(copy.deepcopy(model), 2, mode, example_inputs=(x,)), x)
