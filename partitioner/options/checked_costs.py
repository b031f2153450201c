"""A cost model of a user's own, whose answers are checked: a planner that compares times with nan chooses at random."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from cost_models.cost_model import CostModel, Roofline
from cost_models.hardware.clusters import Device, Link
from cost_models.ops.work import Work
from cost_models.profiling.op_times import Calibrated, MeasuredCosts
from passes.ir.arguments.conform import conform
from passes.ir.errors import ConfigError


class CheckedCosts:
    """Asks another cost model and checks each answer.

    Args:
        asked: the cost model.
    """

    def __init__(self, asked: CostModel) -> None:
        self._asked = asked

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        """Return the wrapped model's price; raise ConfigError unless it is a number of seconds."""
        return self._seconds("operation_time", lambda: self._asked.operation_time(work, device, dtype))

    def transfer_time(self, size: float, link: Link) -> float:
        """Return the wrapped model's price; raise ConfigError unless it is a number of seconds."""
        return self._seconds("transfer_time", lambda: self._asked.transfer_time(size, link))

    def _seconds(self, method: str, ask: Callable[[], float]) -> float:
        where = f"{type(self._asked).__name__}.{method}()"
        remedy = "return seconds: a finite number, 0 or more"
        try:
            seconds = ask()
        except Exception as error:
            raise ConfigError(f"cost_model: {where} failed: {type(error).__name__}: {error}", remedy=remedy) from error
        try:
            found = float(conform(seconds, float, f"the result of {where}"))
        except ConfigError as error:
            raise ConfigError(f"cost_model: {error.problem}", remedy=remedy) from error
        if not (math.isfinite(found) and found >= 0):
            raise ConfigError(f"cost_model: {where} returned {found}", remedy=remedy)
        return found


def checked_costs(cost_model: CostModel | None) -> CostModel | None:
    """Return a cost model with checked prices; cost models of this package are returned unchanged."""
    own = (Roofline, MeasuredCosts, Calibrated, CheckedCosts)
    return cost_model if cost_model is None or type(cost_model) in own else CheckedCosts(cost_model)
