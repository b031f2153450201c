"""How long a piece of work takes: the median of repeats, after warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_CACHE_BYTES = 2**24
"""More than the caches that a core has for itself, and than its part of those that it shares."""


def median_seconds(
    work: Callable[[], Any], device: torch.device, *, repeats: int = 20, budget: float = 0.2, among_others: bool = False
) -> float:
    """Return the median seconds of a call; of its thread's processor time where one CPU thread does it all.

    Args:
        work: what is timed.
        device: waited for before and after each call.
        repeats: how often, at most; at least three times.
        budget: seconds after which no further repeat starts.
        among_others: whether caches hold other things when a call starts, as in a program of many operations.
    """
    others = torch.empty(_CACHE_BYTES if among_others and device.type == "cpu" else 0, dtype=torch.uint8)
    for _ in range(2):
        work()
    wait = _wait_for(device)
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < repeats and (len(times) < 3 or time.perf_counter() - begin < budget):
        wait()
        others.add_(1)
        start = clock()
        work()
        wait()
        times.append(clock() - start)
    return statistics.median(times)


def _wait_for(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has finished all work that the host started."""
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)
