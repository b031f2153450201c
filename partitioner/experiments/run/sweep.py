"""Plan and simulate every placement of a sweep, and store the rows.

models ── traced once ──┐
devices, modes, ...  ───┴─> placements ──> workers ── rows ──> store
                                             ^                              │
                                             └──────────── tell ────────────┘
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from pathlib import Path
from typing import Any

from cost_models.hardware.clusters import Cluster
from cost_models.hardware.devices import check_count
from partitioner.experiments.models.subject import Models, ModelSource, name_models
from partitioner.experiments.results.placement import Placement, placements
from partitioner.experiments.results.results import Results
from partitioner.experiments.results.row import Row
from partitioner.experiments.results.store import Store
from partitioner.experiments.run.evaluate import Bench, Evaluator, trace_models
from partitioner.experiments.run.executor_pool import ExecutorPool
from partitioner.experiments.run.measure import check_measurable, measure_row
from partitioner.experiments.run.open_placements import OpenPlacements, sample_of
from partitioner.experiments.run.sweep_options import GRID, option_grid
from partitioner.experiments.run.workers import InProcess, WorkerProcesses, can_fork
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.options.devices import hardware_of, resolve_devices
from partitioner.options.progress import ProgressBar
from passes.ir.arguments.checked import at_least, checked_arguments, each_of, positive
from passes.ir.errors import ConfigError

Mode = str | Mapping[str, Any]
Modes = Mode | Sequence[Mode]
"""Modes as for ``partition``; one size of a mesh may be -1, which takes the remaining devices."""

_Pool = InProcess | WorkerProcesses | ExecutorPool

ClusterSource = Cluster | str
Clusters = Mapping[str, ClusterSource] | Sequence[ClusterSource] | ClusterSource | None
"""Machines by name, a list of texts like ``"h100:8x8"`` or of TOML files, or one; None: the hardware of this machine."""

_VALUES = {
    "devices": each_of(at_least(1)),
    "schedules": each_of(VALUES["schedule"]),
    "microbatches": each_of(VALUES["n_microbatches"]),
    "recompute": each_of(VALUES["recompute"]),
    "n_samples": at_least(1),
    "workers": at_least(0),
    "timeout": positive,
}

_EXAMPLES = {
    **EXAMPLES,
    "models": '{"net": "net.py:factory"}',
    "devices": "[2, 4, 8]",
    "modes": '["data", {"pipeline": 2, "data": -1}]',
    "clusters": '["h100:1x8"], or leave it out',
    "schedules": '["1F1B", "ZB1P"], or leave it out',
    "microbatches": "[4, 8], or leave it out",
    "store": '"runs.db", or leave it out',
}


@checked_arguments(_VALUES, _EXAMPLES)
def sweep(
    models: Models,
    devices: int | Sequence[int],
    modes: Modes = "auto",
    clusters: Clusters = None,
    *,
    schedules: str | Sequence[str | None] | None = None,
    microbatches: int | Sequence[int | None] | None = None,
    recompute: str | Mapping[str, str] | Sequence[str | Mapping[str, str] | None] | None = None,
    store: str | Path | None = None,
    resume: bool = True,
    retry_failures: bool = False,
    n_samples: int | None = None,
    seed: int = 0,
    measure: bool = False,
    workers: int | None = None,
    timeout: float | None = None,
    executor: Executor | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Results:
    """Plan and simulate every placement of a grid, each once, and store each result as soon as it is known.

    Every model is traced once. Placements are evaluated in worker processes and stored in an SQLite file under their keys, so that a sweep
    that was stopped, even killed, continues when it is called again. A placement that cannot be planned is a row with the reason.

    Args:
        models: by name, ``{"gpt": gpt, "unet": "net.py:unet"}``: functions that return ``(model, args)`` or ``(model, args, kwargs)``,
            named in a file or passed, or modules whose inputs can be inferred. They may be on the meta device.
        devices: numbers of ranks; they may be simulated.
        modes: as for ``partition``; ``{"pipeline": 2, "data": -1}`` takes as many replicas as there are devices for.
        clusters: machines to plan for, ``"h100:8x8"``; the first ranks' devices are used. None: the hardware of this machine.
        schedules: for modes with a pipeline; None lets the planner choose.
        microbatches: numbers of microbatches; None lets the planner choose.
        recompute: recomputation policies, or mappings of patterns to them; None lets the planner choose.
        store: the file of the store; None keeps the rows in memory.
        resume: take the rows of this sweep that the store has; False raises an error if it has any.
        retry_failures: evaluate placements again that failed before.
        n_samples: the number of random placements; None: all.
        seed: the seed of the random choice.
        measure: also run every placement on this machine under torchrun, one at a time, after all are planned.
        workers: the number of worker processes; None: one for each core, 0: evaluate in this process.
        timeout: seconds that planning one placement may take; then it fails. Needs worker processes.
        executor: evaluates the placements instead of worker processes: a ``ProcessPoolExecutor``, or one of Dask, Ray or SLURM with
            this interface. Its processes import the models by name and trace them; ``workers`` is how many placements are submitted at
            once.
        progress: show progress; None: on a terminal.
        options: other keywords of ``partition``, each a value or a list of values to try: ``precision=["bf16-mixed", "32-true"]``,
            ``memory_limit="16GiB"``, ``constraints=Constraints(axes={"sequence": "tensor"})``, or fields of ``Constraints`` by
            themselves, ``axes={"sequence": "tensor"}``. ``mode``, ``cluster``, ``schedule`` and ``n_microbatches`` are other names of
            ``modes``, ``clusters``, ``schedules`` and ``microbatches``.

    Returns:
        The rows of all placements of the sweep, see ``Results``.

    Raises:
        ConfigError: an argument does not fit, or no model can be traced.
    """
    named = {"modes": modes, "clusters": clusters, "schedules": schedules, "microbatches": microbatches}
    modes, clusters, schedules, microbatches = _by_either_name(named, options)
    sources = name_models(models)
    counts = _as_tuple(devices)
    for count in counts:
        check_count(count)
    machines = _resolve_clusters(clusters, counts)
    choices = (_as_tuple(schedules), _as_tuple(microbatches), _as_tuple(recompute), option_grid(options, _ARGUMENTS))
    grid = placements(tuple(sources), counts, _as_tuple(modes), tuple(machines), *choices)
    if measure or executor is not None:
        check_measurable(sources)
    if executor is not None and timeout is not None:
        raise ConfigError("timeout= is of this sweep's worker processes", remedy="leave it out, or leave out executor=")
    chosen = sample_of(grid, n_samples, seed)
    bar = ProgressBar("sweep", len(chosen), progress)
    with closing(Store(":memory:" if store is None else store)) as stored, closing(bar):
        bench = trace_models(sources, grid, machines, lambda name: bar.say(f"tracing {name}"))
        keys = {bench.key(placement) for placement in grid}
        _prepare_store(stored, keys, resume=resume, retry_failures=retry_failures)
        with closing(_start_workers(bench, sources, workers, timeout, executor)) as pool:
            evaluated = _run(bench, OpenPlacements(chosen), pool, stored, bar)
        if measure:
            _measure(sources, [row for row in stored.rows(evaluated) if row.awaits_measurement], stored, progress)
        return Results(tuple(stored.rows(evaluated)), left=len(chosen) - len(evaluated))


_ARGUMENTS = tuple(name for name in inspect.signature(sweep).parameters if name != "options")
"""Names of the arguments of ``sweep``."""


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _resolve_clusters(clusters: Clusters, counts: Sequence[int]) -> dict[str, Cluster]:
    """Return the machines by name; None is the hardware of this machine, for the largest number of devices."""
    if clusters is None:
        local = hardware_of(resolve_devices(max(counts, default=1), None).devices)
        return {local.devices[0].name: local}
    if isinstance(clusters, Mapping):
        return {name: _cluster(source) for name, source in clusters.items()}
    listed = [clusters] if isinstance(clusters, str | Cluster) else list(clusters)
    return {source if isinstance(source, str) else f"cluster {index}": _cluster(source) for index, source in enumerate(listed)}


def _cluster(source: ClusterSource) -> Cluster:
    return Cluster.parse(source) if isinstance(source, str) else source


def _by_either_name(named: Mapping[str, Any], options: dict[str, Any]) -> list[Any]:
    """Return the arguments, each from its name in ``partition`` where the call gives that; take them out of the options."""
    values = dict(named)
    for of_partition, of_sweep in GRID.items():
        if of_partition != of_sweep and of_partition in options:
            if values[of_sweep] != inspect.signature(sweep).parameters[of_sweep].default:
                raise ConfigError(f"{of_sweep}= and {of_partition}= are both given", remedy=f"leave out {of_partition}=")
            values[of_sweep] = options.pop(of_partition)
    return list(values.values())


def _prepare_store(store: Store, keys: Iterable[str], *, resume: bool, retry_failures: bool) -> None:
    """Raise an error if the store has rows of this sweep and ``resume`` is False; remove failed rows for ``retry_failures``."""
    rows = store.rows(set(keys))
    if rows and not resume:
        raise ConfigError(
            f"{store.path} has {len(rows)} placements of this sweep already", remedy="resume the sweep, or name another file for the store"
        )
    if retry_failures:
        store.remove(row.key for row in rows if not row.ok)


def _start_workers(
    bench: Bench, sources: Mapping[str, ModelSource], workers: int | None, timeout: float | None, executor: Executor | None
) -> _Pool:
    """Start worker processes; evaluate in this process if ``workers`` is 0 or the system cannot fork, and on an executor if given."""
    if executor is not None:
        return ExecutorPool(executor, sources, bench.clusters, bench.key, workers)
    count = os.cpu_count() or 1 if workers is None else workers
    if count == 0 or not can_fork():
        return InProcess(Evaluator(bench))
    return WorkerProcesses(Evaluator(bench), bench.key, count, timeout)


def _run(bench: Bench, placements: OpenPlacements, pool: _Pool, store: Store, bar: ProgressBar) -> set[str]:
    """Evaluate placements whose rows are not stored, add their rows to the store, and return the keys of all of them."""
    known = {row.key: row for row in store.rows()}
    chosen: set[str] = set()

    def next_open(neighbour: Placement | None) -> Placement | None:
        """Return the next placement without a row, for a worker whose last one was ``neighbour``."""
        while (placement := placements.next(neighbour)) is not None:
            key = bench.key(placement)
            chosen.add(key)
            if key not in known:
                return placement
            bar.advance(str(placement), failed=not known[key].ok, known=True)
        return None

    while True:
        for neighbour in list(pool.idle):
            if (placement := next_open(neighbour)) is not None:
                pool.submit(placement, neighbour)
        if not pool.busy:
            return chosen
        for placement, row in pool.answers():
            store.add(row)
            known[row.key] = row
            bar.advance(str(placement), failed=not row.ok)


def _measure(sources: Mapping[str, ModelSource], rows: Sequence[Row], store: Store, progress: bool | None) -> None:
    """Measure the placements of rows one at a time, while nothing else uses the machine, and store the measured rows."""
    with closing(ProgressBar("measure", len(rows), progress)) as bar:
        for row in rows:
            bar.say(f"{row.model} {row.mode} on {row.devices}")
            measured = measure_row(row, sources[row.model])
            store.replace(measured)
            bar.advance(f"{row.model} {row.mode} on {row.devices}", failed=measured.measured_step_time is None)
