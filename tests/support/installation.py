"""The packages as pip installs them, for a fresh interpreter: ours with the metadata of pyproject.toml, all others as links."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import torch

from partitioner import __version__
from tests import ROOT

OURS = ("partitioner", "passes", "cost_models")


def install(folder: Path) -> Path:
    """Fill a folder of packages; return it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = f"{project['name'].replace('-', '_')}-{__version__}.dist-info"
    for entry in Path(torch.__file__).parents[1].iterdir():
        if entry.suffix != ".pth" and entry.name not in OURS and not _is_metadata_of_ours(entry):
            (folder / entry.name).symlink_to(entry)
    for name in OURS:
        (folder / name).symlink_to(ROOT / name)
    (folder / metadata).mkdir()
    (folder / metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {__version__}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *(f"{name} = {to}" for name, to in entries.items()))]
    (folder / metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


def _is_metadata_of_ours(entry: Path) -> bool:
    return entry.suffix == ".dist-info" and entry.name.partition("-")[0] in ("partitioner", "torch_partitioner")


def run_installed(packages: Path, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these packages alone."""
    environment = {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=folder or packages, env=environment, capture_output=True, text=True, timeout=300, check=False)
