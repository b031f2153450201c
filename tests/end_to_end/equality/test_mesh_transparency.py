"""Training over cut axes equals the training of the unpartitioned model: every case, every mode, and meshes of 4 and 8.

The full matrix is marked slow. What always runs is of a diagonal through it that meets every mode and every mesh: what takes least of it.

Models that compute norms or losses in float32 whatever they are given compute those in float64 here. Parts are added in another order
than the whole is, and AdamW enlarges what the rounding of float32 makes of that beyond any tolerance that would still find an error.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn

from partitioner import PartitionedModel
from tests.support.models.case import BATCH_SIZE, Case, Instance
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.float64_inside import compute_in_float64
from tests.support.running.slow_values import slow
from tests.support.running.transparency import (
    N_MICROBATCHES,
    Difference,
    backward_steps,
    compare,
    compare_gradients,
    compare_values,
    first_difference,
    make_partitioned,
    reference_steps,
)

ROWS = ("data", "fsdp", "zero1", "zero2")

EXACT = 1e-9
"""Relative error that adding parts in another order may make in float64."""


@dataclass(frozen=True)
class Setting:
    """How to partition.

    Attributes:
        mesh: dimension -> ranks.
    """

    mesh: Mapping[str, int]

    @property
    def name(self) -> str:
        return "-".join(f"{name}{size}" for name, size in self.mesh.items())

    @property
    def cuts_rows(self) -> bool:
        return any(name in ROWS for name in self.mesh)

    @property
    def batch_size(self) -> int:
        """One that the ranks divide."""
        return 9 if self.cuts_rows and 3 in self.mesh.values() else BATCH_SIZE

    @property
    def n_microbatches(self) -> int:
        return N_MICROBATCHES if "pipeline" in self.mesh else 1

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``partition``."""
        mode: Any = dict(self.mesh) if len(self.mesh) > 1 else next(iter(self.mesh))
        return {"mode": mode, "devices": math.prod(self.mesh.values())}


SETTINGS = {
    setting.name: setting
    for setting in (
        *(Setting({mode: devices}) for mode in ("tensor", "data", "fsdp", "zero1", "zero2") for devices in (2, 3)),
        Setting({"data": 2, "tensor": 2}),
        Setting({"data": 2, "pipeline": 2}),
        Setting({"pipeline": 2, "tensor": 2}),
        Setting({"fsdp": 2, "tensor": 2}),
        Setting({"data": 2, "pipeline": 2, "tensor": 2}),
        Setting({"tensor": 4}),
        Setting({"data": 2, "fsdp": 2, "tensor": 2}),
        Setting({"sequence": 2}),
        Setting({"data": 2, "sequence": 2, "tensor": 2}),
    )
}

HAVE_A_SEQUENCE = (
    "gpt", "encoder_decoder", "padded_attention", "clip", "gpt2", "gpt2_with_cache", "llama", "bert", "t5", "vit", "whisper",
)  # fmt: skip
"""The cases whose attention compares what a mesh dimension ``"sequence"`` cuts."""

DIAGONAL = {
    "perceptron": "tensor3",
    "residual": "zero12",
    "parameterless": "fsdp3",
    "returns_loss": "data2-pipeline2",
    "batch_norm_convolution": "data2-tensor2",
    "group_norm_convolution": "fsdp2-tensor2",
    "gpt": "data2-pipeline2-tensor2",
    "unet": "pipeline2-tensor2",
    "gru": "tensor2",
    "shared_layer": "data3",
    "branches": "zero13",
    "in_place": "fsdp2",
    "integers_and_flags": "zero22",
    "nested_outputs": "zero23",
    "bert": "data2",
    "mixture_of_experts": "data2-fsdp2-tensor2",
    "convnext": "tensor4",
    "clip": "sequence2",
    "padded_attention": "data2-sequence2-tensor2",
}
QUICK = {"perceptron", "shared_layer", "nested_outputs"}
"""The cases of the diagonal that always run."""


def comparable(case: Case, setting: Setting) -> bool:
    """Return whether the setting cuts the case, and the two trainings are one by definition.

    Batch normalisation over rows and microbatches: a microbatch is then what the ranks' microbatches are together, other rows than those
    that a reference which cuts the batch into microbatches normalises over.
    """
    if "sequence" in setting.mesh and case.name not in HAVE_A_SEQUENCE:
        return False
    return not (case.batch_norm and setting.cuts_rows and "pipeline" in setting.mesh)


@pytest.fixture(autouse=True)
def _float64_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


def exact(case: Case) -> Case:
    """Return the case, compared as float64 allows.

    Where a gradient is zero in exact arithmetic (of a bias before a batch normalisation), AdamW makes steps of what rounding leaves
    of it: such cases get more.
    """
    return dataclasses.replace(case, tolerance=(10 if case.batch_norm else 1) * EXACT)


def difference_of(case: Case, setting: Setting) -> Difference | None:
    return first_difference(exact(case), batch_size=setting.batch_size, n_microbatches=setting.n_microbatches, **setting.arguments)


def matrix() -> list[ParameterSet]:
    """Return a quarter of all (case, setting) that can be compared, and the diagonal; slow but for the quick ones of that.

    Each case meets settings of every kind, each setting cases of every kind; ``python -m tests.fuzz`` draws what is left out.
    """
    always = {(name, DIAGONAL[name]) for name in QUICK}
    pairs = [(case, setting) for case in ZOO for setting in SETTINGS.values() if comparable(case, setting)]
    return [
        pytest.param(
            case,
            setting,
            marks=() if (case.name, setting.name) in always else (pytest.mark.slow,),
            id=f"{case.name}-{setting.name}",
        )
        for place, (case, setting) in enumerate(pairs)
        if place % 4 == 0 or DIAGONAL.get(case.name) == setting.name
    ]


@pytest.mark.parametrize(("case", "setting"), matrix())
def test_training(case: Case, setting: Setting) -> None:
    assert difference_of(case, setting) is None


def test_the_diagonal_meets_every_setting() -> None:
    assert set(DIAGONAL.values()) == set(SETTINGS)
    assert set(DIAGONAL) <= {case.name for case in ZOO}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("perceptron", "data2-tensor2"),
        pytest.param("nested_outputs", "fsdp3", marks=pytest.mark.slow),
        pytest.param("returns_loss", "tensor2", marks=pytest.mark.slow),
        pytest.param("batch_norm_convolution", "data2", marks=pytest.mark.slow),
    ],
)
def test_backward_as_any_module(name: str, setting: str) -> None:
    case, chosen = exact(case_named(name)), SETTINGS[setting]
    reference = reference_steps(case, batch_size=chosen.batch_size)
    other = backward_steps(case, batch_size=chosen.batch_size, **chosen.arguments)
    assert compare(reference, other, case.tolerance) is None


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param("nested_outputs", "tensor3", marks=pytest.mark.slow),
        ("batch_norm_convolution", "data2-tensor2"),
        pytest.param("gpt", "tensor2", marks=pytest.mark.slow),
        pytest.param("integers_and_flags", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_forward_in_evaluation(name: str, setting: str) -> None:
    case = case_named(name)
    instance = case.build()
    instance.model.eval()
    pm = make_partitioned(instance, **SETTINGS[setting].arguments)
    with torch.no_grad():
        reference = instance.model(*instance.args, **instance.kwargs)
        assert compare_values(reference, pm(*instance.args, **instance.kwargs), case.tolerance) is None


@pytest.mark.parametrize("mode", ["data", *slow("fsdp", "zero1")])
def test_a_batch_that_does_not_divide_is_computed_whole_and_said(mode: str) -> None:
    case = case_named("nested_outputs")
    pm = make_partitioned(case.build(), mode=mode, devices=2)
    reference = reference_steps(case, n_steps=1, batch_size=7)
    instance = case.build(batch_size=7)
    with pytest.warns(UserWarning, match="a batch of 7 rows does not divide over 2 ranks"):
        loss = pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
    assert compare_values(reference.losses[0], loss.detach(), case.tolerance) is None
    assert compare_gradients(reference.gradients[0], pm.full_gradients(), case.tolerance) is None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        output = pm(*instance.args)
    assert any("does not divide" in str(each.message) for each in said)
    assert compare_values(case.build().model(*instance.args), output, case.tolerance) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a batch of 7 rows does not divide")
@pytest.mark.parametrize(("name", "setting"), [("returns_loss", "data2"), ("whisper", "data2-pipeline2")])
def test_batches_that_divide_and_others_take_turns(name: str, setting: str) -> None:
    """A model's own loss has another name where rows are cut; masks are computed in other stages where something is exchanged."""
    case, chosen = exact(case_named(name)), SETTINGS[setting]
    pm = make_partitioned(case.build(), n_microbatches=chosen.n_microbatches, **chosen.arguments)
    for batch_size in (7, BATCH_SIZE, 7):
        reference = reference_steps(case, n_steps=1, batch_size=batch_size)
        instance = case.build(batch_size=batch_size)
        pm.zero_grad()
        loss = pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
        assert compare_values(reference.losses[0], loss.detach(), case.tolerance) is None
        assert compare_gradients(reference.gradients[0], pm.full_gradients(), case.tolerance) is None


def _partitioned(instance: Instance, setting: str) -> PartitionedModel:
    return make_partitioned(instance, **SETTINGS[setting].arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("tensor3", "fsdp2"), ("fsdp2-tensor2", "data2-pipeline2"), ("zero12", "tensor2"), ("data2-tensor2", "fsdp2")]
)
def test_state_goes_from_one_mesh_to_another(first: str, second: str) -> None:
    """Exactly, bit by bit: parts are cut and put together, nothing is computed."""
    case = case_named("integers_and_flags")
    source, other = case.build(seed=0), case.build(seed=5)
    expected = {name: value.clone() for name, value in source.model.state_dict().items()}
    one, two = _partitioned(source, first), _partitioned(other, second)
    two.load_state_dict(one.full_state_dict())
    one.load_state_dict(two.full_state_dict())
    for pm in (one, two):
        state = pm.full_state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
        assert compare_values(source.model(*source.args, **source.kwargs), pm(*source.args, **source.kwargs), case.tolerance) is None


@pytest.mark.parametrize(
    ("name", "setting", "norm_type"),
    [
        pytest.param("gpt", "tensor2", 2.0, marks=pytest.mark.slow),
        pytest.param("gpt", "fsdp2", float("inf"), marks=pytest.mark.slow),
        ("shared_layer", "data2-pipeline2-tensor2", 2.0),
        pytest.param("shared_layer", "fsdp2-tensor2", 1.0, marks=pytest.mark.slow),
        pytest.param("nested_outputs", "zero13", 2.0, marks=pytest.mark.slow),
        pytest.param("gpt", "data2-pipeline2-tensor2", 1.0, marks=pytest.mark.slow),
    ],
)
def test_clipping_is_torchs(name: str, setting: str, norm_type: float) -> None:
    """Over cut, copied and tied parameters: a parameter that several layers or ranks have counts once."""
    case = case_named(name)
    chosen = SETTINGS[setting]
    instance = case.build(batch_size=chosen.batch_size)
    pm = make_partitioned(instance, **chosen.arguments)
    pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn)
    assert case.loss_fn is not None
    case.loss_fn(instance.model(*instance.args), instance.target).backward()
    expected = nn.utils.clip_grad_norm_(instance.model.parameters(), 0.01, norm_type)
    norm = pm.clip_grad_norm_(0.01, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
    clipped: dict[str, Tensor | None] = {name: parameter.grad for name, parameter in instance.model.named_parameters()}
    assert compare_gradients(clipped, pm.full_gradients(), case.tolerance) is None
