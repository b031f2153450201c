"""Schedules of the user's train as the model does, and are refused by the action that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from partitioner import ConfigError, Plan, Schedule, VerificationError, partition, register_schedule
from partitioner.schedules.catalog import SCHEDULES, find_schedule, make_schedule


def depth_first(n_stages: int, n_microbatches: int) -> Schedule:
    """Run each microbatch forward and backward before the next one."""
    lines = [",".join(f"{stage}F{each},{stage}B{each}" for each in range(n_microbatches)) for stage in range(n_stages)]
    ranks = tuple((stage,) for stage in range(n_stages))
    return Schedule.parse("\n".join(lines), name="?", stage_ranks=ranks, n_microbatches=n_microbatches)


def on_a_v(n_stages: int, n_microbatches: int) -> Schedule:
    """Give each rank two stages, and split backwards."""
    return make_schedule("ZBV", n_stages // 2, n_microbatches)


SPLIT = Schedule.parse("0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1W0,1B1", name="split", stage_ranks=((0,), (1,)), n_microbatches=2)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8))).double()


def assert_trains(schedule: str | Schedule, devices: int = 2, n_microbatches: int | None = None) -> Plan:
    model, x, target = network(), torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    pm = partition(
        model, devices, "pipeline", example_inputs=(x,), schedule=schedule, n_microbatches=n_microbatches, training=True, progress=False
    )
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    expected = nn.functional.mse_loss(model(x), target)
    expected.backward()
    torch.testing.assert_close(torch.as_tensor(loss), expected.detach())
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    pm.verify()
    return pm.plan


@pytest.mark.parametrize(("function", "stages_per_device"), [(depth_first, 1), (on_a_v, 2)])
def test_a_registered_schedule_trains(function: Callable[[int, int], Schedule], stages_per_device: int) -> None:
    register_schedule(function.__name__, function, stages_per_device=stages_per_device)
    register_schedule(function.__name__, function, stages_per_device=stages_per_device)
    plan = assert_trains(function.__name__, n_microbatches=4)
    assert (plan.schedule, plan.n_microbatches, len(plan.stages)) == (function.__name__, 4, 2 * stages_per_device)
    assert function.__name__ not in SCHEDULES, "the planner chooses from its own"
    assert Plan.from_json(plan.to_json()) == plan


def test_a_schedule_that_is_passed_trains() -> None:
    plan = assert_trains(SPLIT)
    assert (plan.schedule, plan.n_microbatches) == ("split", 2)
    assert assert_trains(SPLIT) == plan


def test_a_smaller_step_leaves_microbatches_out() -> None:
    model, x = network(), torch.randn(8, 6, dtype=torch.float64)
    pm = partition(model, 2, "pipeline", example_inputs=(x,), schedule=SPLIT, training=True, progress=False)
    loss = pm.train_step(x[:1], target=x[:1], loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(torch.as_tensor(loss), nn.functional.mse_loss(model(x[:1]), x[:1]).detach())


def text(lines: str) -> Callable[[int, int], Schedule]:
    return lambda _stages, _count: Schedule.parse(lines, name="?", stage_ranks=((0,), (1,)), n_microbatches=4)


FOUR = [depth_first(2, 4).to_text().splitlines()[rank] for rank in range(2)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((FOUR[0].replace(",0B3", ""), FOUR[1]), "runs 0F3 for microbatch 3 of stage 0"),
        ((FOUR[0] + ",0F3", FOUR[1]), "runs 0B3, 0F3, 0F3"),
        ((FOUR[0].replace("0F0,0B0,0F1,0B1", "0F1,0B1,0F0,0B0"), FOUR[1]), "runs 0F1 in place of 0F0"),
        ((FOUR[0] + ",1F0", FOUR[1]), "runs 1F0 on rank 0"),
        ((FOUR[0] + ",0F4", FOUR[1]), "runs 0F4 on rank 0"),
        ((FOUR[0].replace("0B0,", "0W0,0I0,"), FOUR[1]), "runs 0W0 before 0I0"),
        ((FOUR[0],), "on ranks"),
    ],
)
def test_a_wrong_action_is_named(rows: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        register_schedule("wrong", text("\n".join(rows)))


def test_a_deadlock_is_named() -> None:
    waits = FOUR[0].replace("0F0,0B0", "0B0,0F0")
    with pytest.raises(VerificationError, match="0B0"):
        register_schedule("waits", text(f"{waits}\n{FOUR[1]}"))


def test_names_are_of_one_schedule() -> None:
    with pytest.raises(ConfigError, match="cannot be registered as '1F1B'"):
        register_schedule("1F1B", depth_first)
    register_schedule("taken", depth_first)
    with pytest.raises(ConfigError, match="there is another schedule 'taken'"):
        register_schedule("taken", text("\n".join(FOUR)))
    with pytest.raises(ConfigError, match="register_schedule"):
        find_schedule("not yet")


def test_numbers_of_a_passed_schedule() -> None:
    x = torch.randn(8, 6, dtype=torch.float64)
    with pytest.raises(ConfigError, match="n_microbatches=4 does not fit schedule split, which has 2"):
        partition(network(), 2, "pipeline", example_inputs=(x,), schedule=SPLIT, n_microbatches=4, progress=False)
    with pytest.raises(ConfigError, match="split has 2 stages"):
        partition(network(), 4, "pipeline", example_inputs=(x,), schedule=SPLIT, progress=False)
    with pytest.raises(ConfigError, match="gives each stage one rank"):
        partition(network(), 3, {"pipeline": (2, 1)}, example_inputs=(x,), schedule=SPLIT, progress=False)
    with pytest.raises(ConfigError, match="stages on each device"):
        partition(network(), 2, "pipeline", example_inputs=(x,), schedule=SPLIT, stages_per_device=2, progress=False)
    assert_trains(replace(SPLIT, name="split again"))
