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
from tests.support.running.slow_values import all_but, slow


class Swish(Function):
    """Elementwise, with a plain number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.slope * x)
        return gradient * (gate + ctx.slope * x * gate * (1 - gate)), None


class Rounded(Function):
    """A straight-through estimator, whose backward is not that of its forward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient


class Reversed(Function):
    """Gives its input back, and turns the gradient round."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient.neg() * 0.5


class Product(Function):
    """A linear layer without bias; the backward flattens rows, and gives the weight no gradient where none is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight if bias is None else x @ weight + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_weight = x.flatten(0, -2).t() @ gradient.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return gradient @ weight.t(), of_weight, None


class Normed(Function):
    """Root mean square over the features, with a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        inner = gradient * weight
        of_x = scale * inner - x * scale**3 * (inner * x).mean(-1, keepdim=True)
        return of_x, (gradient * x * scale).sum(tuple(range(x.dim() - 1)))


class Averaged(Function):
    """Divides the gradient by the number of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2 / ctx.rows


class Clipped(Function):
    """Bounds the norm of the whole gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient / gradient.norm().clamp(min=1e-3)


class Halved(Function):
    """Several results, one of which has no gradient, among None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: list[float]) -> tuple[Tensor, None, Tensor]:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.factors = factors
        return x * factors[0], None, positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None]:
        return gradient * ctx.factors[1], None


class Rows(Function):
    """Reshapes to the sizes that it was written for."""

    @staticmethod
    def forward(_: Any, x: Tensor, width: int) -> Tensor:
        return x.reshape(-1, width).tanh().reshape(x.shape)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 0.25, None


class Spread(Function):
    """Subtracts the mean over the rows in backward alone."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        return gradient - gradient.mean(0)


def apply(function: type[Function], *args: Any) -> Any:
    """Apply a function; PyTorch gives ``apply`` no types."""
    return function.apply(*args)


def swish(model: Model, x: Tensor) -> Any:
    return apply(Swish, apply(Swish, x, 1.0), 2.0)


def rounded(model: Model, x: Tensor) -> Any:
    return apply(Rounded, x * 4)


def reversed_(model: Model, x: Tensor) -> Any:
    return apply(Reversed, x)


def product(model: Model, x: Tensor) -> Any:
    return apply(Product, x, model.weight, None)


def normed(model: Model, x: Tensor) -> Any:
    return apply(Normed, x, model.scale)


def averaged(model: Model, x: Tensor) -> Any:
    return apply(Averaged, x)


def clipped(model: Model, x: Tensor) -> Any:
    return apply(Clipped, x)


def halved(model: Model, x: Tensor) -> Any:
    half, nothing, positive = apply(Halved, x, [0.5, 3.0])
    assert nothing is None
    return torch.where(positive, half, x * 0.1)


def rows(model: Model, x: Tensor) -> Any:
    return apply(Rows, x, 8)


def spread(model: Model, x: Tensor) -> Any:
    return apply(Spread, x)


class Model(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Model, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.weight, self.scale = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self, self.first(x)))
        return y


FUNCTIONS = [swish, rounded, reversed_, product, normed, averaged, clipped, halved, rows, spread]
CUT: dict[Callable[..., Any], tuple[str | None, str | None, str | None]] = {
    swish: (None, None, None),
    rounded: (None, None, None),
    reversed_: (None, None, None),
    product: (None, None, "sum"),
    normed: (None, None, "whole"),
    averaged: ("whole", None, None),
    clipped: ("whole", "whole", "whole"),
    halved: (None, None, None),
    rows: (None, None, "whole"),
    spread: ("whole", None, None),
}
"""Function -> how results of parts are combined where a dimension of x (rows, sequence, features) is cut."""


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
