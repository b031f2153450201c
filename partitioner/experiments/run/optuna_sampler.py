"""Let Optuna choose placements: it learns which values of each dimension are fast, and its storage spreads a sweep over machines."""

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
"""How often Optuna may propose, for one placement, what is no placement of the grid."""


class OptunaSampler:
    """So many placements of the grid, chosen by a study of Optuna; needs ``pip install 'partitioner[optuna]'``.

    Several processes, also on several machines, share one study if they name one storage; each keeps its own rows.

    Args:
        n_trials: how many placements this process asks for.
        by: the number to make small: ``"step_time"``, ``"peak_memory"``, ...
        storage: where the study is, ``"sqlite:///study.db"`` or a server; None: in memory.
        study: its name.
        seed: of Optuna's own sampler; the same seed, the same proposals where one process asks.

    Raises:
        ConfigError: Optuna is not installed, or an argument does not fit.
    """

    def __init__(
        self, n_trials: int, by: str = "step_time", storage: str | None = None, study: str = "partitioner", seed: int | None = None
    ) -> None:
        if n_trials < 1:
            raise ConfigError(f"n_trials={n_trials} asks for nothing", remedy="pass 1 or more")
        if by not in NUMBERS:
            raise ConfigError(f"placements cannot be compared by {by!r}", remedy=f"choose one of {', '.join(NUMBERS)}")
        try:
            self._optuna: Any = importlib.import_module("optuna")
        except ImportError as error:
            raise ConfigError("this sampler needs Optuna, which is not installed", remedy="pip install 'partitioner[optuna]'") from error
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
        """Begin with a grid."""
        self._grid = frozenset(placements)
        values = {name: list(dict.fromkeys(getattr(each, name) for each in placements)) for name in _DIMENSIONS}
        self._choices = {name: found for name, found in values.items() if len(found) > 1}
        self._left = self._n_trials
        return min(self._n_trials, len(placements))

    def ask(self, neighbour: Placement | None = None) -> Placement | None:
        """What Optuna proposes; proposals that are no placement of the grid count as pruned."""
        for _ in range(_TRIES if self._left and self._grid else 0):
            trial = self._study.ask()
            proposed = {name: trial.suggest_categorical(name, found) for name, found in self._choices.items()}
            placement = Placement(**{**asdict(next(iter(self._grid))), **proposed})
            if placement in self._grid:
                self._left -= 1
                self._trials.setdefault(placement, []).append(trial)
                return placement
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        return None

    def tell(self, placement: Placement, row: Row) -> None:
        """What became of it; what could not be planned fails."""
        number = getattr(row, self._by)
        for trial in self._trials.pop(placement, []):
            if number is None:
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            else:
                self._study.tell(trial, number)
