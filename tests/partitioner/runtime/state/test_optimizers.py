"""Optimizers of ``pm.parameters()`` do what those of the model's parameters do, or say why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import PartitionedModel, partition, register_optimizer
from passes.ir.errors import ConfigError, TraceError
from tests.support.processes.optimizer_cases import (
    STEPS,
    Make,
    Mode,
    Undeclared,
    a_stage_with_all_parameters,
    batches,
    by_name,
    clipped,
    difference_after,
    groups_train_as_on_the_model,
    hooks_of_parts,
    hooks_of_whole_parameters,
    made,
    model,
    optimizers_of_parts,
    parts_of_sums,
    square,
    whole_replicas,
)
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow

EXACT = 1e-12
OTHERS: list[tuple[Mode, int]] = [("zero1", 2), ("zero2", 2), ({"data": 2, "pipeline": 2}, 4), ({"data": 2, "tensor": 2}, 4)]
EVERY: list[tuple[Mode, int]] = [("data", 2), ("fsdp", 2), ("tensor", 2), ("pipeline", 2), *OTHERS]

_made: dict[tuple[str, int], PartitionedModel] = {}


def fresh(mode: Mode, devices: int) -> PartitionedModel:
    """Return the model partitioned once for all tests, as it was at first."""
    key = str(mode), devices
    if key not in _made:
        _made[key] = made(mode, devices)
    pm = _made[key]
    pm.load_state_dict(model().state_dict())
    pm.zero_grad()
    return pm


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), EVERY, ids=str)
def test_groups_by_original_name_train_as_on_the_model(mode: Mode, devices: int) -> None:
    assert difference_after(fresh(mode, devices)) < EXACT


@pytest.mark.parametrize(
    ("mode", "devices"), [("tensor", 2), pytest.param("fsdp", 2, marks=pytest.mark.slow), pytest.param("zero2", 2, marks=pytest.mark.slow)]
)
def test_groups_by_exact_name_train_as_on_the_model(mode: Mode, devices: int) -> None:
    assert difference_after(fresh(mode, devices), by_name, steps=3) < EXACT


@pytest.mark.parametrize("mode", ["data", *slow("tensor", "fsdp")])
def test_all_ranks_in_one_process_have_the_parameters_of_the_model(mode: Mode) -> None:
    """Each name once, each tensor whole, in the model's order; every rank reads its part of that very memory."""
    pm = fresh(mode, 2)
    assert [(name, parameter.shape) for name, parameter in pm.named_parameters()] == [
        (name, parameter.shape) for name, parameter in model().named_parameters()
    ]
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.fill_(0.5)
    x, _ = batches(1)[0]
    pm(x)
    for rank in range(2):
        for name, part in pm.named_parts(rank):
            assert bool((part == 0.5).all()), name


@pytest.mark.parametrize("name", [*slow("Adafactor", "LBFGS", "Muon"), "clip_grad_norm_"])
@pytest.mark.parametrize(("mode", "devices"), [("tensor", 2), pytest.param({"fsdp": 2, "tensor": 2}, 4, marks=pytest.mark.slow)], ids=str)
def test_optimizers_of_whole_matrices(mode: Mode, devices: int, name: str) -> None:
    """Muon computes in bfloat16: what rounding leaves of a gradient becomes a rounding of that."""
    kinds: dict[str, Make] = {
        "Adafactor": lambda module: torch.optim.Adafactor(module.parameters(), lr=1e-2),
        "LBFGS": lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4),
        "Muon": lambda module: torch.optim.Muon([each for each in module.parameters() if each.dim() == 2], lr=1e-2),
        "clip_grad_norm_": lambda module: torch.optim.SGD(module.parameters(), lr=0.5),
    }
    max_norm = 0.01 if name == "clip_grad_norm_" else None
    assert difference_after(fresh(mode, devices), kinds[name], steps=2, max_norm=max_norm) < (1e-3 if name == "Muon" else 1e-11)


@pytest.mark.parametrize("mode", [*slow("tensor"), "data"])
def test_values_may_be_replaced_by_way_of_data(mode: Mode) -> None:
    """As ``nn.utils.vector_to_parameters`` does: programs read the new memory."""
    pm, reference = fresh(mode, 2), model()
    for module in (pm, reference):
        vector = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.5, module.parameters())
        for parameter in module.parameters():
            parameter.data.add_(0.25)
    x, _ = batches(1)[0]
    torch.testing.assert_close(pm(x), reference(x), rtol=EXACT, atol=EXACT)
    first = next(iter(pm.parameters()))
    first.data = first.data.float()
    if mode == "tensor":
        with pytest.raises(ConfigError, match=r"torch.float32.* now, and was torch.float64"):
            pm(x)
    first.data = first.data.double()


@pytest.mark.parametrize("values", [torch.ones(4, 4), torch.ones(128), torch.ones(16, 8)], ids=["elements", "dimensions", "dtype"])
def test_other_data_is_refused_before_the_first_call(values: torch.Tensor) -> None:
    """A part of a tensor of other sizes would be no part of the parameter."""
    layer, x = nn.Linear(8, 16).double(), torch.ones(4, 8, dtype=torch.float64)
    pm = partition(layer, 2, "tensor", example_inputs=(x,), progress=False)
    pm.weight.data = values.float()
    with pytest.raises(ConfigError, match=r"weight is torch.float32.* now, and was torch.float64 \(16, 8\)"):
        pm(x)


class Renormed(nn.Module):
    """An embedding that scales the rows that it reads, in place, and a layer that shrinks its weight at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, max_norm=0.5)
        self.head = nn.Linear(4, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map any number of rows."""
        with torch.no_grad():
            self.head.weight.mul_(0.9)
        found: torch.Tensor = self.head(self.words(tokens))
        return found


def test_a_parameter_that_the_model_writes_to_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match="writes into a parameter in its forward"):
        partition(Renormed(), 2, "data", example_inputs=(torch.zeros(4, 3, dtype=torch.long),), progress=False)


@pytest.mark.slow
@pytest.mark.usefixtures("devices_apart")
@pytest.mark.parametrize(("mode", "devices"), [("data", 2), ("tensor", 2), ("fsdp", 2), *OTHERS], ids=str)
def test_copies_on_several_devices_do_not_diverge(mode: Mode, devices: int) -> None:
    assert difference_after(made(mode, devices), steps=4) < EXACT
    if mode == "data":
        pm = made(mode, devices)
        assert len(list(pm.parameters())) == len(list(model().parameters()))
        for parameter in pm.parameters():
            parameter.data.mul_(0.5)  # no version counter shows it
        pm(batches(1)[0][0])
        for (name, one), (_, two) in zip(pm.named_parts(0), pm.named_parts(1), strict=True):
            assert one.data_ptr() != two.data_ptr()
            assert torch.equal(one, two), name


def gradient_norm() -> torch.Tensor:
    """Return the model's gradient norm after one step."""
    whole = model()
    x, target = batches(1)[0]
    square(whole(x), target).backward()
    return nn.utils.clip_grad_norm_(whole.parameters(), 1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("devices_apart")
def test_some_parts_of_a_parameter_are_not_updated_alone() -> None:
    pm = made("tensor", 2)
    x, target = batches(1)[0]
    pm.train_step(x, target=target, loss_fn=square)
    named = list(pm.named_parameters())
    assert [name for name, _ in named].count("1.up.weight") == 2
    last = torch.optim.SGD(dict(named).values(), lr=0.1)
    with pytest.raises(ConfigError, match=r"is in 2 parts on several devices, and group 0 of the optimizer has 1 of them"):
        last.step()
    with pytest.raises(ConfigError, match="Adafactor reads whole parameters"):
        torch.optim.Adafactor(pm.parameters()).step()
    torch.testing.assert_close(nn.utils.clip_grad_norm_(pm.parameters(), 1.0), gradient_norm())
    torch.optim.SGD(pm.parameters(), lr=0.1).step()


def test_what_an_optimizer_reads_is_said_of_classes_of_optimizers() -> None:
    with pytest.raises(ConfigError, match="is no class of optimizers"):
        register_optimizer(torch.nn.Linear, "elements")  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="there is no reads='rows'"):
        register_optimizer(Undeclared, "rows")  # type: ignore[arg-type]


# -- in processes ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("mode", "devices"), EVERY, ids=str)
def test_groups_train_as_on_the_model_in_processes(mode: Mode, devices: int, workers: Callable[[int], Workers]) -> None:
    assert max(workers(devices).values(groups_train_as_on_the_model, mode, timeout=170)) < EXACT, STEPS


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["tensor", "fsdp", "pipeline"])
def test_optimizers_of_parts_in_processes(mode: Mode, workers: Callable[[int], Workers]) -> None:
    """A pipeline keeps parameters whole, and a process has some of them."""
    for found in workers(2).values(optimizers_of_parts, mode, timeout=170):
        refusals: dict[str, Any] = dict(found)
        allowed = ["AdamW", "declared", "pm.clip_grad_norm_", "clip_grad_norm_", "clip_grad_value_"]
        if mode == "pipeline":
            allowed += ["Adafactor", "Muon", "one norm"]
        assert {name for name, said in refusals.items() if not said} == set(allowed), refusals
        assert "LBFGS reads all parameters at once" in refusals["LBFGS"]
        assert "register_optimizer(Undeclared" in refusals["Undeclared"]
        assert "pm.clip_grad_norm_" in refusals["norms of data"]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["fsdp", "tensor", "pipeline"])
def test_torchs_clipping_in_processes(mode: Mode, workers: Callable[[int], Workers]) -> None:
    assert max(workers(2).values(clipped, mode, timeout=170)) < EXACT


@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_norms_and_states_where_one_process_has_all_parameters(workers: Callable[[int], Workers]) -> None:
    """It takes part in the norm, and in gathering, since the others have not all."""
    for distance, count in workers(2).values(a_stage_with_all_parameters, timeout=170):
        assert distance < EXACT
        assert count == 3


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_optimizer_of_whole_replicas_is_right(workers: Callable[[int], Workers]) -> None:
    for found in workers(2).values(whole_replicas, timeout=170):
        assert max(found.values()) < 1e-11, found


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_parts_of_sums_are_not_taken_for_sums(workers: Callable[[int], Workers]) -> None:
    for said in workers(2).values(parts_of_sums, timeout=170):
        assert all(said[:4]), said
        assert not any(said[4:]), said


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_hooks_of_parameters_in_processes(workers: Callable[[int], Workers]) -> None:
    for later, before in workers(2).values(hooks_of_parts, "fsdp", timeout=170):
        assert "has a hook, and this process has a part of it" in later
        assert "has a hook, and this process has a part of it" in before
    for mode in ("data", "pipeline"):
        assert max(workers(2).values(hooks_of_whole_parameters, mode, timeout=170)) < EXACT


@pytest.mark.slow
def test_the_optimizer_of_the_original_is_told_apart() -> None:
    original = model()
    pm = partition(original, 2, "data", example_inputs=(batches(1)[0][0],), progress=False)
    assert isinstance(pm, PartitionedModel)
    for call in (pm.full_optimizer_state_dict, pm.sharded_optimizer_state_dict):
        with pytest.raises(ConfigError, match=r"parameter 0 of group 0 of the optimizer, of shape \(8, 4\), is none of this model's"):
            call(grouped_of(original))


def grouped_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters())
