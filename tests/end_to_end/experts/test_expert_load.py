"""How many tokens each expert had in a recorded step: what the routers of the unpartitioned model choose, in every mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor, nn

from partitioner import Constraints, PartitionedModel
from partitioner.runtime.recording.expert_load import Chosen, ExpertLoad, expert_loads, expert_table
from passes.ir.mesh import Mesh
from tests.support.models.attention.experts import DROPLESS, WIDTH, Dropless, chosen_experts
from tests.support.models.case import Instance
from tests.support.running.transparency import make_partitioned


def expected(instance: Instance) -> list[ExpertLoad]:
    return [ExpertLoad(name, tokens) for name, tokens in chosen_experts(instance.model, *instance.args).items()]


def recorded(pm: PartitionedModel, instance: Instance) -> list[ExpertLoad]:
    with pm.record() as run:
        pm.train_step(*instance.args, target=instance.target, loss_fn=DROPLESS.loss_fn)
    assert [line.split()[0] for line in run.expert_table.splitlines()[1:]] == [load.module.split()[0] for load in run.experts]
    return sorted(run.experts, key=lambda load: load.module)


@pytest.mark.filterwarnings("ignore:a batch of 8 rows does not divide over 3 ranks")
@pytest.mark.parametrize(
    ("mode", "devices", "options"),
    [
        ("pipeline", 2, {"n_microbatches": 4}),
        *(
            pytest.param(mode, devices, options, marks=pytest.mark.slow)
            for mode, devices, options in (
                ("data", 2, {"constraints": Constraints(axes={"experts": "data"})}),
                ("data", 2, {}),
                ("tensor", 2, {"constraints": Constraints(axes={"experts": "tensor"})}),
                ("data", 3, {}),
                ("model", 1, {}),
                ("data", 4, {"constraints": Constraints(axes={"experts": "data"})}),
                ("fsdp", 2, {"recompute": "full"}),
                ("tensor", 3, {"constraints": Constraints(axes={"experts": "tensor"})}),
                ("tensor", 2, {"constraints": Constraints(axes={"ffn": "tensor"})}),
                ({"data": 2, "tensor": 2}, 4, {"constraints": Constraints(axes={"experts": "tensor"})}),
                ({"pipeline": 2, "tensor": 2}, 4, {"n_microbatches": 2}),
                ({"pipeline": 2, "data": 2}, 4, {"n_microbatches": 2, "constraints": Constraints(axes={"experts": "data"})}),
            )
        ),
    ],
)
def test_each_token_counts_once(mode: str | Mapping[str, int], devices: int, options: dict[str, Any]) -> None:
    """Whichever ranks share the batch or the experts, and whatever is computed again."""
    loads = expected(DROPLESS.build())
    instance = DROPLESS.build()
    pm = make_partitioned(instance, mode=mode, devices=devices, **options)
    assert recorded(pm, instance) == loads
    assert recorded(pm, instance) == loads, "a recording counts its own steps alone"


class Twice(nn.Module):
    """One mixture for two values, of which the second chooses as the first does; and another one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture, self.head = Dropless(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.mixture(x) + self.mixture(2 * x))
        return result


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "devices"), [("model", 1), ("pipeline", 2)])
def test_each_call_of_a_mixture_counts(mode: str, devices: int) -> None:
    case = dataclasses.replace(DROPLESS, model=Twice)
    (tokens,) = chosen_experts(case.build().model.get_submodule("mixture"), case.build().args[0]).values()
    instance = case.build()
    pm = make_partitioned(instance, mode=mode, devices=devices)
    assert recorded(pm, instance) == [ExpertLoad("mixture", tokens), ExpertLoad("mixture (2)", tokens)]


def test_a_model_without_experts_has_no_load() -> None:
    instance = DROPLESS.build()
    instance.model.mixtures = nn.ModuleList(nn.Identity() for _ in range(2))
    pm = make_partitioned(instance, mode="pipeline", devices=2)
    assert recorded(pm, instance) == []


def test_experts_of_unequal_parts_lie_one_after_another() -> None:
    """Of five experts over three ranks, and twice the batch."""
    mesh = Mesh((("data", 2), ("tensor", 3)))
    cuts = (("data", 2, "rows"), ("tensor", 3, "experts"))
    parts = [(1, 2), (3, 4), (5,), (10, 20), (30, 40), (50,)]
    loads = expert_loads({rank: [Chosen("mlp", counts, cuts)] for rank, counts in enumerate(parts)}, mesh)
    assert loads == (ExpertLoad("mlp", (11, 22, 33, 44, 55)),)


def test_the_table_says_how_uneven_experts_are() -> None:
    assert expert_table([ExpertLoad("layers.0.mlp", (4, 8, 0, 12)), ExpertLoad("", (0, 0))]).splitlines() == [
        "mixture           experts  tokens  mean  least  most  most / mean",
        "layers.0.mlp            4      24   6.0      0    12         2.00",
        "the model itself        2       0   0.0      0     0         1.00",
    ]
