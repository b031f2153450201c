"""Read from the environment what started this process, and beside which others. Only this file reads the environment.

    torchrun          RANK                    WORLD_SIZE
    Open MPI          OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE
    MPICH, Intel MPI  PMI_RANK                PMI_SIZE
    srun              SLURM_PROCID            SLURM_STEP_NUM_TASKS, else SLURM_NTASKS

torchrun comes first, since its processes inherit the variables of the job that it runs in; srun comes last, since the processes of mpirun
inherit the variables of its own daemons.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from passes.ir.errors import ConfigError


@dataclass(frozen=True)
class _Launcher:
    """The variables of one launcher; of the alternatives of each, the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()


_TORCHRUN = _Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))

# In a batch script SLURM_NTASKS may be the tasks of the job, of which srun starts fewer: the step's number is the exact one.
_SRUN = _Launcher("srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",))
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

_LAUNCHERS = (
    _TORCHRUN,
    _Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher("MPI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    _SRUN,
)

_HOST, _PORT = "MASTER_ADDR", "MASTER_PORT"
_ATTEMPT, _AGENT_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"

VARIABLES = frozenset({_HOST, _PORT, _ATTEMPT, _AGENT_STORE, *_TASKS_PER_NODE}).union(
    *((*each.rank, *each.size, *each.local_rank, *each.local_size) for each in _LAUNCHERS)
)
"""All variables that are read."""


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together.

    Attributes:
        launcher: ``"torchrun"``, ``"srun"``; None: this process was started alone.
        rank, size: of this process; number of processes.
        variables: that say so, as text for errors.
    """

    launcher: str | None = None
    rank: int = 0
    size: int = 1
    variables: str = ""


def launch() -> Launch:
    """Return how this process was started: by torchrun, SLURM, MPI, or alone.

    Raises:
        ConfigError: a variable is no number, or WORLD_SIZE names several processes and nothing says which of them this is.
    """
    found = next((each for each in _LAUNCHERS if _number(each.rank) is not None and _number(each.size) is not None), None)
    world_size = _number(_TORCHRUN.size)
    if found is None:
        if world_size is not None and world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE={world_size} says that there are several processes, and RANK, which says which of them this is, is not set",
                remedy="set RANK in each process, or start the script with torchrun --nproc-per-node N, or unset WORLD_SIZE",
            )
        return Launch()
    rank, size = _number(found.rank), _number(found.size)
    assert rank is not None
    assert size is not None
    if not 0 <= rank < size:
        raise ConfigError(f"{_text(found)}: ranks are 0 to {size - 1}", remedy="set them as the launcher does")
    return Launch(found.name, rank, size, _text(found))


def numbers_of_torchrun() -> tuple[int, int] | None:
    """Return the rank of this process and their number as torchrun has set them; None if it did not start this process.

    Scripts that make a process group themselves may have variables of these names for numbers of their own, those of nodes.
    """
    rank, size = _number(_TORCHRUN.rank), _number(_TORCHRUN.size)
    return None if _value(_AGENT_STORE) is None or rank is None or size is None else (rank, size)


def local_rank(rank: int, size: int) -> int | None:
    """Return the number of a process among those on its machine; None if nothing says.

    ``LOCAL_RANK`` says it for every launcher; variables of other launchers say it where these number the processes as ``rank`` and ``size``
    do: processes that a script of one SLURM task spawns all have that task's.
    """
    named = _number(_TORCHRUN.local_rank)
    launched = [each for each in _LAUNCHERS if (_number(each.rank), _number(each.size)) == (rank, size)]
    return next((number for each in launched if (number := _number(each.local_rank)) is not None), None) if named is None else named


def local_size(size: int) -> int | None:
    """Return how many of ``size`` processes are on this machine; None if nothing says. The largest number if machines differ."""
    named = _number(_TORCHRUN.local_size)
    if named:
        return named
    launched = [each for each in _LAUNCHERS if _number(each.size) == size]
    found = next((number for each in launched if (number := _number(each.local_size))), None)
    tasks = next((value for name in _TASKS_PER_NODE if (value := _value(name)) is not None), None)
    if found is None and _SRUN in launched and tasks is not None:
        counts = re.findall(r"(\d+)(?:\(x\d+\))?", tasks)  # 4(x2),3: two machines with four, and one with three
        found = max(map(int, counts), default=None)
    return found


def store_host() -> str | None:
    """Return the host of rank 0, if the environment says."""
    return _value(_HOST)


def store_address(launched: Launch) -> tuple[str, int]:
    """Return the host and the port of the store by which processes find each other.

    Raises:
        ConfigError: a variable is not set.
    """
    host, port = _value(_HOST), _number((_PORT,))
    if host is not None and port is not None:
        return host, port
    lacking = " and ".join(name for name, value in ((_HOST, host), (_PORT, port)) if value is None)
    by_torchrun = launched.launcher in (None, "torchrun")
    others = "" if by_torchrun else f": {launched.variables} say that {launched.launcher} started {launched.size}"
    raise ConfigError(
        f"the processes cannot find each other{others}; {lacking} not set",
        remedy="start the script with torchrun --nproc-per-node N"
        if by_torchrun
        else "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port on it, the same for all processes,\n"
        "or call torch.distributed.init_process_group before partition();\n"
        f"to run all ranks in this one process, start it without {launched.launcher}, or unset {launched.variables.partition('=')[0]}",
    )


def held_by_torchrun() -> bool:
    """Return whether torchrun's agent process holds the store, not rank 0."""
    return _value(_AGENT_STORE) == "True"


def attempt() -> str:
    """Return the number of times that torchrun has restarted the processes."""
    return _value(_ATTEMPT) or "0"


def _value(name: str) -> str | None:
    """Return the value of a variable; None if it is not set, or empty."""
    return os.environ.get(name) or None


def _number(names: tuple[str, ...]) -> int | None:
    """Return the number in the first of these variables that is set; None if none is."""
    for name in names:
        value = _value(name)
        if value is None:
            continue
        if not value.strip().isdecimal():
            raise ConfigError(f"{name}={value!r} is no number", remedy="set it as the launcher does, or unset it")
        return int(value)
    return None


def _text(launcher: _Launcher) -> str:
    """Return the variables with which a launcher numbers processes, ``RANK=3, WORLD_SIZE=2``."""
    pairs = [next((name, _value(name)) for name in names if _value(name) is not None) for names in (launcher.rank, launcher.size)]
    return ", ".join(f"{name}={value}" for name, value in pairs)
