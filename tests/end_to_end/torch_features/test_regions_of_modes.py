"""Regions of ``torch.autocast`` and ``torch.no_grad()`` in a forward, around masks that are made below ``vmap``, and in one another."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import partition

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
"""As many heads of keys as of queries: traced, transformers repeats grouped heads, which rounds sums of gradients at another place."""


class Model(nn.Module):
    """Calls a Llama in a region of a mode.

    Args:
        region: ``"whole"``, ``"part"`` or ``"nested"`` of autocast, or ``"no_grad"``.
    """

    def __init__(self, region: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **SIZES))
        self.head, self.region = nn.Linear(64, 8), region

    def forward(self, ids: Tensor) -> Tensor:
        if self.region == "no_grad":
            with torch.no_grad():
                logits = self.llama(ids).logits
            return self.head(logits)
        if self.region == "part":
            embedded = self.llama.model.embed_tokens(ids)
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.llama(inputs_embeds=embedded).logits
            return self.head(logits.float())
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.llama(ids).logits
            with torch.autocast("cpu", enabled=self.region == "whole"):
                return self.head(logits.float())


def check(region: str, mode: str) -> None:
    """Compare outputs and gradients; ranks that cut sums round them in bfloat16 in another order."""
    model, ids = Model(region), torch.randint(0, 64, (4, 8))
    pm = partition(model, 2, mode, example_inputs=(ids,), progress=False)
    atol = 0.0 if mode == "pipeline" else 4e-3
    expected, found = model(ids), pm(ids)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)
    expected.float().square().mean().backward()
    found.float().square().mean().backward()
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0.0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("region", ["nested", "no_grad"])
def test_region(region: str) -> None:
    check(region, "pipeline")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipeline", "tensor", "data"])
@pytest.mark.parametrize("region", ["whole", "part", "nested", "no_grad"])
def test_regions_in_modes(region: str, mode: str) -> None:
    check(region, mode)


class Scaled(nn.Module):
    """Scales a value by what regions compute of it; the value goes through a conversion there, and is read again after them."""

    def __init__(self, modes: Sequence[Callable[[], AbstractContextManager[object]]], convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.modes, self.convert = modes, convert

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode())
            scale = self.scale(self.convert(hidden)).abs().amax(-1, keepdim=True)
        return self.last(hidden * scale.to(hidden.dtype))


def compare_gradients(model: nn.Module) -> None:
    x = torch.randn(4, 6)
    pm = partition(model, 2, "pipeline", n_microbatches=1, example_inputs=(x,), progress=False)
    model(x).square().mean().backward()
    pm(x).square().mean().backward()
    for (name, parameter), own in zip(model.named_parameters(), pm.parameters(), strict=True):
        assert (own.grad is None) == (parameter.grad is None), name
        torch.testing.assert_close(own.grad, parameter.grad)


def whole() -> AbstractContextManager[object]:
    return torch.autocast("cpu", enabled=False)


CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": Tensor.float,
    "type_as": lambda x: x.type_as(x),
    "other type": Tensor.double,
    "contiguous": Tensor.contiguous,
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_conversion_that_returns_its_argument_in_no_grad(name: str) -> None:
    """It is the same tensor, which has its gradient after the region."""
    model = Scaled([torch.no_grad], CONVERSIONS[name])
    if name == "other type":
        model.scale.double()
    compare_gradients(model)


@pytest.mark.parametrize("modes", [(torch.no_grad, whole), (torch.no_grad, torch.enable_grad, whole)], ids=["off", "on again"])
def test_autocast_in_no_grad(modes: Sequence[Callable[[], AbstractContextManager[object]]]) -> None:
    compare_gradients(Scaled(modes, Tensor.float))


def narrow() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


IN_AUTOCAST: dict[str, Sequence[Callable[[], AbstractContextManager[object]]]] = {
    "disabled": (whole, torch.no_grad),
    "enabled": (narrow, torch.no_grad),
    "nested": (narrow, whole, torch.no_grad),
    "on again": (torch.no_grad, narrow, torch.enable_grad),
}


@pytest.mark.parametrize("name", IN_AUTOCAST)
def test_no_grad_in_autocast(name: str) -> None:
    """Parameters that are read there have no gradient."""
    compare_gradients(Scaled(IN_AUTOCAST[name], Tensor.float))


def test_computations_around_no_grad_in_autocast() -> None:
    """A region of autocast goes on after it."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.before, self.inside, self.after = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with narrow():
                hidden = self.before(x)
                with torch.no_grad():
                    inside = self.inside(hidden)
                result: Tensor = self.after(hidden * inside)
            return result

    compare_gradients(Around())
