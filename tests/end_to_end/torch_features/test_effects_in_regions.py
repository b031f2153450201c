"""Regions that are recomputed have the effects of a model's forward once: random draws, writes of buffers, tensors kept on modules."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from partitioner import partition
from passes.ir.errors import PartitionWarning
from tests.support.running.slow_values import all_but, slow

X = torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

EFFECTS = ("draws", "counts", "averages", "reads and writes", "normalizes", "keeps")

MODES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "model": (1, "model", {}),
    "fsdp": (2, "fsdp", {}),
    "tensor": (2, "tensor", {}),
    "pipeline": (2, "pipeline", {"n_microbatches": 1}),
}


class Block(nn.Module):
    """A residual branch with an effect."""

    count: Tensor
    mean: Tensor

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.up, self.down, self.effect = nn.Linear(8, 16), nn.Linear(16, 8), effect
        self.dropout = nn.Dropout(0.3 if effect == "draws" else 0.0)
        self.norm = nn.BatchNorm1d(3) if effect == "normalizes" else nn.Identity()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))
        if self.effect == "counts":
            self.count.add_(1)
        if self.effect == "averages":
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean((0, 1)))
        if self.effect == "reads and writes":
            y = y * (1 + self.mean)
            self.mean.add_(y.detach().mean((0, 1)))
        if self.effect == "keeps":
            self.kept = y.square().mean()
        return x + y  # type: ignore[no-any-return]


def direct(block: nn.Module, x: Tensor) -> Any:
    return block(x)


class Model(nn.Module):
    def __init__(self, effect: str, call: Callable[[nn.Module, Tensor], Any] = direct) -> None:
        super().__init__()
        self.embedding, self.call = nn.Linear(8, 8), call
        self.blocks = nn.ModuleList(Block(effect) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


def made(effect: str, call: Callable[[nn.Module, Tensor], Any] = direct) -> Model:
    torch.manual_seed(0)
    return Model(effect, call).double()


def check_two_steps(effect: str, call: Callable[[nn.Module, Tensor], Any], mode: str, recompute: Any) -> None:
    """Compare outputs, gradients, buffers and kept tensors with those of the model without regions."""
    devices, kind, options = MODES[mode]
    model = made(effect)
    pm = partition(made(effect, call), devices, kind, example_inputs=(X,), training=True, recompute=recompute, progress=False, **options)
    for seed in range(2):
        outputs = []
        for module in (model, pm):
            torch.manual_seed(seed)
            outputs.append(module(X))
            outputs[-1].square().mean().backward()
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-9, atol=1e-9)
        gradients, state = pm.full_gradients(), pm.full_state_dict()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(state[name], buffer, rtol=1e-9, atol=1e-9)
        if effect == "keeps":
            for one, other in zip(model.blocks, pm.blocks, strict=True):
                torch.testing.assert_close(other.kept, one.kept, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", ["model", *slow("fsdp", "tensor", "pipeline")])
@pytest.mark.parametrize("effect", all_but(["draws", "counts", "keeps"], EFFECTS))
def test_regions_by_module_have_effects_once(effect: str, mode: str) -> None:
    check_two_steps(effect, direct, mode, {"blocks.*": "full"})


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_policies_have_effects_once(effect: str, policy: str, mode: str) -> None:
    check_two_steps(effect, direct, mode, policy)


@pytest.mark.filterwarnings("ignore:.*is written under torch.utils.checkpoint")
@pytest.mark.parametrize("mode", ["fsdp", *slow("model", "tensor", "pipeline")])
@pytest.mark.parametrize("use_reentrant", [True, *slow(False)])
@pytest.mark.parametrize("effect", [*slow("draws"), "reads and writes", *slow("counts", "averages", "normalizes", "keeps")])
def test_checkpoints_of_the_model_have_effects_once(effect: str, mode: str, *, use_reentrant: bool) -> None:
    check_two_steps(effect, functools.partial(checkpoint, use_reentrant=use_reentrant), mode, None)


@pytest.mark.parametrize("use_reentrant", [True, *slow(False)])
@pytest.mark.parametrize("effect", ["counts", *slow("averages", "reads and writes", "normalizes")])
def test_buffers_that_pytorch_writes_again_are_announced(effect: str, *, use_reentrant: bool) -> None:
    model = made(effect, functools.partial(checkpoint, use_reentrant=use_reentrant))
    with pytest.warns(PartitionWarning, match=r"buffer blocks\.0\..* \(and \d+ more\) is written under torch.utils.checkpoint"):
        pm = partition(model, 1, "model", example_inputs=X, progress=False)
    assert any("the programs write it once" in note for note in pm.plan.notes)


@pytest.mark.parametrize("effect", ["draws", *slow("keeps")])
def test_regions_that_write_no_buffer_are_not_announced(effect: str) -> None:
    model = made(effect, functools.partial(checkpoint, use_reentrant=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PartitionWarning)
        partition(copy.deepcopy(model), 1, "model", example_inputs=X, progress=False)
