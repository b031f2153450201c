"""Every example runs, is short, and says that both models give the same numbers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
QUICK = {
    "accelerate_training": ("--steps", "4"),
    "clip_contrastive": (),
    "convolution_channels": (),
    "distributed_sampler": ("--epochs", "2"),
    "elastic_training": ("--steps", "3"),
    "encoder_decoder": ("--steps", "3"),
    "four_quadrants": ("--size", "32"),
    "gpt3_on_1024_gpus": ("--layers", "4", "--devices", "8", "--batch-size", "16"),
    "gpt_pipeline": ("--steps", "3", "--depth", "2", "--batch-size", "8"),
    "lenet_data_parallel": ("--epochs", "1", "--devices", "2"),
    "lightning_fabric": ("--steps", "4"),
    "lightning_trainer": ("--epochs", "2"),
    "llama_tensor": ("--steps", "2", "--sequence"),
    "lora_adapters": ("--steps", "2"),
    "mixed_cluster": ("--layers", "8", "--width", "1024"),
    "mixtral_experts": (),
    "muon_by_owners": ("--steps", "3"),
    "one_weird_trick": ("--devices", "2", "--batch-size", "16"),
    "replicas_of_pipelines": ("--steps", "3"),
    "streamed_decoder": ("--size", "16", "--tiles", "4", "--memory", "0.6"),
    "sweep_on_dask": (),
    "tiled_unet": ("--steps", "2"),
    "tiled_volumes": ("--steps", "2", "--grid", "2"),
    "torchrun_training": ("--steps", "3"),
    "trainer_gpt2": ("--steps", "2"),
    "transformers_from_config": ("--only", "t5", "bert", "--devices", "2"),
    "two_block_convolution": ("--steps", "3"),
    "unet_skips": ("--steps", "3"),
    "unet_space_then_batch": ("--size", "64"),
}
"""Arguments that make each example run in a few seconds."""

EITHER_WAY = ("accelerate_training", "distributed_sampler", "elastic_training", "torchrun_training", "trainer_gpt2")
"""Those that run in one process or in several, and print the losses of their steps."""

PLANNED = {
    "gpt3_on_1024_gpus": r"^gap +\d+\.\d%: \d+ plans",
    "sweep_on_dask": r"^mlp +2 +pipeline +precision=32-true +h100:1x4 ",
    "mixed_cluster": r"^equal layers on the same mesh: .* [1-9]\.\d+ times as long",
}
"""Those that plan a model and run nothing, and a line that they print."""

LONG = frozenset(
    {
        "accelerate_training",
        "clip_contrastive",
        "elastic_training",
        "encoder_decoder",
        "four_quadrants",
        "gpt3_on_1024_gpus",
        "gpt_pipeline",
        "lenet_data_parallel",
        "lightning_fabric",
        "lightning_trainer",
        "llama_tensor",
        "lora_adapters",
        "mixed_cluster",
        "mixtral_experts",
        "muon_by_owners",
        "one_weird_trick",
        "replicas_of_pipelines",
        "streamed_decoder",
        "sweep_on_dask",
        "tiled_unet",
        "tiled_volumes",
        "torchrun_training",
        "trainer_gpt2",
        "transformers_from_config",
        "two_block_convolution",
        "unet_skips",
        "unet_space_then_batch",
    }
)
"""Those that take longest: they run with the full matrices."""

NEEDS = {"sweep_on_dask": "dask.distributed"}
"""Those that need a package which the tests do not install."""

PER_EXAMPLE = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


def main_of(path: Path) -> Callable[[Sequence[str]], None]:
    main: Callable[[Sequence[str]], None] = module_of(path).main
    return main


def module_of(path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def losses_in(text: str) -> list[str]:
    """Return the loss of every step in the table that an example prints."""
    return re.findall(r"^ +\d+ +(\d+\.\d{6})", text, re.MULTILINE)


def test_each_is_listed() -> None:
    assert {path.stem for path in EXAMPLES} == set(QUICK)


@PER_EXAMPLE
def test_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 100
    assert f"    python examples/{path.name}" in text.partition('"""')[2].partition('"""')[0]


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=(pytest.mark.slow,) if path.stem in LONG else ()) for path in EXAMPLES]
)
def test_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem], reason=f"{path.name} needs {NEEDS[path.stem]}, which is not installed")
    main_of(path)(QUICK[path.stem])
    printed = capsys.readouterr().out
    difference = re.search(r"^largest difference (\S+)", printed, re.MULTILINE)
    if path.stem in EITHER_WAY:
        assert losses_in(printed)
    elif path.stem in PLANNED:
        assert re.search(PLANNED[path.stem], printed, re.MULTILINE)
    else:
        assert difference is not None
        assert float(difference[1]) < 1e-3
    assert all(len(line) <= 200 for line in printed.splitlines() if not line.lstrip().startswith(("def ", "#")))


def test_the_sweep_on_dask_runs_on_any_executor() -> None:
    with ThreadPoolExecutor(1) as executor:
        results = module_of(ROOT / "examples" / "sweep_on_dask.py").sweep_on(executor, 1)
    assert len(results) == 16
    assert not results.failures


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", ["accelerate_training", "distributed_sampler", "torchrun_training", "trainer_gpt2"])
def test_torchrun_prints_the_losses_of_one_process(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in EXAMPLES if path.stem == name)
    main_of(path)(QUICK[path.stem])
    embedded = losses_in(capsys.readouterr().out)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path), *QUICK[path.stem]]
    environment = {**os.environ, "PYTHONPATH": str(path.parent.parent)}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert losses_in(finished.stdout) == embedded
    assert len(embedded) >= 1
