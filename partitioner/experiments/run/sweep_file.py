"""Read the arguments of a sweep from a TOML file.

    devices = [2, 4, 8]
    modes = ["data", "pipeline", { pipeline = 2, data = -1 }]
    clusters = ["h100:1x8"]

    [models]
    gpt = "net.py:gpt"

Paths of models and clusters are relative to the folder of the file.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from cost_models.text_files import read_toml
from partitioner.experiments.models.factory import relative_to
from partitioner.experiments.run.sweep import sweep
from partitioner.experiments.run.sweep_options import GRID, option_names
from passes.ir.errors import ConfigError, did_you_mean

_BY_CALLER = ("store", "resume", "retry_failures", "progress", "executor", "options")
"""Arguments of ``sweep`` that a file cannot set."""

_NEEDED = ("models", "devices")


def read_sweep(path: str | Path) -> dict[str, Any]:
    """Return the arguments of ``sweep`` that a file sets.

    Raises:
        ConfigError: the file cannot be read, lacks a required argument, or has an unknown one.
    """
    example = 'devices = [2, 4], modes = ["data", "pipeline"] and, below [models], net = "net.py:factory"'
    arguments = read_toml(path, "the sweep file", f"write TOML: {example}")
    known = list(dict.fromkeys(name for name in (*inspect.signature(sweep).parameters, *GRID, *option_names()) if name not in _BY_CALLER))
    for name in arguments:
        if name not in known:
            remedy = f"{did_you_mean(name, known, str)}choose from {', '.join(known)}"
            raise ConfigError(f"the sweep file {path} has an unknown {name!r}", remedy=remedy)
    for name in _NEEDED:
        if name not in arguments:
            raise ConfigError(f"the sweep file {path} has no {name}", remedy=f"write {example}")
    if not isinstance(arguments["models"], dict):
        raise ConfigError(f"the models of the sweep file {path} have no names", remedy='write them below [models]: net = "net.py:factory"')
    folder = Path(path).parent
    arguments["models"] = {name: relative_to(text, folder) for name, text in arguments["models"].items()}
    for name in ("clusters", "cluster"):
        if name in arguments:
            arguments[name] = _resolve_clusters(arguments[name], folder)
    return arguments


def _resolve_clusters(clusters: Any, folder: Path) -> Any:
    """Prefix the names of TOML files with the folder, in a text, a list or a table of clusters."""
    if isinstance(clusters, dict):
        return {name: _resolve_clusters(text, folder) for name, text in clusters.items()}
    if isinstance(clusters, list):
        return [_resolve_clusters(text, folder) for text in clusters]
    return str(folder / clusters) if isinstance(clusters, str) and clusters.endswith(".toml") else clusters
