"""Measure this machine: compute and memory rates of its devices, and messages between its ranks.

    matrix products of each dtype      the fastest of a few sizes                 -> peak_flops
    copies of memory                   larger than any cache                      -> memory_bandwidth
    an operation on one number         what starting one costs                    -> launch_overhead
    messages, small to large           gloo between two ranks, copies on GPUs     -> links

CPU ranks are processes, but two threads with a process group each send through the same sockets, so no process is started for this.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.hardware.devices import Device, Link
from cost_models.hardware.timer import median_seconds
from passes.ir.comm.backends import GATHERED_BYTES

Measuring = Callable[[str], None]
"""Called with the name of the next measurement."""

STEPS = 7
"""Its number of calls."""

_SIZES = (512, 1024, 2048)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_COPIED_BYTES = 2**28
_LARGE_MESSAGE = 2**24
_MESSAGE_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
"""Sizes of measured messages: gradients of replicas are sent in buckets as large as the last."""
_BYTES_BESIDE_WORK = 2**22
"""A message that takes a few times as long as the work beside it."""
_SWAPS = 25
"""How often a tensor of each size is swapped, for a median."""


def measure_machine(device: torch.device, tell: Measuring) -> tuple[Device, Link]:
    """Measure one device of the machine, and a link between two ranks.

    Args:
        device: what is measured; others of its type are taken to be equal.
        tell: called with each step before it begins.
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
    link = _gpu_link(device) if device.type == "cuda" and torch.cuda.device_count() > 1 else _measured_gloo_link()
    found = Device(
        name=processor_name(device),
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
    """Return the B/s of a large copy, read and written bytes added."""
    source = torch.zeros(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / median_seconds(lambda: target.copy_(source), device, repeats=9, budget=2.0)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33


def processor_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def _gpu_link(device: torch.device) -> Link:
    """Measure copies between the first two devices."""
    other = torch.device(device.type, 1)
    small, large = (torch.zeros(size // 4, device=torch.device(device.type, 0)) for size in (4, _LARGE_MESSAGE * 8))
    latency = median_seconds(lambda: small.to(other), other)
    seconds = median_seconds(lambda: large.to(other), other)
    return Link(latency, _LARGE_MESSAGE * 8 / max(seconds - latency, 1e-9), "device to device")


def gloo_link(seconds: Mapping[float, float], host_share: float) -> Link:
    """Fit ``latency + bytes / bandwidth`` to measured times: the least squares of relative errors.

    Args:
        seconds: bytes of a message -> how long it took; at least two sizes.
        host_share: as ``Link`` has it.
    """
    times = np.array(list(seconds.values()))
    rows = np.array([[1.0, size] for size in seconds]) / times[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    return Link(max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15), "gloo", host_share, GATHERED_BYTES["gloo"])


def _measured_gloo_link() -> Link:
    """Fit a link to the times that two ranks take to swap tensors between matrix products.

    Messages that follow each other without work find both ranks awake, and take a fraction of what they take in a program.
    """
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # its stub lacks it
    found: dict[float, tuple[float, float]] = {}
    failures: list[RuntimeError] = []

    def rank(number: int) -> None:
        try:
            group: Any = dist.ProcessGroupGloo(store, number, 2, dt.timedelta(seconds=30))
            found.update(_swaps(group, number))
        except RuntimeError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    waited, held_up = found[_BYTES_BESIDE_WORK]
    return gloo_link({size: seconds for size, (seconds, _) in found.items()}, min(held_up / waited, 1.0))


def _swaps(group: Any, rank: int) -> Iterator[tuple[float, tuple[float, float]]]:
    """Yield (bytes, (seconds that a swap adds after matrix products, seconds that it adds during them))."""
    left = torch.rand(256, 256)
    for size in _MESSAGE_BYTES:
        tensor, arrived = torch.zeros(size // 4), torch.empty(size // 4)
        added = []
        for started, waited in ((False, False), (True, True), (True, False)):
            times = []
            for _ in range(_SWAPS):
                start = time.perf_counter()
                works = [] if waited or not started else _start_swap(group, rank, tensor, arrived)
                for _ in range(4):
                    torch.mm(left, left)
                works = _start_swap(group, rank, tensor, arrived) if waited else works
                for work in works:
                    work.wait()
                times.append(time.perf_counter() - start)
            added.append(sorted(times)[len(times) // 2])
        alone, after, beside = added
        yield size, (max(after - alone, 1e-6), max(beside - alone, 0.0))


def _start_swap(group: Any, rank: int, tensor: Tensor, arrived: Tensor) -> list[Any]:
    """Start sending a tensor to the other rank, and receiving one; return both works."""
    return [group.send([tensor], 1 - rank, 0), group.recv([arrived], 1 - rank, 0)]
