"""Run a planned placement on this machine, one process a rank, and time its steps."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from partitioner.experiments.models.subject import ModelSource
from partitioner.experiments.results.row import Row
from passes.ir.errors import ConfigError

_HOW = 'name a file and a function in it, models={"net": "net.py:factory"}, or import the function from a module'
_LIMIT = 600.0
"""Seconds after which a run is stopped and reported as not measured."""


def check_measurable(sources: Mapping[str, ModelSource]) -> None:
    """Raise ConfigError for a model whose source cannot be pickled, or unpickled in other processes."""
    for name, source in sources.items():
        try:
            text = pickle.dumps(source)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"the model {name} cannot be made in other processes: {error}", remedy=_HOW) from error
        if b"__main__" in text:
            raise ConfigError(f"the model {name} is defined in the script itself, where other processes do not find it", remedy=_HOW)


def measure_row(row: Row, source: ModelSource) -> Row:
    """Run the plan of a row under torchrun; return the row with the measured time and memory, or with the reason why there are none."""
    with tempfile.TemporaryDirectory(prefix="partitioner-") as name:
        folder = Path(name)
        (folder / "model").write_bytes(pickle.dumps(source))
        (folder / "plan.json").write_text(row.plan, encoding="utf-8")
        (folder / "options.json").write_text(row.options, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.devices)]
        command += ["-m", "partitioner.experiments.run.measured_run", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return dataclasses.replace(row, reason=f"not measured: it ran longer than {_LIMIT:g} s")
        result = folder / "measured.json"
        if done.returncode != 0 or not result.exists():
            return dataclasses.replace(row, reason=f"not measured: {last_error(done.stderr)}")
        measured = json.loads(result.read_text(encoding="utf-8"))
    return dataclasses.replace(row, measured_step_time=measured["step_time"], measured_memory=measured["memory"])


def last_error(log: str) -> str:
    """Return the first line of a torchrun log that names an error; else the signal that killed a process; else the first line."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and "ChildFailedError" not in line]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "error:" in line.lower()]
    signals = [line.partition(":")[2].strip() for line in lines if line.startswith("traceback : Signal")]
    return (errors or signals or lines or ["it ended without a word"])[0][:300]
