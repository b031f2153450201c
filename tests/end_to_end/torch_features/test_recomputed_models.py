"""Forty models under every policy of recomputation, each policy in another mode: outputs and all gradients are the model's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from partitioner import partition
from tests.end_to_end.families.families import FAMILIES
from tests.support.models.case import Case, Instance
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.float64_inside import compute_in_float64
from tests.support.running.transparency import loss_of

MODES = ("data", "fsdp", "pipeline", "tensor")
POLICIES = ("none", "selective", "full")
MORE = ("bart", "bloom", "cohere", "falcon", "gemma2", "gemma3", "gpt_neox", "olmo2", "opt", "phi", "roberta")
"""Families that differ from the models of the zoo."""

EXACT = 1e-9


@pytest.fixture(autouse=True)
def _float64_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


def runs() -> list[Any]:
    """Return every model with every policy; modes follow in order, so each model has three and each mode every policy."""
    names = [*(case.name for case in ZOO), *(f"transformers {name}" for name in MORE)]
    assert len(names) >= 40
    found = []
    for row, name in enumerate(names):
        for column, policy in enumerate(POLICIES):
            mode = MODES[(row + column) % len(MODES)]
            marks = () if (name, policy) == ("perceptron", "full") else (pytest.mark.slow,)
            found.append(pytest.param(name, policy, mode, marks=marks, id=f"{name}-{policy}-{mode}"))
    return found


def of_zoo(case: Case) -> tuple[Instance, Any]:
    """Return a model of the zoo with its batch, and its loss."""
    return case.build(), lambda output, target: loss_of(case, output, target)


def of_family(name: str) -> tuple[Instance, Any]:
    """Return a model of transformers with its batch, and its loss."""
    family = FAMILIES[name]
    inputs, target = family.batch(0)
    model = family.model().double().train()
    return Instance(model, (), inputs, target), lambda output, labels: torch.nn.functional.cross_entropy(
        output.logits.flatten(0, -2), labels.flatten()
    )


def microbatches(name: str, mode: str) -> int | None:
    """Return two in a pipeline, and None for models that normalise over rows of a microbatch, or compare rows."""
    if mode != "pipeline":
        return None
    case = None if name.startswith("transformers ") else case_named(name)
    return 1 if case is not None and (case.batch_norm or case.compares_rows) else 2


@pytest.mark.parametrize(("name", "policy", "mode"), runs())
def test_outputs_and_gradients_are_the_models(name: str, policy: str, mode: str) -> None:
    instance, loss = of_family(name.removeprefix("transformers ")) if " " in name else of_zoo(case_named(name))
    pm = partition(
        copy.deepcopy(instance.model),
        2,
        mode,
        example_inputs=instance.args,
        example_kwargs=dict(instance.kwargs),
        training=True,
        recompute=policy,
        n_microbatches=microbatches(name, mode),
        progress=False,
    )
    outputs = []
    for module in (instance.model, pm):
        torch.manual_seed(3)
        output = module(*instance.args, **instance.kwargs)
        outputs.append(tensors(output))
        loss(output, instance.target).backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=EXACT, atol=EXACT)
    expected = {name: parameter.grad for name, parameter in instance.model.named_parameters()}
    assert_close(pm.full_gradients(), expected)


def tensors(output: Any) -> list[Tensor]:
    """Return copies of the tensors of an output."""
    return [each.detach().clone() for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, Tensor)]


def assert_close(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    """Compare gradients; an absent one is none of zeros."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=EXACT, atol=EXACT, msg=functools.partial("{}: {}".format, name))
