"""Frameworks' loops of a model that returns its loss: numbers of the unpartitioned model, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.processes.processes import Workers
from tests.support.running.slow_values import all_but

pytest.importorskip("lightning")

from tests.partitioner.integrations.returned_losses import LOOPS, Run, trained

_whole: dict[tuple[str, bool], Run] = {}


def check(found: Run, loop: str, reads: bool, folder: Path) -> None:
    """Compare a run with that of the unpartitioned model."""
    if (loop, reads) not in _whole:
        _whole[loop, reads] = trained(loop, False, folder / "whole", reads)
    whole = _whole[loop, reads]
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(whole.losses), rtol=1e-5, atol=1e-6)
    tolerance = 1e-9 if loop == "lightning" else 1e-6  # transformers computes losses in float32
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, rtol=1e-4, atol=tolerance * 100)


@pytest.mark.parametrize("loop", all_but(["lightning"], LOOPS))
def test_the_schedule_is_run(loop: str, tmp_path: Path) -> None:
    found = trained(loop, True, tmp_path / "pm", False)
    check(found, loop, False, tmp_path)
    assert found.orders == ["FBFBFBFB"] * 4
    assert not found.warned


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_what_reads_other_results_runs_all_forwards_first_and_says_so_once(loop: str, tmp_path: Path) -> None:
    found = trained(loop, True, tmp_path / "pm", True)
    check(found, loop, True, tmp_path)
    assert found.orders[1:] == ["FFFFBBBB"] * 3
    assert len(found.warned) == 1


@pytest.mark.gloo
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_the_schedule_is_run_in_processes(loop: str, tmp_path: Path, workers: Callable[[int], Workers]) -> None:
    for found in workers(2).values(trained, loop, True, tmp_path / "pm", False, timeout=580):
        check(found, loop, False, tmp_path)
        assert found.orders == ["FFFFBBBB", *["FBFBFBFB"] * 3] if loop != "transformers" else ["FBFBFBFB"] * 4
        assert not found.warned
