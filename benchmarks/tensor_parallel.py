"""Our tensor parallelism beside DTensor's ``parallelize_module`` and a version written by hand: same model, same process group.

    python -m benchmarks.tensor_parallel            # starts two processes with one thread each, gloo

One table: forward and backward of four transformer layers, narrow and wide. By hand is what Megatron does: attention heads and the
inner width of the perceptron are cut, with one all-reduce after each in the forward and one before each in the backward: 16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from benchmarks.rounds import measure, milliseconds, ratio, run_tables, table
from partitioner import partition

LAYERS = 4
ROWS, LENGTH = 4, 64
COLUMNS = ("query", "key", "value", "expand")
"""Linear layers whose outputs are cut."""


class Layer(nn.Module):
    """A transformer layer whose projections are apart, as ``parallelize_module`` needs them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_width = min(64, width // 4)
        self.attention_norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.project = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a perceptron, each added to its input."""
        x = x + self.project(self.attended(self.attention_norm(x)))
        result: Tensor = x + self.contract(nn.functional.gelu(self.expand(self.norm(x))))
        return result

    def attended(self, x: Tensor) -> Tensor:
        """Return the results of the heads next to each other: of all, or of this rank's."""
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2)


def model_of(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(LAYERS)))


# -- the contestants ---------------------------------------------------------------------------------------------------------------


def ours(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Our mode "tensor"."""
    pm = partition(model, devices=["cpu"] * dist.get_world_size(), mode="tensor", example_inputs=(x,), recompute="none", progress=False)

    def step() -> Tensor:
        pm.zero_grad()
        return pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)

    return step


def dtensors(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Return a step of ``parallelize_module``, as its tutorial cuts a transformer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = copy.deepcopy(model)
    for layer in cut.children():
        columns: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
        styles = columns | {name: RowwiseParallel() for name in ("project", "contract")}
        parallelize_module(layer, mesh, styles)
    return _step(cut, x, target)


def by_hand(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Megatron's two functions around what each rank has of a layer."""
    return _step(nn.Sequential(*(ByHand(layer) for layer in model.children() if isinstance(layer, Layer))), x, target)


class ByHand(nn.Module):
    """A rank's part of a layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.part = copy.deepcopy(layer)
        for name in COLUMNS:
            linear = getattr(self.part, name)
            setattr(self.part, name, _linear(_own(linear.weight, 0), _own(linear.bias, 0)))
        for name in ("project", "contract"):
            linear = getattr(self.part, name)
            setattr(self.part, name, _linear(_own(linear.weight, 1), linear.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Compute as ``Layer``; the bias of a sum is added once, after it."""
        part = self.part
        attended = part.attended(_with_summed_gradient(part.attention_norm(x)))
        x = x + _summed(nn.functional.linear(attended, part.project.weight)) + part.project.bias
        inner = nn.functional.gelu(part.expand(_with_summed_gradient(part.norm(x))))
        result: Tensor = x + _summed(nn.functional.linear(inner, part.contract.weight)) + part.contract.bias
        return result


class _Sum(torch.autograd.Function):
    """Sums over ranks; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _SumOfGradients(torch.autograd.Function):
    """Passes; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total


def _summed(x: Tensor) -> Tensor:
    result: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return result


def _with_summed_gradient(x: Tensor) -> Tensor:
    result: Tensor = _SumOfGradients.apply(x)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return result


def _own(tensor: Tensor, dim: int) -> Tensor:
    return tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias.detach().clone())
    return linear


def _step(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = nn.functional.mse_loss(model(x), target)
        loss.backward()
        return loss.detach()

    return step


# -- the table ---------------------------------------------------------------------------------------------------------------------


def widths(rounds: int) -> None:
    rows = []
    for width, repeats in ((64, 5), (256, 2), (768, 1)):
        model = model_of(width)
        x, target = torch.randn(ROWS, LENGTH, width), torch.randn(ROWS, LENGTH, width)
        steps = {name: make(model, x, target) for name, make in (("ours", ours), ("DTensor", dtensors), ("by hand", by_hand))}
        expected = nn.functional.mse_loss(model(x), target).detach()
        for step in steps.values():
            torch.testing.assert_close(step(), expected)
        found = measure(steps, rounds, repeats)
        times = [milliseconds(found[name]) for name in steps]
        rows.append((str(width), *times, ratio(found["ours"], found["by hand"]), ratio(found["DTensor"], found["ours"])))
    head = ("width", "ours ms", "DTensor ms", "by hand ms", "ours / by hand", "DTensor / ours")
    table(f"Tensor parallel over 2: {LAYERS} layers, batch {ROWS} x {LENGTH}, forward and backward", head, rows)


if __name__ == "__main__":
    run_tables("benchmarks.tensor_parallel", __doc__, {"widths": widths}, None)
