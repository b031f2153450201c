"""Measure this machine: what its devices compute and move, and what messages between its ranks take.

    matrix products of each dtype      the fastest of a few sizes                 -> peak_flops
    copies of memory                   larger than any cache                      -> memory_bandwidth
    an operation on one number         what starting one costs                    -> launch_overhead
    messages, small and large          gloo between two ranks, copies on GPUs     -> links

CPU ranks are processes, but two threads with a process group each send through the same sockets, so no process is started for this.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cost_models.devices import Device, Link
from cost_models.measurement.clock import median_seconds

__all__ = ["Measuring", "measure_machine"]

Measuring = Callable[[str], None]
"""Is told what is measured next."""

STEPS = 7
"""How often it is told."""

_SIZES = (512, 1024, 2048)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_COPIED_BYTES = 2**28
_LARGE_MESSAGE = 2**24


def measure_machine(device: torch.device, tell: Measuring) -> tuple[Device, Link]:
    """One device of the machine, and a link between two ranks.

    Args:
        device: what is measured; others of its type are taken to be equal.
        tell: is told each step before it begins.
    """
    flops = {}
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        tell(f"matrix products in {name}")
        flops[name] = _product_rate(dtype, device)
    tell("memory bandwidth")
    bandwidth = _copy_rate(device)
    tell("starting operations")
    one = torch.zeros(1, device=device)
    overhead = median_seconds(lambda: [one.add(1) for _ in range(100)], device) / 100
    tell("messages")
    link = _gpu_link(device) if device.type == "cuda" and torch.cuda.device_count() > 1 else _gloo_link()
    found = Device(
        name=_name(device),
        peak_flops=flops,
        memory_bytes=_memory(device),
        memory_bandwidth=bandwidth,
        launch_overhead=overhead,
        compute_efficiency=1.0,
        bandwidth_efficiency=1.0,
        asynchronous=device.type != "cpu",
    )
    return found, link


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the best square product; sizes grow as long as one takes less than a tenth of a second."""
    best = 0.0
    for size in _SIZES:
        left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
        seconds = median_seconds(lambda left=left, right=right: left @ right, device, repeats=5, budget=0.5)  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
        if seconds > 0.1:
            break
    return best


def _copy_rate(device: torch.device) -> float:
    """B/s read and written."""
    source = torch.zeros(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / median_seconds(lambda: target.copy_(source), device, repeats=9, budget=2.0)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _gpu_link(device: torch.device) -> Link:
    """Copies between the first two devices."""
    other = torch.device(device.type, 1)
    small, large = (torch.zeros(size // 4, device=torch.device(device.type, 0)) for size in (4, _LARGE_MESSAGE * 8))
    latency = median_seconds(lambda: small.to(other), other)
    seconds = median_seconds(lambda: large.to(other), other)
    return Link(latency, _LARGE_MESSAGE * 8 / max(seconds - latency, 1e-9), "device to device")


def _gloo_link() -> Link:
    """Half a round trip of a small and of a large message between two ranks."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # its stub lacks it
    found: dict[int, float] = {}
    failures: list[RuntimeError] = []

    def rank(number: int) -> None:
        try:
            group: Any = dist.ProcessGroupGloo(store, number, 2, dt.timedelta(seconds=30))
            found.update(_round_trips(group, number))
        except RuntimeError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    latency = found[4]
    return Link(latency, _LARGE_MESSAGE / max(found[_LARGE_MESSAGE] - latency, 1e-9), "gloo")


def _round_trips(group: Any, rank: int) -> Iterator[tuple[int, float]]:
    for size, repeats in ((4, 200), (_LARGE_MESSAGE, 7)):
        tensor = torch.zeros(size // 4)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            for sending in (rank == 0, rank == 1):
                (group.send([tensor], 1 - rank, 0) if sending else group.recv([tensor], 1 - rank, 0)).wait()
            times.append((time.perf_counter() - start) / 2)
        yield size, sorted(times)[len(times) // 2]
