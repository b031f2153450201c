"""Launcher of this process: torchrun, mpirun, srun, or none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from partitioner.runtime import torchrun
from partitioner.runtime.process import launcher, session
from partitioner.runtime.process.groups import Members
from passes.ir.errors import ConfigError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launcher.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def start(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", (None, 0, 1)),
        ("RANK=3 WORLD_SIZE=4", ("torchrun", 3, 4)),
        ("WORLD_SIZE=1", (None, 0, 1)),
        ("RANK=3", (None, 0, 1)),  # another launcher's
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", ("Open MPI", 1, 2)),
        ("PMI_RANK=1 PMI_SIZE=2", ("MPI", 1, 2)),
        ("SLURM_PROCID=1 SLURM_NTASKS=2", ("srun", 1, 2)),
        ("SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2", ("srun", 1, 2)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1", ("srun", 0, 1)),  # an interactive step
        ("SLURM_NTASKS=4", (None, 0, 1)),  # a shell of salloc
        ("SLURM_PROCID=1 SLURM_NTASKS=2 RANK=5 WORLD_SIZE=8", ("torchrun", 5, 8)),  # torchrun on each of two nodes
        ("SLURM_PROCID=0 SLURM_NTASKS=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", ("Open MPI", 3, 4)),
        ("SLURM_PROCID=2 SLURM_NTASKS=4 WORLD_SIZE=4", ("srun", 2, 4)),  # as scripts export it for init_process_group
    ],
)
def test_who_started_it(variables: str, expected: tuple[str | None, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, variables)
    found = launcher.launch()
    assert (found.launcher, found.rank, found.size) == expected
    assert torchrun.is_launched() == (expected[2] > 1)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ("WORLD_SIZE=4", "RANK, which says which of them this is, is not set"),
        ("WORLD_SIZE=four RANK=0", "WORLD_SIZE='four' is no number"),
        ("WORLD_SIZE=4 RANK=4", "RANK=4, WORLD_SIZE=4: ranks are 0 to 3"),
        ("SLURM_PROCID=-1 SLURM_NTASKS=4", "SLURM_PROCID='-1' is no number"),
    ],
)
def test_what_is_refused(variables: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, variables)
    with pytest.raises(ConfigError, match=problem):
        launcher.launch()


@pytest.mark.parametrize(
    ("variables", "local"),
    [
        ("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 SLURM_LOCALID=0", (1, 2)),
        ("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4", (3, 4)),
        ("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", (0, 2)),
        ("SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=2", (2, None)),
        ("SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=2 SLURM_TASKS_PER_NODE=3(x2),2", (2, 3)),
        ("SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0 SLURM_TASKS_PER_NODE=1", (None, None)),  # of the task that spawns eight
        ("", (None, None)),
    ],
)
def test_where_it_stands_on_its_machine(variables: str, local: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 5 of 8."""
    start(monkeypatch, variables)
    assert (launcher.local_rank(5, 8), launcher.local_size(8)) == local


def test_a_group_without_a_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "mpi")
    with pytest.raises(ConfigError, match="backend mpi, which has no store"):
        session._check_default_group(Members((0, 1), 0, 2))


def test_numbers_of_scripts_are_not_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two nodes, of four processes each: the script counts them itself."""
    start(monkeypatch, "RANK=1 WORLD_SIZE=2")
    assert launcher.numbers_of_torchrun() is None
    start(monkeypatch, "TORCHELASTIC_USE_AGENT_STORE=True")
    assert launcher.numbers_of_torchrun() == (1, 2)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set[^$]*start the script with torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "other; MASTER_PORT not set"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            "SLURM_PROCID=0, SLURM_NTASKS=2 say that srun started 2; [^$]*set MASTER_ADDR[^$]*init_process_group[^$]*or unset SLURM_PROCID",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1, PMI_SIZE=2 say that MPI started 2"),
    ],
)
def test_processes_without_an_address(variables: Mapping[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        launcher.store_address(launcher.launch())
