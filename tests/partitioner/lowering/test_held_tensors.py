"""Ranks hold the tensors that their stages read: of one stage, what the model reads, without writing the graph of any rank."""

from __future__ import annotations

import pytest
import torch

from partitioner import ConfigError, partition
from partitioner.lowering.variants import first_variant
from passes.autograd.staged_model import cut_stages
from passes.stages.split import read_by_one_stage
from tests.support.models.zoo import ZOO, case_named

MODES = ("data", "fsdp", "tensor", "sequence", "tile")

QUICK = {("gpt", mode) for mode in MODES[:-1]} | {("unet", "tile"), ("batch_norm_convolution", "data"), ("mixture_of_experts", "tensor")}

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
    session = pm._session
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
