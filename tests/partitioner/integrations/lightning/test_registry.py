"""The name "partitioner" in the registries of Lightning, under both of its names."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib

import pytest

from tests import ROOT

pytest.importorskip("lightning")

DECLARED = "partitioner.integrations.lightning_registry:declare_strategies"


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_it_is_registered() -> None:
    strategies = importlib.import_module("lightning.pytorch.strategies")
    assert "partitioner" in strategies.StrategyRegistry
    assert "partitioner" in importlib.import_module("lightning.fabric.strategies").STRATEGY_REGISTRY


@pytest.mark.slow
@pytest.mark.parametrize("first", ["import partitioner", "import lightning.pytorch"])
def test_it_is_registered_whichever_is_imported_first(first: str) -> None:
    code = f"{first}\nimport partitioner, lightning.pytorch as pl\nprint('partitioner' in pl.strategies.StrategyRegistry)"
    assert printed(code) == "True"


@pytest.mark.slow
def test_the_package_of_the_other_name() -> None:
    code = """
import partitioner, pytorch_lightning as pl
from partitioner.integrations.lightning import PartitionStrategy
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="partitioner", logger=False)
print(isinstance(trainer.strategy, pl.strategies.Strategy), type(trainer.strategy) is PartitionStrategy)
"""
    assert printed(code) == "True True"


def test_lightning_is_not_imported_by_the_package() -> None:
    assert printed("import sys, partitioner\nprint([name for name in sys.modules if 'lightning' in name.partition('.')[0]])") == "[]"


def test_the_entry_point_of_torch_declares_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["torch.backends"] == {"partitioner": DECLARED}
    declare = importlib.metadata.EntryPoint("partitioner", DECLARED, "torch.backends").load()
    assert declare() is None
