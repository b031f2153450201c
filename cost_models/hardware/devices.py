"""Devices and the links between them: what a cluster is made of.

Peaks are the maker's numbers; how much of them an operation of some size reaches is ``cost_models.ops.tile_efficiency``'s, how long
messages take ``cost_models.collectives.alpha_beta``'s.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch

from passes.ir.arguments.checked import check_fields, checked_names
from passes.ir.errors import ConfigError

MOST_DEVICES = 2**17
"""More devices than any machine has: a number beyond it is a mistake, and its list of devices alone would fill the memory."""


def check(holds: bool, problem: str) -> None:
    """Raise ConfigError with a description's problem unless it holds."""
    if not holds:
        raise ConfigError(problem, remedy="correct the description of the cluster")


def check_count(n_devices: int) -> None:
    """Raise ConfigError for a number of devices that no cluster has."""
    if n_devices > MOST_DEVICES:
        raise ConfigError(
            f"devices={n_devices}: there may be {MOST_DEVICES} at most",
            remedy="check the number of devices",
        )


def parse_device(name: str | torch.device) -> torch.device:
    """Return a device by its name; raise ConfigError if it does not exist.

    >>> parse_device("cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{name!r} is no device", remedy='devices are named "cpu", "cuda:0", ...') from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        remedy = f"{torch.cuda.device_count()} CUDA devices are visible; devices=4 takes the CPU"
        raise ConfigError(f"there is no device {name}", remedy=remedy)
    if device.type not in ("cpu", "cuda", "meta"):
        try:
            torch.empty(0, device=device)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"there is no device {name}: {reason}", remedy='choose "cpu", or an accelerator that torch sees') from error
    return device


def _check_dtype(device: str, name: str) -> None:
    """Raise ConfigError unless a key of ``peak_flops`` is the name of a dtype: operations look up their rate by ``"float32"``."""
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}":
        return
    near = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None
    close = [near] if near is not None else difflib.get_close_matches(name.lower(), _DTYPES, n=1, cutoff=0.4)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"device {device!r}: peak_flops has no dtype {name!r}", remedy=f"{guess}name dtypes as torch does: {', '.join(_DTYPES)}"
    )


_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
"""Usual dtypes of matrix products, for suggestions."""

_POSITIVE = ("memory_bytes", "memory_bandwidth", "processors", "cache_bandwidth", "store_bandwidth")


@checked_names
@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU.

    Attributes:
        name: for reading.
        peak_flops: FLOP/s by dtype name (``{"float32": 19.5e12}``). A dtype that is not named runs at the lowest rate named.
        memory_bytes: what it holds.
        memory_bandwidth: B/s.
        launch_overhead: s of the host to start one operation, whatever its size.
        compute_efficiency: the part of the peak that the inner loops of large matrix products reach.
        bandwidth_efficiency: the part of the bandwidth that large copies reach.
        asynchronous: whether the host starts operations ahead of the device, so that only operations shorter than a launch wait for it.
        kernel_latency: s of the device that each kernel loses at its start and end.
        processors: how many units work on a matrix product at the same time (streaming multiprocessors).
        tiles: rows and columns of the result that one processor computes at once, for each kernel there is; none: any size is even.
        cache_bandwidth: B/s at which all processors together read what they multiply; infinite where it limits nothing.
        store_bandwidth: B/s at which all processors together write results.
        price_per_hour: price of the device for an hour, in any currency; None: not known.

    Raises:
        ConfigError: a number is not positive, a rate is infinite, an efficiency is over 1, or ``peak_flops`` names no dtype of torch.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    launch_overhead: float = 5e-6
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    asynchronous: bool = False
    kernel_latency: float = 0.0
    processors: int = 1
    tiles: Sequence[tuple[int, int]] = ()
    cache_bandwidth: float = math.inf
    store_bandwidth: float = math.inf
    price_per_hour: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments that make an equal device: a read-only mapping cannot be pickled."""
        values = (getattr(self, each.name) for each in fields(self))
        return Device, tuple(dict(value) if isinstance(value, Mapping) else value for value in values)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "peak_flops", MappingProxyType(dict(self.peak_flops)))
        object.__setattr__(self, "tiles", tuple((rows, columns) for rows, columns in self.tiles))
        rates = {f"peak_flops[{dtype!r}]": rate for dtype, rate in self.peak_flops.items()}
        positive = {**rates, **{name: getattr(self, name) for name in _POSITIVE}}
        for name, number in positive.items():
            check(number > 0, f"device {self.name!r}: {name} must be positive, got {number}")
        for name, number in {**rates, "memory_bandwidth": self.memory_bandwidth}.items():
            check(number < math.inf, f"device {self.name!r}: {name} must be finite, got {number}")
        check(bool(self.peak_flops), f"device {self.name!r}: peak_flops names no dtype")
        for dtype in self.peak_flops:
            _check_dtype(self.name, dtype)
        price = self.price_per_hour
        check(price is None or 0 <= price < math.inf, f"device {self.name!r}: price_per_hour must be finite and not negative, got {price}")
        for name in ("launch_overhead", "kernel_latency"):
            number = getattr(self, name)
            check(0 <= number < math.inf, f"device {self.name!r}: {name} must be finite and not negative, got {number}")
        check(all(min(tile) > 0 for tile in self.tiles), f"device {self.name!r}: tiles must be positive, got {self.tiles}")
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            check(0 < getattr(self, name) <= 1, f"device {self.name!r}: {name} must be in (0, 1], got {getattr(self, name)}")

    def flops(self, dtype: torch.dtype) -> float:
        """FLOP/s that large matrix products of this dtype reach."""
        name = str(dtype).removeprefix("torch.")
        name = {"complex64": "float32", "complex128": "float64"}.get(name, name)
        return self.peak(name) * self.compute_efficiency

    def peak(self, dtype: str) -> float:
        """FLOP/s of the data sheet for the name of a dtype."""
        return self.peak_flops.get(dtype, min(self.peak_flops.values()))

    @property
    def bandwidth(self) -> float:
        """B/s that large copies reach."""
        return self.memory_bandwidth * self.bandwidth_efficiency


@checked_names
@dataclass(frozen=True)
class Link:
    """Link between two devices: a message of n bytes takes ``latency + n / bandwidth`` seconds, each way at the same time.

    Attributes:
        latency: s.
        bandwidth: B/s one way that large messages reach.
        name: for reading: ``"NVLink"``.
        host_share: the part of a message's time that both ends' processors are busy with it and compute nothing else: 0 where engines of
            the devices move data, the processors that a library's kernels take of all on a GPU, most of it where a CPU hands bytes to
            sockets. The overhead of LogP (Culler et al., "LogP: towards a realistic model of parallel computation", 1993), as a part of
            the whole.
        gathered_bytes: of all ranks' tensors up to which an all-reduce is one exchange, each rank reducing what it gathers.
        start: s that a collective takes once, whatever its steps.
        copies: whether ranks copy tensors into the message of a collective and out of it, where their memory order differs: all
            but ranks of one process do.
    """

    latency: float
    bandwidth: float
    name: str = ""
    host_share: float = 0.0
    gathered_bytes: int = 0
    start: float = 0.0
    copies: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        check(0 <= self.latency < math.inf, f"a link's latency must be finite and not negative, got {self.latency}")
        check(self.bandwidth > 0, f"a link's bandwidth must be positive, got {self.bandwidth}")
        check(0 <= self.start < math.inf, f"a link's start must be finite and not negative, got {self.start}")
        check(self.gathered_bytes >= 0, f"a link's gathered_bytes must not be negative, got {self.gathered_bytes}")
        check(0 <= self.host_share <= 1, f"a link's host_share must be in [0, 1], got {self.host_share}")


SAME_DEVICE = Link(latency=0.0, bandwidth=math.inf)
"""Link of a rank to itself."""


@checked_names
@dataclass(frozen=True)
class Level:
    """Places a and b with ``a // size == b // size`` are joined by this link, unless a smaller level joins them already.

    Attributes:
        size: how many places it joins.
        link: between any two of them.
        shared: whether each unit of the next smaller level (a node) has one such link for all of its devices; else each device has its own.
    """

    size: int
    link: Link
    shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check(self.size >= 1, f"a level joins at least one place, got size {self.size}")
