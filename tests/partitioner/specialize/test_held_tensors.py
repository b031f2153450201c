"""Ranks hold the tensors that their stages read: of one stage, what the model reads, without writing the graph of any rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from partitioner import ConfigError, partition
from partitioner.specialize.programs import first_variant
from passes.autograd.staged_model import cut_stages
from passes.stages.split import read_by_one_stage
from tests.support.models.zoo import ZOO, case_named
from tests.support.processes.processes import Workers

MODES = ("data", "fsdp", "tensor", "sequence", "tile")

QUICK = {("gpt", "fsdp"), ("mixture_of_experts", "tensor")}

CASES = [pytest.param(case.name, mode, marks=[] if (case.name, mode) in QUICK else pytest.mark.slow) for case in ZOO for mode in MODES]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_one_stage_reads_what_the_graphs_of_ranks_read(name: str, mode: str) -> None:
    instance = case_named(name).build()
    try:
        pm = partition(instance.model, 2, mode, example_inputs=instance.args, example_kwargs=instance.kwargs, progress=False)
    except ConfigError as refusal:
        if (name, mode) in QUICK or not refusal.problem.startswith(("the model has no axis", "the model has no space")):
            raise
        pytest.skip(refusal.problem)
    session = pm.traced
    model = session.cuts.plan_cut.widest
    assert "parts" not in vars(model)
    lowerer, target = session.cuts.at(first_variant(session.graph, session.plan, "global"))
    read = read_by_one_stage(lowerer.after("boundary_layouts", target).graph)
    cut = lowerer.after("shard", target).cut
    assert cut is not None
    stored = {*session.graph.parameters, *session.graph.buffers, *session.graph.constants}
    for graphs in cut.parts:
        (stage,) = cut_stages(graphs, session.plan, [torch.device("cpu")]).stages
        assert set(stage.bound) == read & stored


class Unread(nn.Module):
    """Reads none of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def whole_state(mode: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    pm = partition(Unread(), 2, mode, example_inputs=(torch.randn(4, 8),), training=True)
    return pm.full_state_dict()


@pytest.mark.gloo
@pytest.mark.parametrize("mode", ["fsdp", "zero1"])
def test_a_model_that_reads_no_parameter_has_all_of_each(mode: str, workers: Callable[[int], Workers]) -> None:
    torch.manual_seed(0)
    model = Unread()
    for state in workers(2).values(whole_state, mode):
        for name, value in state.items():
            assert torch.equal(value, model.state_dict()[name]), name
