"""Products that read one matrix for each row do not stack the matrices of all experts where nothing else reads the stack."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from partitioner import partition
from passes.rules.ops.grouped_mm import grouped_mm, grouped_mm_of_each
from tests.support.running.slow_values import slow

aten = torch.ops.aten

EXPERTS = 4


class Mixture(nn.Module):
    """Four experts of two layers, of which each row takes two; the numbers of the chosen experts go through a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scale, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(x)
        mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
        for number in mask.sum(dim=(-1, -2)).nonzero():
            place, row = torch.where(mask[number].squeeze(0))
            result.index_add_(0, row, self.experts[number](x[None, row].reshape(-1, 6)) * scale[row, place, None])
        return result


class Stacks(TorchDispatchMode):
    """Counts the stacks of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.count += function is aten.stack.default and result.dim() == 3 and len(args[0]) == EXPERTS
        return result


@pytest.mark.parametrize("mode", ["tensor", *slow("pipeline", "data", "model")])
def test_evaluation_stacks_no_matrices(mode: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixture(), nn.Linear(6, 6), Mixture()).double().eval(), torch.randn(4, 6, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 1 if mode == "model" else 2, mode, example_inputs=(x,), progress=False)
    with torch.no_grad():  # else the forward keeps what a backward reads
        pm(x)  # programs are lowered
        with Stacks() as stacks:
            result = pm(x)
    assert stacks.count == 0
    torch.testing.assert_close(result, model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "pipeline"])
def test_training(mode: str) -> None:
    """A backward of another stage call reads the stack, and one of the same call the matrices."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Mixture(), nn.Linear(6, 6), Mixture()).double(), torch.randn(4, 6, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,), progress=False)
    pm.train_step(x, target=x, loss_fn=F.mse_loss)
    F.mse_loss(model(x), x).backward()
    for name, gradient in pm.full_gradients().items():
        assert gradient is not None
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if expected is None else expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("group", [[0, 2, 2, 1, 0], [3, -1, 0, 0, 5], []], ids=str)
def test_it_is_the_product_with_the_stack(transposed: bool, group: list[int]) -> None:
    matrices = [torch.randn(3, 2, dtype=torch.float64) for _ in range(4)]
    rows, numbers = torch.randn(len(group), 2 if transposed else 3, dtype=torch.float64), torch.tensor(group, dtype=torch.long)
    found = grouped_mm_of_each(rows, matrices, numbers, transposed)
    torch.testing.assert_close(found, grouped_mm(rows, torch.stack(matrices), numbers, transposed), rtol=0, atol=0)


def read_otherwise(stacked: Tensor, rows: Tensor, group: Tensor) -> Tensor:
    result: Tensor = grouped_mm(rows, stacked, group) + stacked.sum((0, 1))
    return result


def along_another_dimension(stacked: Tensor, rows: Tensor, group: Tensor) -> Tensor:
    result: Tensor = grouped_mm(rows, stacked, group)
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("read", "dim"), [(read_otherwise, 0), (along_another_dimension, 1), (along_another_dimension, -3)])
def test_other_stacks_stay(read: Callable[[Tensor, Tensor, Tensor], Tensor], dim: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(2, 5))

        def forward(self, x: Tensor, group: Tensor) -> Tensor:
            return read(torch.stack([self.first, self.second], dim), x, group)

    torch.manual_seed(0)
    model, group = Model().double().eval(), torch.tensor([0, 1, 1, 0])
    x = torch.randn(4, 2, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 1, "model", example_inputs=(x, group), progress=False)
    torch.testing.assert_close(pm(x, group), model(x, group), rtol=1e-12, atol=1e-12)
