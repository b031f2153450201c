"""``batchnorm="local"``: batch normalisation by each rank's own rows, as DistributedDataParallel does."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from partitioner import Plan, partition
from passes.ir.comm import primitives as communication


def model(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).double()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("mode", "momentum"),
    [("data", None), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("data", 0.1), ("fsdp", 0.1), ("fsdp", None)))],
)
def test_is_what_replicas_of_the_model_do(mode: str, momentum: float | None) -> None:
    original, x, target = model(momentum), torch.rand(8, 2, 6, 6, dtype=torch.float64), torch.randint(3, (8,))
    pm = partition(original, 2, mode, example_inputs=(x,), batchnorm="local", progress=False)
    loss = pm.train_step(x, target=target, loss_fn=cross_entropy)
    replicas = [copy.deepcopy(original) for _ in range(2)]
    losses = [cross_entropy(each(part), goal) for each, part, goal in zip(replicas, x.chunk(2), target.chunk(2), strict=True)]
    expected = torch.stack(losses).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    gradients = pm.full_gradients()
    for name, _ in original.named_parameters():
        torch.testing.assert_close(gradients[name], sum(replica.get_parameter(name).grad for replica in replicas), msg=name)
    # Stored statistics are those of the rows that a rank has seen; the first rank's are the model's.
    assert not torch.equal(replicas[0].get_buffer("1.running_mean"), replicas[1].get_buffer("1.running_mean"))
    state = pm.full_state_dict()
    for name, buffer in replicas[0].named_buffers():
        torch.testing.assert_close(state[name], buffer, msg=name)
    torch.testing.assert_close(dict(pm.named_buffers())["1.running_mean@rank1"], replicas[1].get_buffer("1.running_mean"))


def test_statistics_are_not_communicated() -> None:
    x = torch.rand(8, 2, 6, 6, dtype=torch.float64)
    counts = {}
    for batchnorm in ("sync", "local"):
        pm = partition(model(), 2, "data", example_inputs=(x,), batchnorm=batchnorm, progress=False)
        nodes = pm.graph(0).graph.nodes
        counts[batchnorm] = sum(node.target is communication.all_reduce and str(node.meta.get("section")) == "0F0" for node in nodes)
        assert Plan.from_json(pm.plan.to_json()).batchnorm == batchnorm
    assert counts["local"] == 0 < counts["sync"]


@pytest.mark.slow
def test_the_plan_says_which() -> None:
    x = torch.rand(8, 2, 6, 6, dtype=torch.float64)
    local = partition(model(), 2, "data", example_inputs=(x,), batchnorm="local", progress=False)
    again = partition(model(), 2, example_inputs=(x,), plan=local.plan, progress=False)
    torch.testing.assert_close(again(x), local(x), rtol=0, atol=0)
    synchronous = partition(model(), 2, "data", example_inputs=(x,), progress=False)
    assert not torch.allclose(synchronous(x), local(x))
