"""Processes however they were started, and device meshes over all or some of them: as the unpartitioned model, or refused by name."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import launch_cases as cases
from tests.support.launch_cases import Mode
from tests.support.processes.processes import Workers

EXACT = 1e-12

PATIENCE = 280.0
"""Seconds for one answer on a busy machine: the processes import torch first."""

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(600)]


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


# -- device meshes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_names_of_a_mesh_are_the_mode(workers: Callable[[int], Workers]) -> None:
    for rank, (found, names, own) in enumerate(workers(4).values(cases.mesh_of_names, ("dp", "tp"), timeout=PATIENCE)):
        assert found < EXACT
        assert (names, own) == (("data", "tensor"), rank)


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        pytest.param({"data": 2, "tensor": 2}, None, marks=pytest.mark.slow),
        pytest.param("auto", ("pp", "fsdp"), marks=pytest.mark.slow),
        pytest.param("auto", ("pp", "tp"), marks=pytest.mark.slow),
        pytest.param("tensor", None, marks=pytest.mark.slow),
    ],
)
def test_order_of_a_mesh(workers: Callable[[int], Workers], mode: Mode, names: tuple[str, ...] | None) -> None:
    """[[3, 1], [2, 0]]: process 3 has rank 0."""
    answers = workers(4).values(cases.permuted_mesh, mode, names, timeout=PATIENCE)
    assert [rank for _, rank, _ in answers] == [3, 1, 2, 0]
    assert max(found for found, _, _ in answers) < EXACT
    if isinstance(mode, dict):
        parts = [answers[process][2] for process in (3, 1)]
        assert all(torch.equal(one, other) for one, other in zip(parts[0], answers[2][2], strict=True))  # the same column
        assert not torch.equal(parts[0][0], parts[1][0])


@pytest.mark.slow
def test_models_on_disjoint_submeshes(workers: Callable[[int], Workers]) -> None:
    answers = workers(4).values(cases.disjoint_submeshes, timeout=PATIENCE)
    assert max(max(found, other) for found, other, _ in answers) < EXACT
    assert [rank for *_, rank in answers] == [0, 1, 0, 1]


@pytest.mark.slow
def test_models_on_overlapping_meshes(workers: Callable[[int], Workers]) -> None:
    answers = workers(4).values(cases.models_on_overlapping_meshes, timeout=PATIENCE)
    assert [len(found) for found in answers] == [2, 3, 1, 1]
    assert max(max(found) for found in answers) < EXACT


@pytest.mark.slow
def test_a_process_outside_of_the_mesh_is_told(workers: Callable[[int], Workers]) -> None:
    answers = workers(4).values(cases.submesh_without_me, timeout=PATIENCE)
    assert answers[:2] == [None, None]
    for process in (2, 3):
        assert f"ConfigError: the device mesh has the processes 0, 1, and this is process {process}" in answers[process]
        assert "if mesh.get_coordinate() is not None" in answers[process]


@pytest.mark.slow
def test_a_failure_stays_in_its_submesh(workers: Callable[[int], Workers]) -> None:
    answers = workers(4).values(cases.failure_in_a_submesh, timeout=PATIENCE)
    assert max(answers[:2]) < EXACT
    for answer in answers[2:]:
        assert "rank 0 and rank 1 were given different input" in answer
        assert "ranks are those of the device mesh: 0 is process 2, 1 is process 3" in answer


@pytest.mark.slow
def test_dropout_and_copies(workers: Callable[[int], Workers]) -> None:
    assert max(map(max, workers(4).values(cases.dropout_and_copies, timeout=PATIENCE))) < EXACT


@pytest.mark.slow
def test_own_rows_on_a_permuted_mesh(workers: Callable[[int], Workers]) -> None:
    assert max(workers(4).values(cases.own_rows_on_a_permuted_mesh, timeout=PATIENCE)) < EXACT


@pytest.mark.slow
def test_a_mesh_of_one_process(workers: Callable[[int], Workers]) -> None:
    assert all(found < EXACT and count == 6 for found, count in workers(4).values(cases.one_process_meshes, timeout=PATIENCE))


@pytest.mark.slow
def test_what_a_world_of_four_refuses(workers: Callable[[int], Workers]) -> None:
    for number, dtensors in workers(4).values(cases.refusals, timeout=PATIENCE):
        assert "2 devices were asked for and there are 4 processes" in number
        assert "DeviceMesh over 2 of the processes" in number
        assert "this model has the processes 1, 0, 3, 2" in dtensors


# -- launches ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "mode", "backend"),
    [
        ("tcp", "pipeline", "gloo"),
        ("file", "fsdp", "gloo"),
        ("tcp", "tensor", "cpu:gloo"),
    ],
)
def test_a_group_that_the_script_made(workers: Callable[[int], Workers], tmp_path: Path, scheme: str, mode: Mode, backend: str) -> None:
    """As scripts of ``mp.spawn``, SLURM and MPI do; its numbers are the ranks, whatever order processes were started in."""
    init_method = f"tcp://{free_address()}" if scheme == "tcp" else f"file://{tmp_path / 'store'}"
    answers = workers(4).values(cases.group_by, init_method, mode, backend, timeout=PATIENCE)
    for process, (found, rank, seconds) in enumerate(answers):
        assert found < EXACT
        assert rank == 3 - process
        assert seconds == 40.0


@pytest.mark.slow
def test_groups_that_are_destroyed_and_made_again(workers: Callable[[int], Workers]) -> None:
    """At one address: what is left of the first would be taken for parts of the next."""
    answers = workers(4).values(cases.groups_made_again, f"tcp://{free_address()}", timeout=PATIENCE)
    assert max(map(max, answers)) < EXACT


@pytest.mark.slow
def test_the_script_destroys_the_group_of_this_package(workers: Callable[[int], Workers]) -> None:
    assert max(map(max, workers(4).values(cases.own_group_made_again, timeout=PATIENCE))) < EXACT


SRUN = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "{size}", "SLURM_LOCALID": "{rank}"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{size}"}


@pytest.mark.slow
@pytest.mark.parametrize("variables", [SRUN, MPIRUN], ids=["srun", "mpirun"])
def test_processes_of_other_launchers_without_an_address(workers: Callable[[int], Workers], variables: dict[str, str]) -> None:
    for text, _ in workers(4).values(cases.launched_by, variables, None, timeout=PATIENCE):
        assert text.startswith("ConfigError: the processes cannot find each other")
        assert "set MASTER_ADDR" in text


@pytest.mark.slow
@pytest.mark.parametrize("variables", [SRUN, MPIRUN], ids=["srun", "mpirun"])
def test_processes_of_other_launchers_connect(workers: Callable[[int], Workers], variables: dict[str, str]) -> None:
    assert max(found for _, found in workers(4).values(cases.launched_by, variables, free_address(), timeout=PATIENCE)) < EXACT
