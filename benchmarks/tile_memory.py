"""Memory of sequential tiles on one device: what is predicted beside what is measured, and beside the tiles that diffusers has.

The decoder of ``examples/streamed_decoder.py``, an `AutoencoderKL`: latents of 64 x 64 to an image of 512 x 512. In one piece; the same as
our program; our sequential tiles, which are to take an eighth, parameters counted; and diffusers' ``enable_tiling()``, whose tiles know
nothing of each other and are blended. Memory is that of every storage that a decode makes, for as long as it is there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.live_storages import peak_of
from benchmarks.rounds import say, table
from cost_models.hardware.units import format_bytes
from cost_models.memory.liveness import forward_peak, given_bytes
from examples.streamed_decoder import build
from examples.streamed_decoder import error as largest_error
from partitioner import partition
from partitioner.tracing.trace import trace

SIZE, TILES, SHARE = 64, 36, 8


def decoders(rounds: int) -> None:
    """Print the table."""
    torch.manual_seed(0)
    decoder, latents = build(), torch.randn(1, 4, SIZE, SIZE)
    graph = trace(decoder, (latents,), None, False)
    whole, given = forward_peak(graph), given_bytes(graph)
    program = partition(decoder, devices=1, mode="model", example_inputs=(latents,), progress=False)
    limit = whole // SHARE
    tiles = partition(decoder, devices=1, mode={"tile": TILES}, example_inputs=(latents,), memory_limit=limit, progress=False)

    def blended() -> Tensor:
        decoder.autoencoder.enable_tiling()  # type: ignore[operator]
        found: Tensor = decoder(latents)
        decoder.autoencoder.disable_tiling()  # type: ignore[operator]
        return found

    calls: dict[str, Callable[[], Tensor]] = {
        "in one piece": lambda: decoder(latents),
        "in one piece, our program": lambda: program(latents),
        f"{TILES} sequential tiles": lambda: tiles(latents),
        "tiles of diffusers": blended,
    }
    predicted = {"in one piece, our program": whole - given, f"{TILES} sequential tiles": tiles.plan.memory[0] - given}
    with torch.no_grad():
        found = {name: call() for name, call in calls.items()}  # warms up, too
        peaks = {name: peak_of(call) for name, call in calls.items()}
        times = _medians(calls, rounds)
    for name, prediction in predicted.items():
        assert peaks[name] <= prediction, f"{name}: {peaks[name]} bytes where {prediction} were predicted"
    expected, most = found["in one piece"], peaks["in one piece"]
    rows = [
        (
            name,
            format_bytes(predicted[name]) if name in predicted else "",
            format_bytes(peaks[name]),
            f"1/{most / peaks[name]:.1f}",
            largest_error(found[name], expected).strip(),
            f"{times[name]:.2f}",
        )
        for name in calls
    ]
    head = ("", "predicted", "measured", "of the whole", "largest error", "seconds")
    table(f"Memory of a decode of {SIZE} x {SIZE} latents, beside {format_bytes(given)} of parameters and latents", head, rows)
    say(f"{tiles.plan.notes[-1]}\n")


def _medians(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call, in alternation."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}
