"""Evaluate placements on an executor that the caller passes: processes here, or Dask, Ray or SLURM through their executors.

    sweep ── submit(bytes of the models' sources, placement) ──> executor ──> any process: trace once, evaluate ──> row

Graphs are not sent: a process traces a model when it evaluates the first of its placements, and keeps the graph for the next ones.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import replace

from cost_models.hardware.clusters import Cluster
from partitioner.experiments.models.subject import ModelSource
from partitioner.experiments.results.placement import Placement
from partitioner.experiments.results.row import Row, failed_row
from partitioner.experiments.run.evaluate import Evaluator, trace_models

_IN_FLIGHT = 32
"""Placements that are submitted at once, unless the caller says otherwise."""

_EVALUATORS: dict[tuple[bytes, Placement], Evaluator] = {}
"""In a process of the executor: evaluators by the sources of the models and a placement of the graph. It holds the last one alone."""

_LOCK = threading.Lock()
"""Tracing is for one thread of a process at a time."""


class ExecutorPool:
    """Evaluates placements on an executor, with the interface of ``WorkerProcesses``.

    Args:
        executor: of the caller, which shuts it down.
        sources: the models by name, which other processes can unpickle.
        clusters: name -> machine.
        key: returns the key of a placement.
        n_in_flight: placements that are submitted at once; None: ``_IN_FLIGHT``.
    """

    def __init__(
        self,
        executor: Executor,
        sources: Mapping[str, ModelSource],
        clusters: Mapping[str, Cluster],
        key: Callable[[Placement], str],
        n_in_flight: int | None = None,
    ) -> None:
        self._executor = executor
        self._payloads = {name: pickle.dumps((source, dict(clusters))) for name, source in sources.items()}
        self._key = key
        self._limit = n_in_flight or _IN_FLIGHT
        self._futures: dict[Future[Row], Placement] = {}

    @property
    def idle(self) -> Sequence[Placement | None]:
        return [None] * (self._limit - len(self._futures))

    @property
    def busy(self) -> int:
        return len(self._futures)

    def submit(self, placement: Placement, neighbour: Placement | None) -> None:
        self._futures[self._executor.submit(evaluate_elsewhere, self._payloads[placement.model], placement)] = placement

    def answers(self) -> Iterator[tuple[Placement, Row]]:
        done, _ = wait(self._futures, return_when=FIRST_COMPLETED)
        for future in done:
            placement = self._futures.pop(future)
            key, error = self._key(placement), future.exception()
            if error is None:
                yield placement, replace(future.result(), key=key)
            else:
                yield placement, failed_row(key, placement, f"the executor did not plan it: {type(error).__name__}: {error}")

    def close(self) -> None:
        for future in self._futures:
            future.cancel()


def evaluate_elsewhere(payload: bytes, placement: Placement) -> Row:
    """Return the row of a placement in a process of an executor.

    Args:
        payload: the source of its model and the machines, pickled by ``ExecutorPool``.
    """
    with _LOCK:
        source, clusters = pickle.loads(payload)  # noqa: S301  the sweep wrote it
        traced = replace(placement, devices=0, mode="", schedule=None, n_microbatches=None, recompute=None)
        if (payload, traced) not in _EVALUATORS:
            _EVALUATORS.clear()
            _EVALUATORS[payload, traced] = Evaluator(trace_models({placement.model: source}, [placement], clusters))
        return _EVALUATORS[payload, traced](placement)
