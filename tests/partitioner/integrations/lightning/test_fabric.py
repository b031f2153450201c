"""Lightning Fabric with a partitioned model: a loop of its own, that accumulates, clips, saves and loads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from partitioner import ConfigError
from tests.support.processes.processes import Workers

pytestmark = pytest.mark.filterwarnings("ignore")

lightning = pytest.importorskip("lightning")

from partitioner.integrations.lightning import FabricPartitionStrategy  # noqa: E402
from tests.partitioner.integrations.lightning.process_cases import fabric_losses  # noqa: E402

MODES = ("pipeline", "fsdp", "tensor")

STRATEGIES = [("FabricPartitionStrategy", "pipeline"), ("FabricPartitionStrategy", "tensor"), ("FabricDDPStrategy", "fsdp")]
"""Name, and a mode."""

RUNS = [
    pytest.param(*run, marks=() if run == ("gpt", "pipeline") else pytest.mark.slow) for run in itertools.product(("gpt", "resnet"), MODES)
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Return the losses of the unpartitioned model, by its kind."""

    @functools.cache
    def losses(kind: str) -> list[float]:
        return fabric_losses(None, kind, "whole", tmp_path_factory.mktemp("whole") / "whole.ckpt")

    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), RUNS)
def test_a_loop_is_that_of_one_device(kind: str, mode: str, expected: Callable[[str], list[float]], tmp_path: Path) -> None:
    torch.testing.assert_close(fabric_losses(None, kind, mode, tmp_path / "state.ckpt"), expected(kind), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_strategy_in_one_process(expected: Callable[[str], list[float]], tmp_path: Path) -> None:
    losses = fabric_losses("FabricPartitionStrategy", "gpt", "fsdp", tmp_path / "state.ckpt")
    torch.testing.assert_close(losses, expected("gpt"), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "mode"), STRATEGIES)
@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_processes_train_as_one_device(
    kind: str, strategy: str, mode: str, expected: Callable[[str], list[float]], workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    for losses in workers(2).values(fabric_losses, strategy, kind, mode, tmp_path / "state.ckpt", timeout=280):
        torch.testing.assert_close(losses, expected(kind), rtol=1e-9, atol=1e-12)


def test_a_model_in_one_piece_is_refused() -> None:
    fabric = lightning.Fabric(accelerator="cpu", strategy=FabricPartitionStrategy())
    fabric.launch()
    with pytest.raises(ConfigError, match=r"given a Linear that is not partitioned(.|\n)*fabric\.setup\(pm, optimizer\)"):
        fabric.setup(nn.Linear(2, 2))
