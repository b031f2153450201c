"""Cost models measured on this machine: every op timed, or the analytic model with rates fitted to some timed ops.

    Roofline        from data sheets, for other machines (not measured)
    MeasuredCosts   each distinct call is timed once, and looked up afterwards
    fitted(...)     a Calibrated model: rates for each family of ops, from timed calls; also prices ops that were not timed

All three are a ``CostModel``: ``partition(..., cost_model=MeasuredCosts("times.db"))``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cost_models.cost_model import Roofline
from cost_models.hardware.devices import Device, Link, parse_device
from cost_models.hardware.measure import processor_name
from cost_models.hardware.timer import median_seconds
from cost_models.ops.call import arguments_with
from cost_models.ops.cost import call_work
from cost_models.ops.work import Family, Gradients, Work
from cost_models.profiling.cache import MeasurementStore
from cost_models.profiling.drift import Paces
from cost_models.profiling.kernels import Kernels, kernels_of
from passes.ir.arguments.checked import checked_arguments, read_by
from passes.ir.tensor_spec import TensorSpec
from passes.rules.call import Call, tensors_in


class MeasuredCosts:
    """Times measured on this machine.

    The forward and each half of the backward of a call are the sums of the kernels that they become in programs. For a call that cannot be
    differentiated alone, the backward is the roofline's, scaled by measured over analytic time of its forward. Calls that cannot be timed
    get the roofline.

    Args:
        store: file of the times; ``":memory:"`` writes none.
        device: where operations are timed.
    """

    @checked_arguments({"device": read_by(parse_device)})
    def __init__(self, store: str | Path = ":memory:", device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        self._store = MeasurementStore(store, machine_name(self._device))
        self._roofline = Roofline()
        self._known_kernels: dict[tuple[Call, Gradients], Kernels | None] = {}
        self._asked: dict[tuple[Work, torch.dtype], None] = {}  # forward calls that were priced, in order; see samples
        self._paces = Paces()

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Return the measured seconds of a call, forward or a half of its backward; by the roofline if ``work`` is no single call."""
        analytic = self._roofline.operation_time(work, device, dtype)
        if work.call is None:
            return analytic
        kernels = self._kernels(work.call, work.gradients) if work.gradients else None
        if kernels is not None:
            return sum(self.operation_time(call_work(kernel), device, kernel.result.known_dtype) for kernel in kernels[work.half])
        seconds = self._seconds(work, dtype)
        if seconds is None:
            return analytic
        if work.half == "forward":
            return seconds
        return seconds * analytic / self._roofline.operation_time(call_work(work.call), device, dtype)

    def transfer_time(self, size: float, link: Link) -> float:
        """Return ``latency + bytes / bandwidth``: links are measured by ``Cluster.detect``."""
        return self._roofline.transfer_time(size, link)

    @property
    def samples(self) -> list[Sample]:
        """Return the forward calls priced so far, with their measured times."""
        known = ((work, dtype, self._store[work.call]) for work, dtype in self._asked if work.call is not None)
        return [Sample(work, dtype, seconds) for work, dtype, seconds in known if seconds is not None]

    def time_again(self) -> None:
        """Time every known call once more, and take medians, to correct for a clock rate that drifts.

        Calls timed in a slow minute and in a fast one are not comparable. Repeated times are, each divided by the clock rate at its time
        (``cost_models.profiling.drift``); later calls are corrected by it too.
        """
        for call in self._paces.shuffled_calls():
            seconds = measure_call(call, self._device)
            assert seconds is not None  # it could be timed before
            self._paces.add(call, seconds)
        self._paces.settle()
        for call in self._paces.shuffled_calls():
            self._store[call] = self._paces.time(call)

    def _kernels(self, call: Call, gradients: Gradients) -> Kernels | None:
        if (call, gradients) not in self._known_kernels:
            self._known_kernels[call, gradients] = kernels_of(call, gradients, self._device)
        return self._known_kernels[call, gradients]

    def _seconds(self, work: Work, dtype: torch.dtype) -> float | None:
        call = work.call
        assert call is not None
        if call not in self._store:
            seconds = measure_call(call, self._device)
            if seconds is not None:
                self._paces.add(call, seconds)
            self._store[call] = None if seconds is None else self._paces.time(call)
        if work.half == "forward":
            self._asked[work, dtype] = None
        return self._store[call]


def machine_name(device: torch.device) -> str:
    """Return the key of the machine under which times are stored: device, threads and torch version."""
    return f"{processor_name(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@dataclass(frozen=True)
class Sample:
    """One measured call.

    Attributes:
        work: what it does, in numbers.
        dtype: what it computes in.
        seconds: how long that took.
    """

    work: Work
    dtype: torch.dtype
    seconds: float


@dataclass(frozen=True)
class Rates:
    """Measured rates of a family of ops: ``flops * per_flop + bytes * per_byte + launches * per_launch`` seconds."""

    per_flop: float
    per_byte: float
    per_launch: float


@dataclass(frozen=True)
class Calibrated(Roofline):
    """The analytic model with measured rates for each family of operations and dtype; a roofline for families that have none.

    Attributes:
        rates: (family, dtype) -> rates.
    """

    rates: Mapping[tuple[Family, torch.dtype], Rates] = field(hash=False)

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Return the seconds of an op: a linear model with the rates of its family and dtype, else the roofline."""
        rates = self.rates.get((work.family, dtype))
        if rates is None:
            return super().operation_time(work, device, dtype)
        moved = work.bytes + work.beside
        return float(work.flops * rates.per_flop + moved * rates.per_byte + work.launches * rates.per_launch)


def fitted(samples: Iterable[Sample]) -> Calibrated:
    """Fit rates to measured calls: the least squares of relative errors with no rate below zero, for each family and dtype."""
    groups: defaultdict[tuple[Family, torch.dtype], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.work.family, sample.dtype].append(sample)
    return Calibrated({key: _fit(group) for key, group in groups.items()})


def _fit(samples: list[Sample]) -> Rates:
    rows = np.array([[each.work.flops, each.work.bytes + each.work.beside, each.work.launches] for each in samples], dtype=np.float64)
    seconds = np.array([each.seconds for each in samples])
    scale = np.maximum(rows.max(axis=0), 1e-30)
    found = _nonnegative_least_squares(rows / scale / seconds[:, None], np.ones(len(samples))) / scale
    return Rates(float(found[0]), float(found[1]), float(found[2]))


def _nonnegative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the best solution without negative parts over all subsets of the unknowns."""
    n = matrix.shape[1]
    best, least = np.zeros(n), float(target @ target)
    for subset in range(1, 2**n):
        columns = [column for column in range(n) if subset >> column & 1]
        part, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        if (part < 0).any():
            continue
        rest = matrix[:, columns] @ part - target
        if (error := float(rest @ rest)) < least * (1 - 1e-12):
            best, least = np.zeros(n), error
            best[columns] = part
    return best


# -- time one call of an operator on made-up tensors of its shapes and types -------------------------------------------------------


def measure_call(call: Call, device: torch.device) -> float | None:
    """Time a call; return None if the operator refuses generated arguments.

    Args:
        call: all sizes are numbers.
        device: where it runs.
    """
    for spread in (True, False):
        try:
            arguments = arguments_with(call, partial(_random_argument, places=_places(call) if spread else 1, device=device), device)
            with torch.no_grad():
                return median_seconds(lambda given=arguments: call.operator(**given), device, among_others=True)  # type: ignore[misc]
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
    return None


def _random_argument(_name: str, shape: TensorSpec, *, places: int, device: torch.device) -> Tensor:
    """Draw a random argument; integers may be indices, so they stay below the sizes of other tensors, or are zero."""
    if shape.dtype == torch.bool:
        return torch.rand(shape.shape, device=device) < 0.5
    if shape.known_dtype.is_floating_point or shape.known_dtype.is_complex:
        return torch.rand(shape.shape, device=device, dtype=shape.dtype)
    return torch.randint(places, shape.shape, device=device, dtype=shape.dtype)


def _places(call: Call) -> int:
    """Return a valid index bound for every dimension: the least first size of the floating-point tensors."""
    sizes = [each.shape[0] for _, value in call.values for each in tensors_in(value) if each.known_dtype.is_floating_point and each.shape]
    return max(1, min(sizes, default=1))
