"""Another number of devices: a new plan, what moves, and a training that goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from cost_models.hardware.clusters import Cluster
from partitioner import ConfigError, InfeasiblePlanError, PartitionedModel, partition
from partitioner.model.inspection.replan import Replanned
from tests.support.models.attention.gpt import Gpt
from tests.support.processes.processes import Workers
from tests.support.processes.resumed_cases import resumed_difference

Mode = str | Mapping[str, int]
WIDE = "a100-80gb:1x8"


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randint(0, 23, (8, 6)), torch.randint(0, 23, (8, 6))) for _ in range(count)]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(depth=1).double()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(pm: PartitionedModel, optimizer: torch.optim.Optimizer, steps: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    losses = []
    for tokens, target in steps:
        optimizer.zero_grad()
        losses.append(pm.train_step(tokens, target=target, loss_fn=loss_fn).detach())
        optimizer.step()
    return losses


def uninterrupted(steps: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], Mapping[str, Tensor]]:
    model = model_of()
    optimizer = optimizer_of(model.parameters())
    losses = []
    for tokens, target in steps:
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, model.state_dict()


def partitioned(devices: int, **arguments: Any) -> PartitionedModel:
    tokens = batches(1)[0][0]
    return partition(model_of(), devices, example_inputs=(tokens,), cluster=WIDE, progress=False, **arguments)


def check_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "mode"),
    [
        (2, "auto"),
        (8, "auto"),
        (8, {"fsdp": 2, "pipeline": 2, "tensor": 2}),
        (2, "fsdp"),
    ],
    ids=str,
)
def test_a_training_goes_on_with_another_number_of_devices(devices: int, mode: Mode, tmp_path: Path) -> None:
    """Two steps on four devices, two on others: losses and weights of four steps in one piece."""
    steps = batches(4)
    losses, weights = uninterrupted(steps)
    pm = partitioned(4, mode={"data": 2, "tensor": 2})
    optimizer = optimizer_of(pm.parameters())
    first = trained(pm, optimizer, steps[:2])
    replanned = pm.replan(devices, mode)
    assert replanned.plan.n_ranks == devices
    new = partitioned(devices, plan=replanned.plan)
    new.load_state_dict(pm.full_state_dict())
    other = optimizer_of(new.parameters())
    new.load_optimizer_state_dict(other, pm.full_optimizer_state_dict(optimizer))
    second = trained(new, other, steps[2:])
    torch.testing.assert_close(torch.stack([*first, *second]), torch.stack(losses), rtol=0, atol=1e-9)
    check_close(new.full_state_dict(), weights)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_checkpoint_of_one_plan_is_that_of_any(tmp_path: Path) -> None:
    """Saved in blocks by four devices, loaded by two that have not stepped yet, with the optimizer's state."""
    steps = batches(4)
    losses, weights = uninterrupted(steps)
    pm = partitioned(4, mode={"fsdp": 2, "tensor": 2})
    optimizer = optimizer_of(pm.parameters())
    trained(pm, optimizer, steps[:2])
    whole = {"model": pm.sharded_state_dict(), "optimizer": pm.sharded_optimizer_state_dict(optimizer)}
    save(whole, checkpoint_id=tmp_path, no_dist=True)
    new = partitioned(2, plan=pm.replan(2).plan)
    other = optimizer_of(new.parameters())
    state = {"model": new.sharded_state_dict(), "optimizer": new.sharded_optimizer_state_dict(other)}
    load(state, checkpoint_id=tmp_path, no_dist=True)
    new.load_state_dict(state["model"])
    new.load_optimizer_state_dict(other, state["optimizer"])
    torch.testing.assert_close(torch.stack(trained(new, other, steps[2:])), torch.stack(losses[2:]), rtol=0, atol=1e-9)
    check_close(new.full_state_dict(), weights)


@pytest.mark.slow
def test_the_optimizers_state_is_that_of_the_model_in_one_piece() -> None:
    """Names, tensors and options, as those of an optimizer of the whole model."""
    steps = batches(2)
    model = model_of()
    whole = optimizer_of(model.parameters())
    for tokens, target in steps:
        whole.zero_grad()
        loss_fn(model(tokens), target).backward()
        whole.step()
    expected: Any = get_optimizer_state_dict(model, whole)
    pm = partitioned(4, mode={"pipeline": 2, "tensor": 2})
    optimizer = optimizer_of(pm.parameters())
    trained(pm, optimizer, steps)
    found = pm.full_optimizer_state_dict(optimizer)
    assert set(found["state"]) == set(expected["state"])
    for name, entries in expected["state"].items():
        assert set(found["state"][name]) == set(entries)
        for what, value in entries.items():
            torch.testing.assert_close(found["state"][name][what], value, rtol=1e-9, atol=1e-9)
    (mine,), (theirs,) = found["param_groups"], expected["param_groups"]
    assert set(mine.pop("params")) == set(theirs.pop("params"))
    assert mine == theirs


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("first", "second"), [("fsdp", "pipeline"), ("pipeline", "tensor")])
def test_processes_go_on_under_another_plan(first: str, second: str, workers: Callable[[int], Workers]) -> None:
    assert all(difference < 1e-9 for difference in workers(2).values(resumed_difference, first, second, timeout=170))


def test_bytes_are_those_of_the_tensors() -> None:
    """From two ranks that hold everything to four: two receive everything, in double precision, with two states of AdamW."""
    pm = partitioned(2, mode="data")
    grown = pm.replan(4, "data")
    model = model_of()
    names = dict(model.named_parameters())
    parameters = sum(parameter.nbytes for parameter in names.values())
    buffers = sum(tensor.nbytes for name, tensor in model.state_dict().items() if name not in names and "weight" not in name)
    everything = 3 * parameters + buffers
    assert grown.moves.between_ranks == 2 * everything
    assert grown.moves.kept == (everything, everything, 0, 0)
    assert [grown.moves.received(rank) for rank in range(4)] == [0, 0, everything, everything]
    assert grown.moves.sent(0) + grown.moves.sent(1) == 2 * everything
    assert grown.moves.from_checkpoint == 0


@pytest.mark.slow
def test_blocks_are_those_that_the_new_model_holds() -> None:
    """Kept and received bytes of a rank are all that it holds, and two states of AdamW for what trains."""
    pm = partitioned(4, mode={"data": 2, "tensor": 2})
    replanned = pm.replan(8, {"pipeline": 2, "fsdp": 2, "tensor": 2})
    new = partitioned(8, plan=replanned.plan)
    for rank in range(8):
        parts = sum(part.nbytes for _, part in new.named_parts(rank))
        buffers = sum(value.nbytes for key, value in new.traced.state.by_rank[rank].items() if key in new.traced.graph.buffers)
        size = 3 * parts + buffers
        assert replanned.moves.kept[rank] + replanned.moves.received(rank) + replanned.moves.loaded(rank) == size


@pytest.mark.slow
def test_a_lost_rank_takes_along_what_it_alone_held() -> None:
    pm = partitioned(4, mode="tensor")
    lost: Replanned = pm.replan(2, "tensor", survivors=[0, 3])
    assert lost.moves.from_checkpoint > 0
    assert "come from a checkpoint: no rank that is left has them" in str(lost)
    copies = partitioned(4, mode="data").replan(2, "data", survivors=[1, 2])
    assert (copies.moves.from_checkpoint, copies.moves.between_ranks) == (0, 0)


@pytest.mark.slow
def test_less_memory_asks_for_another_plan() -> None:
    pm = partitioned(2, mode="data")
    limit = int(max(pm.plan.memory) * 0.7)
    replanned = pm.replan(memory_limit=limit)
    assert max(replanned.plan.memory) <= limit < max(pm.plan.memory)
    with pytest.raises(InfeasiblePlanError, match="lacks"):
        pm.replan(memory_limit=1000)


@pytest.mark.parametrize("recompute", ["full", "selective", {"*": "full"}, None], ids=str)
def test_recomputation_is_that_which_was_asked_for(recompute: str | dict[str, str] | None) -> None:
    """Left out, the planner chooses again."""
    tokens = torch.zeros(8, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    pm = partition(model, 2, "data", example_inputs=(tokens,), cluster=WIDE, recompute=recompute, progress=False)
    assert pm.plan.recompute == (recompute if isinstance(recompute, str) else "by region" if recompute else "none")
    plan = pm.replan(4, "fsdp").plan
    assert (plan.recompute, [each.recompute for each in plan.regions]) == (pm.plan.recompute, [each.recompute for each in pm.plan.regions])


def test_what_does_not_fit_is_told() -> None:
    pm = partitioned(2, mode="data")
    with pytest.raises(ConfigError, match=r"survivors=\[0, 0\] does not name"):
        pm.replan(2, survivors=[0, 0])
    with pytest.raises(ConfigError, match="the cluster has 2"):
        pm.replan(4, cluster=Cluster.preset("v100", 1, 2))
    optimizer = optimizer_of(pm.parameters())
    with pytest.raises(ConfigError, match="unknown names in the optimizer's state: nothing"):
        pm.load_optimizer_state_dict(optimizer, {"state": {"nothing": {}}, "param_groups": []})
