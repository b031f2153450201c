"""``Accelerator().prepare(pm, ...)``: the losses, norms and rates of accelerate's own run of the unpartitioned model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from partitioner import partition
from tests.partitioner.integrations.accelerate.training import Trained, local_rows, refusals, shared_values, stream, trained
from tests.partitioner.integrations.loops import data_of, model_of, problems
from tests.support.processes.processes import Workers

KINDS = ("gpt", "resnet")
MODES = ("pipeline", "fsdp", "tensor")
QUICK = (("resnet", "fsdp", 1),)
CASES = [
    pytest.param(kind, mode, count, marks=() if (kind, mode, count) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for mode in MODES
    for count in (1, 2)
]
IN_PROCESSES = [("gpt", "pipeline", 2), *((kind, mode, 1) for kind in KINDS for mode in MODES)]

_whole: dict[tuple[str, int], Trained] = {}


def whole(kind: str, accumulation: int, folder: Path) -> Trained:
    """Return the run of the unpartitioned model."""
    if (kind, accumulation) not in _whole:
        _whole[kind, accumulation] = trained(kind, None, str(folder), accumulation)
    return _whole[kind, accumulation]


def differences(found: Trained, wanted: Trained) -> list[str]:
    return [
        *problems(found.losses, wanted.losses, "losses"),
        *problems(found.norms, wanted.norms, "norms"),
        *problems(found.rates, wanted.rates, "rates"),
        *problems(found.predictions, wanted.predictions, "predictions"),
        *problems(found.resumed, wanted.losses[-len(found.resumed) :], "resumed"),
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "mode", "accumulation"), CASES)
def test_in_one_process(kind: str, mode: str, accumulation: int, tmp_path: Path) -> None:
    found = trained(kind, mode, str(tmp_path / "pm"), accumulation)
    assert not differences(found, whole(kind, accumulation, tmp_path / "whole"))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "mode", "accumulation"), IN_PROCESSES)
def test_in_processes(kind: str, mode: str, accumulation: int, tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    wanted = whole(kind, accumulation, tmp_path / "whole")
    for found in workers(2).values(trained, kind, mode, str(tmp_path / "pm"), accumulation, timeout=580):
        assert not differences(found, wanted)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_local_rows_in_processes(workers: Callable[[int], Workers]) -> None:
    """Each process reads every other batch of half the rows: together these are the batches of one process."""
    model, data = model_of("gpt"), data_of("gpt", 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    losses = []
    for step in range(10):
        tokens, targets = data[4 * step : 4 * step + 4]
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(2):  # accelerate steps once for each process
            scheduler.step()
        losses.append(float(loss.detach()))
    for found in workers(2).values(local_rows, "gpt", timeout=580):
        assert not problems(found.losses, losses, "losses")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_process_reads_a_stream(workers: Callable[[int], Workers]) -> None:
    for found in workers(2).values(stream, "tensor", timeout=580):
        assert not problems(found, stream(None), "losses")


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_be_is_refused_by_name(workers: Callable[[int], Workers]) -> None:
    for said in workers(2).values(refusals, timeout=580):
        assert len(said) == 6
        assert "Accelerator.prepare(loader)" in said[0]
        assert 'inputs="global"' in said[0]
        assert "dispatch_batches" in said[1]
        assert "was prepared before the partitioned model" in said[2]
        for of_accelerate in said[3:5]:
            assert "from partitioner.integrations.accelerate import Accelerator" in of_accelerate
        assert "1.weight is outside of the partitioned model" in said[5]


@pytest.mark.slow
@pytest.mark.gloo
def test_values_of_one_process_reach_all(workers: Callable[[int], Workers]) -> None:
    """A name of the run, a seed, a trigger: the processes are one to loaders and to methods of Accelerator that gather."""
    first, second = workers(2).values(shared_values)
    assert first.pop("of replicas") == [0]
    assert second.pop("of replicas") == [1]
    assert first == second
    assert first["beside"][:2] == [nn.Linear, nn.BatchNorm1d]
    assert first["of processes"] == first["split"] == [0, 1]
    assert first["name"] == ["run 0"]
    assert first["from the second"] == [1]
    assert first["tensors"] == [[0]]
    assert first["triggers"] == [True, False]


@pytest.mark.slow
def test_autocast_around_a_call_is_that_of_the_model() -> None:
    """As ``Accelerator(mixed_precision="bf16")`` and ``TrainingArguments(bf16=True)`` call a model."""
    model = model_of("gpt").float()
    tokens, targets = data_of("gpt", 1)[:]
    pm = partition(model, 2, "tensor", example_inputs=(tokens,), progress=False)
    for each in (model, pm):
        with torch.autocast("cpu", torch.bfloat16):
            logits = each(tokens)
        assert logits.dtype == torch.bfloat16
        nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
    for (name, wanted), found in zip(model.named_parameters(), pm.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=5e-2, atol=5e-3, msg=name)
