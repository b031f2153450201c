"""``Cluster.detect()``: this machine, measured once and remembered."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cost_models.hardware.devices import Device, Link
from cost_models.hardware.measure import STEPS, measure_machine

_FORMAT = 2


@dataclass(frozen=True)
class Machine:
    """Measurements of this machine.

    Attributes:
        device: each of its devices.
        link: between any two ranks.
        n_devices: how many ranks it has room for: its accelerators, or its cores.
    """

    device: Device
    link: Link
    n_devices: int


def detect(*, refresh: bool, progress: bool | None, folder: Path | None = None) -> Machine:
    """Measure this machine, or return the saved result; see ``Cluster.detect``.

    Args:
        refresh: measure again.
        progress: whether to show what is measured; None: on a terminal alone.
        folder: where results are remembered; None: the user's cache.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    count = torch.accelerator.device_count() if device.type != "cpu" else os.cpu_count() or 1
    file = (folder or cache_folder()) / f"machine-{_machine_key(device)}.json"
    found = None if refresh else _read(file)
    if found is None:
        found = measure_machine(device, _Line(sys.stderr.isatty() if progress is None else progress))
        _write(file, *found)
    return Machine(*found, count)


class _Line:
    """Show the current measurement on one line of the error stream: ``measuring this machine  [##-----]  3/7  memory bandwidth``."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._told = 0

    def __call__(self, step: str) -> None:
        self._told += 1
        if self._shown:
            bar = "#" * (self._told - 1) + "-" * (STEPS - self._told + 1)
            end = "\r\x1b[2K" if self._told == STEPS else ""
            sys.stderr.write(f"\r\x1b[2Kmeasuring this machine  [{bar}]  {self._told}/{STEPS}  {step}{end}")
            sys.stderr.flush()


def cache_folder() -> Path:
    """Return the folder of cached files on this system."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "partitioner"
    if sys.platform == "win32":
        return home / "AppData" / "Local" / "partitioner" / "Cache"
    return home / ".cache" / "partitioner"


def _machine_key(device: torch.device) -> str:
    """Return the key of measurements: the machine, its devices, threads, and the version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    parts = (_FORMAT, platform.node(), platform.machine(), name, os.cpu_count(), torch.get_num_threads(), torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read(file: Path) -> tuple[Device, Link] | None:
    """None where there is no file, or one that is not as this version writes it."""
    try:
        table: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return Device(**table["device"]), Link(**table["link"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _write(file: Path, device: Device, link: Link) -> None:
    described = {name: getattr(device, name) for name in _KEPT} | {"peak_flops": dict(device.peak_flops)}
    table = {"device": described, "link": dataclasses.asdict(link)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(table, indent=2), encoding="utf-8")
    except OSError:
        return  # a machine without a place to write is measured again next time


_KEPT = ("name", "memory_bytes", "memory_bandwidth", "launch_overhead", "compute_efficiency", "bandwidth_efficiency", "asynchronous")
