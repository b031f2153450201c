"""Sweeps: every placement once, kept when it is known, whatever happens to the process."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from cost_models.hardware.clusters import Cluster
from partitioner import partition
from partitioner.experiments import Results, sweep
from partitioner.experiments.results.placement import Placement, placements
from partitioner.experiments.results.row import Row, failed_row
from partitioner.experiments.results.store import Store
from partitioner.experiments.run.evaluate import Evaluator
from partitioner.experiments.run.open_placements import OpenPlacements, sample_of
from partitioner.experiments.run.workers import WorkerProcesses
from partitioner.options.mode import mode_text, parse_mode, without_rest
from passes.ir.errors import ConfigError, TraceError
from tests.support.planning.sweep_models import branches, fails, perceptron, wide

MODES = ["data", "pipeline", {"pipeline": 2, "data": -1}]


def small_sweep(store: Path | None = None, **more: Any) -> Results:
    """Ten placements of one model, in this process."""
    asked = {"models": {"net": perceptron}, "devices": [2, 4], "modes": MODES, "clusters": ["h100:1x4", "v100:1x4"]}
    return sweep(**{**asked, "store": store, "workers": 0, **more})


# -- which placements there are --------------------------------------------------------------------------------------------------------


def test_the_grid_holds_every_combination_once() -> None:
    found = placements(("a", "b"), (2, 4), ("data", "pipeline"), ("x",), schedules=("GPipe", "1F1B"), microbatches=(2, 4))
    assert len(found) == len(set(found))
    # Nothing of data parallelism has a schedule; a pipeline has both.
    expected = {
        *((model, devices, "data", None, count) for model, devices, count in itertools.product("ab", (2, 4), (2, 4))),
        *(
            (model, devices, "pipeline", schedule, count)
            for model, devices, schedule, count in itertools.product("ab", (2, 4), ("GPipe", "1F1B"), (2, 4))
        ),
    }
    assert {(each.model, each.devices, each.mode, each.schedule, each.n_microbatches) for each in found} == expected


def test_layers_on_devices_have_no_microbatches() -> None:
    found = placements(("a",), (2,), ("model",), ("x",), microbatches=(None, 2, 4))
    assert [each.n_microbatches for each in found] == [None]


def test_an_open_size_takes_what_is_left() -> None:
    found = placements(("a",), (2, 4, 6, 8), ({"pipeline": 2, "data": -1}, {"data": 2, "tensor": 2}), ("x",))
    # Over two devices nothing is left for data, and 6 devices are no mesh of 2 x 2.
    assert [(each.devices, each.mode) for each in found] == [
        (2, "pipeline"),
        (4, "pipeline=2,data=2"),
        (6, "pipeline=2,data=3"),
        (8, "pipeline=2,data=4"),
        (4, "data=2,tensor=2"),
    ]


@pytest.mark.parametrize(
    ("grid", "problem"),
    [
        (((), (2,), ("data",), ("x",)), "`models` is empty"),
        ((("a",), (), ("data",), ("x",)), "`devices` is empty"),
        ((("a",), (3,), ({"data": 2, "tensor": -1},), ("x",)), "the mesh data=2,tensor=-1 has none of the numbers of devices 3"),
        ((("a",), (4,), ({"data": -1, "tensor": -1},), ("x",)), "leaves two sizes open"),
        ((("a",), (4,), ("sideways",), ("x",)), "there is no mode 'sideways'"),
    ],
)
def test_a_grid_of_nothing_is_refused(grid: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        placements(*grid)


@pytest.mark.parametrize("mode", ["auto", {"data": 2, "tensor": 4}, {"tile": (2, 2), "data": 2}, {"data": -1, "tensor": 2}])
def test_a_mode_is_read_as_it_was_written(mode: Any) -> None:
    assert parse_mode(mode_text(mode)) == mode


def test_a_mesh_is_read_as_in_json_and_in_python() -> None:
    assert parse_mode('{"data":2,"pipeline":2}') == {"data": 2, "pipeline": 2}
    assert parse_mode('{"tile": [2, 2], "data": -1}') == parse_mode("{'tile': (2, 2), 'data': -1}") == {"tile": (2, 2), "data": -1}
    for wrong in ("{", "{}", '{"data"}', "{2: 2}", '{"data": "2"}', '{"data": true}', '{"data": 2, "data": 2}', "{**data}", "{data: 2}"):
        with pytest.raises(ConfigError, match=re.escape(f"--mode {wrong} is no mesh")):
            parse_mode(wrong)


def test_a_grid_of_tiles_counts_as_their_number() -> None:
    assert without_rest({"tile": (2, 2), "data": -1}, 8) == {"tile": (2, 2), "data": 2}
    assert without_rest({"tile": (2, 2)}, 8) is None


def test_keys_tell_placements_apart() -> None:
    base = Placement("a", 2, "data", "x")
    others = [
        Placement("b", 2, "data", "x"),
        Placement("a", 4, "data", "x"),
        Placement("a", 2, "tensor", "x"),
        Placement("a", 2, "data", "y"),
    ]
    others += [Placement("a", 2, "data", "x", n_microbatches=2), Placement("a", 2, "data", "x", recompute="full")]
    assert len({each.key("context") for each in (base, *others)} | {base.key("another")}) == len(others) + 2
    assert base.key("context") == Placement("a", 2, "data", "x").key("context")


# -- sampling --------------------------------------------------------------------------------------------------------------------------

GRID = placements(("a", "b"), (2, 4, 8), ("data", "tensor"), ("x", "y"))


def test_a_sweep_begins_every_placement() -> None:
    assert sorted(iter(OpenPlacements(GRID).next, None), key=str) == sorted(GRID, key=str)


def test_workers_keep_to_their_families() -> None:
    open_placements = OpenPlacements(GRID)
    first, second = open_placements.next(), open_placements.next()
    assert first is not None
    assert second is not None
    assert (first.devices, first.mode) != (second.devices, second.mode)
    third = open_placements.next(first)
    assert third is not None
    assert (third.model, third.devices, third.mode) == (first.model, first.devices, first.mode)


def test_chance_is_repeated_by_its_seed() -> None:
    one, again, other = (sample_of(GRID, 7, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len({*one}) == 7
    assert len(sample_of(GRID, 1000, 1)) == len(GRID)


# -- rows ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_row_tells_what_partition_tells(tmp_path: Path) -> None:
    results = small_sweep(tmp_path / "runs.db")
    assert len(results) == 10
    assert not results.failures
    model, inputs = perceptron()
    for row in results.rows():
        mode = parse_mode(row["mode"])
        pm = partition(model, ["cpu"] * row["devices"], mode, example_inputs=inputs, cluster=row["cluster"])
        assert (row["plan_hash"], row["planned_step_time"]) == (pm.plan.hash, pm.plan.step_time)
        assert results.plan(row["key"]) == pm.plan
        simulation = pm.simulate()
        assert row["step_time"] == pytest.approx(simulation.step_time, rel=1e-9)
        assert row["bubble_fraction"] == pytest.approx(simulation.bubble_fraction, abs=1e-9)
        assert row["peak_memory"] == max(simulation.peak_memory)
        assert row["communication"] == pytest.approx(sum(simulation.communication.values()), abs=len(simulation.communication))


@pytest.mark.slow
def test_the_best_row_is_the_least() -> None:
    results = small_sweep()
    times = {row["key"]: row["step_time"] for row in results.rows() if row["devices"] == 4}
    best = results.best(by="step_time", devices=4)
    assert best["step_time"] == min(times.values()) == times[best["key"]]
    with pytest.raises(ConfigError, match="cannot be compared by 'beauty'"):
        results.best(by="beauty")
    with pytest.raises(ConfigError, match="rows have no 'colour'"):
        results.best(colour="red")
    with pytest.raises(ConfigError, match="no placement has a measured_step_time"):
        results.best(by="measured_step_time")


@pytest.mark.slow
def test_rows_are_written_out(tmp_path: Path) -> None:
    results = small_sweep()
    results.to_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [(row["key"], float(row["step_time"])) for row in read] == [(row["key"], row["step_time"]) for row in results.rows()]
    results.to_jsonl(tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == results.rows()
    with pytest.raises(ConfigError, match=r"the table cannot be written to .*: No such file"):
        results.to_csv(tmp_path / "nowhere" / "rows.csv")


@pytest.mark.slow
def test_rows_are_written_as_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    results = small_sweep()
    results.to_parquet(tmp_path / "rows.parquet")
    assert parquet.read_table(tmp_path / "rows.parquet").to_pylist() == results.rows()


PLACEMENT = Placement("net", 2, "data", "h100:1x2")


def test_the_table_shows_units_and_failures() -> None:
    results = small_sweep(devices=[2, 64], modes=["pipeline"])
    text = str(results)
    assert text.splitlines()[0].split()[:3] == ["model", "devices", "mode"]
    assert " us  " in text or " ms  " in text
    table, _, failures = text.partition("\n4 placements, 2 failed\n")
    assert "64 devices" not in table
    assert failures.startswith("2 x 64 devices were asked for, the cluster has 4\n  remedy: ")
    few = Results(tuple(failed_row(str(number), placement, f"reason {number}") for number, placement in enumerate([PLACEMENT] * 5)))
    assert str(few).splitlines() == [
        "5 placements, 5 failed",
        "1 x reason 0",
        "1 x reason 1",
        "1 x reason 2",
        "and 2 other reasons, see .failures",
    ]


# -- failures --------------------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_planned_is_a_row_with_its_reason() -> None:
    results = small_sweep(devices=[64], modes=["pipeline"], clusters=["h100:8x8", "h100:1x4"])
    reasons = {row.cluster: row.reason for row in results.failures}
    assert "64 stages, the model can be cut into 8\n  remedy: pass devices=8 or fewer" in reasons["h100:8x8"]
    assert "64 devices were asked for, the cluster has 4" in reasons["h100:1x4"]
    assert all(row.step_time is None and not row.plan for row in results.failures)


def test_a_model_that_cannot_be_traced_fails_its_own_placements() -> None:
    results = small_sweep(models={"net": perceptron, "branches": branches}, devices=[2], modes=["data"], clusters="h100:1x4")
    ok, failed = results.where(model="net").rows(), results.where(model="branches").rows()
    assert [row["status"] for row in (*ok, *failed)] == ["ok", "failed"]
    assert "it lets the values of a tensor decide" in failed[0]["reason"]
    with pytest.raises(TraceError):
        small_sweep(models={"branches": branches})


@pytest.mark.parametrize(
    ("models", "problem"),
    [
        ({}, "`models` is empty"),
        ([perceptron, perceptron], "several models are called perceptron"),
        ({"net": "nowhere.py:net"}, "there is no file nowhere.py"),
        ({"net": lambda: 3}, r"net\(\) returned an object of type int"),
        ({"net": nn.Dropout()}, "example"),
    ],
)
def test_what_is_no_model_is_refused(models: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small_sweep(models=models)


def test_a_factory_that_raises_is_told_by_itself() -> None:
    with pytest.raises(ArithmeticError, match="the weights are gone"):
        small_sweep(models={"net": fails})


def test_modules_and_pairs_are_models() -> None:
    module, inputs = perceptron()
    results = small_sweep(models=[module, (nn.Linear(8, 8), inputs)], devices=2, modes="data", clusters=Cluster.parse("h100:1x2"))
    assert [(row["model"], row["cluster"], row["status"]) for row in results.rows()] == [
        ("Sequential", "cluster 0", "ok"),
        ("Linear", "cluster 0", "ok"),
    ]


def test_models_on_the_meta_device_are_planned() -> None:
    results = small_sweep(models={"wide": wide}, modes=["data", "tensor", "fsdp"])
    assert [row.reason for row in results.failures] == []


# -- the store -------------------------------------------------------------------------------------------------------------------------


def test_what_is_known_is_not_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small_sweep(tmp_path / "runs.db", devices=[2])
    planned: list[Placement] = []

    def counting(self: Evaluator, placement: Placement) -> Row:
        planned.append(placement)
        return failed_row(self.bench.key(placement), placement, "counted")

    monkeypatch.setattr(Evaluator, "__call__", counting)
    second = small_sweep(tmp_path / "runs.db")
    assert {each.devices for each in planned} == {4}
    assert second.where(devices=2).table == first.table
    planned.clear()
    small_sweep(tmp_path / "runs.db")
    assert planned == []
    small_sweep(tmp_path / "runs.db", retry_failures=True)
    assert {each.devices for each in planned} == {4}
    with pytest.raises(ConfigError, match="has 10 placements of this sweep already"):
        small_sweep(tmp_path / "runs.db", resume=False)


def test_another_model_under_the_same_name_is_planned(tmp_path: Path) -> None:
    first = small_sweep(tmp_path / "runs.db", devices=[2], modes=["data"], clusters="h100:1x2")
    other = small_sweep(tmp_path / "runs.db", models={"net": wide}, devices=[2], modes=["data"], clusters="h100:1x2")
    assert first.rows()[0]["step_time"] != other.rows()[0]["step_time"]
    assert len(other) == 1
    assert len(Store(tmp_path / "runs.db").rows()) == 2


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, but long enough to be read as the head of one" * 20)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE result (key TEXT)")
    other.close()
    with pytest.raises(ConfigError, match="cannot be opened as a store: file is not a database"):
        small_sweep(tmp_path / "text.db")
    with pytest.raises(ConfigError, match="is the database of another program"):
        small_sweep(tmp_path / "other.db")
    with pytest.raises(ConfigError, match="cannot be opened as a store"):
        small_sweep(tmp_path / "nowhere" / "runs.db")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param("DROP TABLE result; CREATE TABLE result (a INT)", "without the table of this version", marks=pytest.mark.slow),
        ("ALTER TABLE result DROP COLUMN step_time", "without the table of this version"),
        ("UPDATE result SET step_time = 'soon'", "step_time must be a float or None"),
        pytest.param("UPDATE result SET devices = x'ff'", "devices must be an int", marks=pytest.mark.slow),
        pytest.param("UPDATE result SET step_time = NULL", "there is no step_time None", marks=pytest.mark.slow),
        ("UPDATE result SET peak_memory = -1", "there is no peak_memory -1"),
        ("UPDATE result SET step_time = 9e999", "there is no step_time inf"),
    ],
)
def test_stores_that_another_program_wrote_to_are_refused(change: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    small_sweep(path, devices=[2], modes=["data"], clusters=["h100:1x4"])
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(change)
    with pytest.raises(ConfigError, match=problem), contextlib.closing(Store(path)) as store:
        store.rows()


def test_damaged_pages_are_told_by_every_call(tmp_path: Path) -> None:
    """And a store that could not be opened is not left locked."""
    path = tmp_path / "runs.db"
    small_sweep(path, devices=[2], modes=["data"], clusters=["h100:1x4"])
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + bytes(byte ^ 0xFF for byte in whole[4096:]))
    with contextlib.closing(Store(path)) as store:
        for call in (store.rows, lambda: store.remove(["a"]), lambda: store.add(Row("a", "net", 2, "data", "fast"))):
            with pytest.raises(ConfigError, match=r"runs\.db cannot be (read|written)"):
                call()
    path.write_bytes(whole[:200] + bytes(len(whole) - 200))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"cannot be opened as a store: (?!database is locked)"):
            Store(path)
    for name in ("\0", "x" * 5000, str(path / "below")):
        for create in (True, False):
            with pytest.raises(ConfigError, match=r"cannot be opened as a store|there is no store"):
                Store(name, create=create)


def test_a_key_is_kept_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs.db")
    row = failed_row("key", GRID[0], "first")
    assert store.add(row)
    assert not store.add(failed_row("key", GRID[0], "second"))
    assert Store(tmp_path / "runs.db").rows() == [row]


# -- workers ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_find_what_this_process_finds(tmp_path: Path) -> None:
    alone, together = small_sweep(), small_sweep(tmp_path / "runs.db", workers=2)

    def facts(results: Results) -> list[Any]:
        return sorted((row.key, row.plan, row.step_time, row.peak_memory) for row in results.table)

    assert facts(alone) == facts(together)


def _ends_badly(placement: Placement) -> Row:
    """End badly: killed on 2 devices, hanging on 4, exiting on 8."""
    if placement.devices == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if placement.devices == 4:
        time.sleep(60)
    raise SystemExit(3)


def test_a_worker_that_dies_or_hangs_is_a_reason() -> None:
    pool = WorkerProcesses(_ends_badly, str, n_workers=3, timeout=1.0)
    found: dict[int, str] = {}
    for placement in placements(("a",), (2, 4, 8), ("data",), ("x",)):
        pool.submit(placement, None)
    while pool.busy:
        found.update({placement.devices: row.reason for placement, row in pool.answers()})
    assert len(pool.idle) == 3
    pool.close()
    assert found[2] == "the process that planned it was killed by SIGKILL: the machine may be out of memory"
    assert found[4] == "it was not planned within 1 s"
    assert found[8] == "the process that planned it ended with code 3"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [3, 20])
def test_nothing_is_lost_or_doubled_by_kills(kills: int, tmp_path: Path) -> None:
    """A sweep is killed at random moments; what a run has kept, the next one finds and leaves unchanged."""
    path, many = tmp_path / "runs.db", kills > 10
    chance = random.Random(7)
    context = multiprocessing.get_context("fork")
    seen: list[Row] = []
    grown = 0
    for _ in range(kills):
        process = context.Process(target=_kept_sweep, args=(path, many))
        process.start()
        _wait_for_rows(path, len(seen) + chance.randrange(2), process)
        time.sleep(chance.uniform(0.0, 0.2))
        process.kill()
        process.join()
        kept = Store(path).rows() if path.exists() else []
        assert kept[: len(seen)] == seen
        assert len({row.key for row in kept}) == len(kept)
        grown += len(kept) > len(seen)
        seen = kept
    results = _kept_sweep(path, many)
    assert grown > 0
    assert len(results) > len(seen), "the sweep was over before it was killed for the last time"
    assert Store(path).rows()[: len(seen)] == seen
    assert _facts(results) == _facts(_kept_sweep(None, many))


def _wait_for_rows(path: Path, count: int, process: Any) -> None:
    """Until the sweep has kept so many rows, or is over."""
    while process.is_alive() and (len(Store(path).rows()) if path.exists() else 0) < count:
        time.sleep(0.02)


def _kept_sweep(path: Path | None, many: bool) -> Results:
    more = {"microbatches": [1, 2, 4, 8], "schedules": ["GPipe", "1F1B"]} if many else {"microbatches": [1, 2, 4]}
    return small_sweep(path, modes=["data", "pipeline", "fsdp", "model"], clusters="h100:1x4", workers=2, **more)


def _facts(results: Results) -> set[tuple[Any, ...]]:
    return {(row.key, row.status, row.plan_hash, row.step_time) for row in results.table}
