"""Choose placements with Optuna, which learns good values of each dimension; its storage can distribute a sweep over machines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import NUMBERS, Row
from passes.ir.errors import ConfigError

__all__ = ["OptunaSampler"]

_DIMENSIONS = tuple(Placement.__dataclass_fields__)
_TRIES = 20
"""How many proposals outside of the grid are discarded before ``ask`` gives up."""


class OptunaSampler:
    """Gives placements of the grid that a study of Optuna proposes; needs ``pip install 'torch-partitioner[optuna]'``.

    Several processes, also on several machines, share one study if they name the same storage; each keeps its own rows.

    Args:
        n_trials: the number of placements that this process asks for.
        by: the number to minimize: ``"step_time"``, ``"peak_memory"``, ...
        storage: the storage of the study, ``"sqlite:///study.db"`` or a server; None: in memory.
        study: the name of the study.
        seed: the seed of Optuna's sampler. Proposals are reproducible if a single process asks.

    Raises:
        ConfigError: Optuna is not installed, or an argument does not fit.
    """

    def __init__(
        self, n_trials: int, by: str = "step_time", storage: str | None = None, study: str = "partitioner", seed: int | None = None
    ) -> None:
        if n_trials < 1:
            raise ConfigError(f"n_trials={n_trials} is below 1", remedy="pass 1 or more")
        if by not in NUMBERS:
            raise ConfigError(f"placements cannot be compared by {by!r}", remedy=f"choose one of {', '.join(NUMBERS)}")
        try:
            self._optuna: Any = importlib.import_module("optuna")
        except ImportError as error:
            raise ConfigError(
                "this sampler needs Optuna, which is not installed", remedy="pip install 'torch-partitioner[optuna]'"
            ) from error
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        sampler = self._optuna.samplers.TPESampler(seed=seed)
        self._study: Any = self._optuna.create_study(study_name=study, storage=storage, sampler=sampler, load_if_exists=True)
        self._by = by
        self._n_trials = n_trials
        self._left = 0
        self._choices: dict[str, list[Any]] = {}
        self._grid: frozenset[Placement] = frozenset()
        self._trials: dict[Placement, list[Any]] = {}

    def start(self, placements: Sequence[Placement]) -> int:
        """Set the grid; dimensions with several values are the parameters of the study."""
        self._grid = frozenset(placements)
        values = {name: list(dict.fromkeys(getattr(placement, name) for placement in placements)) for name in _DIMENSIONS}
        self._choices = {name: choices for name, choices in values.items() if len(choices) > 1}
        self._left = self._n_trials
        return min(self._n_trials, len(placements))

    def ask(self, neighbour: Placement | None = None) -> Placement | None:
        """Return Optuna's next proposal; proposals outside of the grid count as pruned."""
        for _ in range(_TRIES if self._left and self._grid else 0):
            trial = self._study.ask()
            proposed = {name: trial.suggest_categorical(name, choices) for name, choices in self._choices.items()}
            placement = Placement(**{**asdict(next(iter(self._grid))), **proposed})
            if placement in self._grid:
                self._left -= 1
                self._trials.setdefault(placement, []).append(trial)
                return placement
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        return None

    def tell(self, placement: Placement, row: Row) -> None:
        """Report the number of a placement to its trials; a placement without this number is a failed trial."""
        number = getattr(row, self._by)
        for trial in self._trials.pop(placement, []):
            if number is None:
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(trial, number)
