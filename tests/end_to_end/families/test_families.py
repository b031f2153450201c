"""Models of transformers from their configurations: outputs, gradients and weights after three steps, as of the unpartitioned model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from partitioner import partition
from tests.end_to_end.families.families import FAMILIES

MODES: Mapping[str, tuple[str | Mapping[str, int], int]] = {
    "pipeline": ("pipeline", 4),
    "tensor": ("tensor", 2),
    "fsdp": ("fsdp", 2),
    "data x tensor": ({"data": 2, "tensor": 2}, 4),
}

STEPS = 3
LEARNING_RATE, EPS = 1e-2, 1e-3
"""Some gradients are zero but for rounding (of biases of keys, to which softmax is blind): with a small ``eps`` AdamW makes them large."""


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of all logits, in their dtype: transformers' own losses are in float32."""
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Compare, relative to the largest expected number."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * (1 + float(expected.abs().max())), msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipeline", "tensor", "fsdp", "data x tensor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, mode: str) -> None:
    """Three steps of AdamW, and then the logits in evaluation."""
    known = FAMILIES[family]
    original = known.model().train()
    (kind, devices), (inputs, _) = MODES[mode], known.batch(0)
    pm = partition(copy.deepcopy(original), devices, kind, example_kwargs=inputs, progress=False)
    optimizers = [torch.optim.AdamW(each.parameters(), LEARNING_RATE, eps=EPS) for each in (original, pm)]
    for step in range(STEPS):
        inputs, target = known.batch(step)
        expected = loss_of(original(**inputs), target)
        expected.backward()
        assert_close(pm.train_step(**inputs, target=target, loss_fn=loss_of), expected.detach(), known.tolerance, f"loss of step {step}")
        gradients = pm.full_gradients()
        for name, parameter in original.named_parameters():
            found = gradients[name]
            assert found is not None, name
            assert parameter.grad is not None, name
            assert_close(found, parameter.grad, known.tolerance, f"gradient of {name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = pm.full_state_dict()
    for name, parameter in original.named_parameters():
        assert_close(weights[name], parameter.detach(), known.tolerance, f"weights of {name}")
    with torch.no_grad():
        assert_close(pm.eval()(**inputs).logits, original.eval()(**inputs).logits, known.tolerance, "logits")
