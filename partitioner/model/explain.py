"""``pm.explain()`` and ``pm.save_report()``: a plan told in words, and on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from cost_models.formulas.step import StepFormula
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from partitioner.model.simulate import Assumptions
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.planner.price_of_pins import Pinned, pinned
from partitioner.reports.explain.explanation import explanation
from partitioner.reports.page.build import save_page
from partitioner.reports.sources import Explained
from partitioner.reports.tables.devices import DeviceTable
from passes.ir.checked_arguments import checked_arguments
from passes.ir.plan import Plan

__all__ = ["explain", "save_report"]


class _Planned(Protocol):
    """A partitioned model, as far as it is told of."""

    _plan: Plan
    _assumed: Assumptions
    _choices: tuple[Pinned, ...] | None

    def explained(self) -> Explained:
        """What reports read."""

    def device_table(self) -> DeviceTable:
        """A line for each rank."""

    def simulate(self, cluster: Cluster | str | None = None) -> Simulation:
        """A step on a clock."""

    def cost_formula(self) -> StepFormula:
        """A step as formulas."""


@checked_arguments()
def explain(self: _Planned, *, prices: bool = False) -> str:
    """The plan in words and tables: stages, layouts, communication and why, schedule, predicted time and what bounds it.

    Beside the plan stand those that came next.

    Args:
        prices: tell also what everything that was decided beforehand costs (``mode=``, ``schedule=``, an entry of ``constraints=``). Each
            price takes a search of its own, when it is first asked for: seconds for a small model.
    """
    return explanation(self.explained(), _priced(self) if prices else ())


@checked_arguments(VALUES, EXAMPLES)
def save_report(self: _Planned, path: str | Path, cluster: Cluster | str | None = None) -> None:
    """Write all that there is to see as one HTML file, which opens in a browser and needs no network; simulated on a ``cluster``.

    Prices of what was decided beforehand are in it if ``explain(prices=True)`` has found them.
    """
    choices = self._choices or ()
    save_page(path, self.explained(), choices, self.device_table(), self.simulate(cluster), self.cost_formula)


def _priced(self: _Planned) -> tuple[Pinned, ...]:
    """What the user pinned, priced once; nothing where the plan was given."""
    if self._choices is None:
        problem = self._assumed.problem
        self._choices = () if problem is None else pinned(problem, self._plan)
    return self._choices
