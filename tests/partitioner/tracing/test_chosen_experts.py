"""Loops over the experts that some token chose, as libraries and reference implementations write them."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import TraceError, partition
from tests.support.running.slow_values import all_but, slow

WIDTH, INNER, EXPERTS, CHOICES = 6, 8, 4, 2


class Expert(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH)
        self.scale = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) * self.scale)


class Mixture(nn.Module):
    """A router, experts, and a loop over them."""

    def __init__(self, loop: Callable[..., Tensor], experts: int = EXPERTS) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.weight, self.bias = nn.Parameter(torch.randn(experts, WIDTH, WIDTH)), nn.Parameter(torch.randn(experts, WIDTH))
        self.loop = loop

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.first(x)).reshape(-1, WIDTH)
        probabilities = self.router(rows).softmax(-1)
        scale, chosen = probabilities.topk(CHOICES, dim=-1)
        return self.last(self.loop(self, rows, chosen, scale, probabilities).reshape(x.shape))


def hit(model: Mixture, x: Tensor, chosen: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    """Loop as Mixtral of transformers 4.57."""
    result = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=len(model.experts)).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        expert = model.experts[number]
        place, row = torch.where(mask[number].squeeze(0))
        result.index_add_(0, row, expert(x[None, row].reshape(-1, WIDTH)) * scale[row, place, None])
    return result


def visited_if_hit(model: Mixture, x: Tensor, chosen: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    """Loop as DeepSeek-V3."""
    result = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=len(model.experts)).permute(2, 0, 1)
    for number in range(len(model.experts)):
        row, place = torch.where(mask[number])
        if row.numel() > 0:
            result.index_add_(0, row, model.experts[number](x[row]) * scale[row, place].unsqueeze(-1))
    return result


def every(model: Mixture, x: Tensor, chosen: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    """Loop as OLMoE: an expert without tokens is called with no rows."""
    result = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=len(model.experts)).permute(2, 1, 0)
    for number, expert in enumerate(model.experts):
        place, row = torch.where(mask[number])
        result.index_add_(0, row, expert(x[None, row].reshape(-1, WIDTH)) * scale[row, place, None])
    return result


def compared(model: Mixture, x: Tensor, chosen: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    """Loop as Mistral's reference."""
    result = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        row, place = torch.where(chosen == number)
        result[row] += scale[row, place, None] * expert(torch.tanh(x[row]) * 2)
    return result


def dropped(model: Mixture, x: Tensor, chosen: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    """Loop where some choices are of no expert."""
    result = torch.zeros_like(x)
    chosen = chosen.masked_fill(scale < 0.25, -1).masked_fill(scale > 0.4, EXPERTS)
    for number, expert in enumerate(model.experts):
        row, place = torch.where(chosen == number)
        result.index_add_(0, row, expert(x[row]) * scale[row, place, None] + x[row])
    return result


def matrices(model: Mixture, x: Tensor, chosen: Tensor, _: Tensor, probabilities: Tensor) -> Tensor:
    """Loop as GPT-OSS: one parameter for all experts, and a class of tensors for tokens without an expert."""
    result = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(chosen, num_classes=EXPERTS + 1).permute(2, 1, 0)
        numbers = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for each in numbers[:]:
        number = each[0]
        if number == EXPERTS:
            continue
        _, row = torch.where(mask[number])
        y = torch.tanh(x[row] @ model.weight[number] + model.bias[number])
        result.index_add_(0, row, y * probabilities[row, number, None])
    return result


LOOPS = [hit, visited_if_hit, every, compared, dropped, matrices]
MODES: dict[str, dict[str, Any]] = {
    "data": {"devices": 2, "mode": "data"},
    "tensor": {"devices": 2, "mode": "tensor"},
    "pipeline": {"devices": 2, "mode": "pipeline", "n_microbatches": 2},
    "mesh": {"devices": 4, "mode": {"fsdp": 2, "tensor": 2}},
}


def differences(loop: Callable[..., Tensor], options: Mapping[str, Any], rows: int) -> list[float]:
    """Return the differences of outputs and gradients, after a step with a planned batch and one of another size."""
    torch.manual_seed(0)
    model = Mixture(loop).double()
    pm = partition(copy.deepcopy(model), example_inputs=(torch.randn(4, 3, WIDTH, dtype=torch.float64),), progress=False, **options)
    x = torch.randn(rows, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    expected, found = model(x), pm(twin)
    expected.square().mean().backward()
    found.square().mean().backward()
    assert x.grad is not None
    assert twin.grad is not None
    gradients, pairs = pm.full_gradients(), [(found, expected), (twin.grad, x.grad)]
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        zeros = torch.zeros_like(parameter)
        pairs.append((zeros if gradient is None else gradient, zeros if parameter.grad is None else parameter.grad))
    return [(one - other).abs().max().item() for one, other in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("loop", all_but([hit], LOOPS), ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("mode", ["data", *slow(*MODES)[1:]])
def test_a_loop_is_equal(loop: Callable[..., Tensor], mode: str) -> None:
    assert max(differences(loop, MODES[mode], 4)) < 1e-12
    assert max(differences(loop, MODES[mode], 6)) < 1e-12


def test_experts_are_cut_inside() -> None:
    """Rows and columns of each, as a feed-forward layer."""
    model = Mixture(hit)
    pm = partition(model, 2, "tensor", example_inputs=(torch.randn(4, 3, WIDTH),), progress=False)
    held = {name: part.numel() for name, part in pm.named_parts(0)}
    assert held["experts.1.up.weight"] == INNER * WIDTH // 2
    assert any("loops over the experts that some token chose" in note for note in pm.plan.notes)


# -- refusals ----------------------------------------------------------------------------------------------------------------------


def by_number(model: Mixture, x: Tensor, chosen: Tensor, _: Tensor, __: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        row, _ = torch.where(chosen == number)
        result.index_add_(0, row, expert(x[row]) * (number + 1))
    return result


def some(model: Mixture, x: Tensor, chosen: Tensor, _: Tensor, __: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number in range(2):
        row, _ = torch.where(chosen == number)
        result.index_add_(0, row, model.experts[number](x[row]))
    return result


def slices(model: Mixture, x: Tensor, chosen: Tensor, _: Tensor, __: Tensor) -> Tensor:
    """Take matrices by numbers of Python, as DBRX."""
    result = torch.zeros_like(x)
    weights = [each.squeeze(0) for each in model.weight.chunk(EXPERTS)]
    for number in range(EXPERTS):
        row, _ = torch.where(chosen == number)
        result.index_add_(0, row, x[row] @ weights[number])
    return result


def padding(model: Mixture, x: Tensor, chosen: Tensor, _: Tensor, __: Tensor) -> Tensor:
    """Select rows that have a zero, without experts."""
    row, _ = torch.where(chosen == 0)
    return torch.zeros_like(x).index_add_(0, row, model.first(x[row]))


def means(model: Mixture, x: Tensor, chosen: Tensor, _: Tensor, __: Tensor) -> Tensor:
    """Mix the tokens of an expert in the body."""
    result = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        row, _ = torch.where(chosen == number)
        result.index_add_(0, row, expert(x[row] - x[row].mean(0)))
    return result


def assigned(model: Mixture, x: Tensor, chosen: Tensor, _: Tensor, __: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        row, _ = torch.where(chosen == number)
        result[row] = expert(x[row])
    return result


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        pytest.param(by_number, "something else for its last expert than for its first", marks=pytest.mark.slow),
        pytest.param(some, "visits 2 of 4 experts", marks=pytest.mark.slow),
        pytest.param(slices, "without alike experts in a ModuleList", marks=pytest.mark.slow),
        (padding, "without alike experts in a ModuleList"),
        pytest.param(means, "mixes the tokens of an expert", marks=pytest.mark.slow),
        pytest.param(assigned, "assigns what the experts give", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_the_same_for_every_expert_is_refused(loop: Callable[..., Tensor], said: str) -> None:
    with pytest.raises(TraceError, match=said) as caught:
        partition(Mixture(loop), 2, "data", example_inputs=(torch.randn(4, 3, WIDTH),), progress=False)
    assert "let the body of the loop be the same for every expert" in str(caught.value)


@pytest.mark.slow
def test_unlike_experts_are_refused() -> None:
    model = Mixture(compared)
    model.experts[2] = Expert(INNER + 1)
    with pytest.raises(TraceError, match="without alike experts in a ModuleList"):
        partition(model, 2, "data", example_inputs=(torch.randn(4, 3, WIDTH),), progress=False)


def test_masks_of_other_models_are_tensors() -> None:
    """A mask of one class, compared, indexed and summed, is what it was."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x: Tensor, classes: Tensor) -> Tensor:
            mask = F.one_hot(classes, num_classes=5).permute(2, 0, 1)
            first = mask[0].sum(1, keepdim=True) + (mask[-1] * 2).sum(1, keepdim=True) + (classes == 3).sum(1, keepdim=True)
            return x * first * self.table[2]

    torch.manual_seed(0)
    model, inputs = Counts().double(), (torch.randn(4, WIDTH, dtype=torch.float64), torch.randint(5, (4, 3)))
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=inputs, progress=False)
    torch.testing.assert_close(pm(*inputs), model(*inputs))
