"""Detect processes of this machine that die before the store exists.

If rank 0 holds the store, processes that come before it cannot report anything. So each process locks a file of its own, which the kernel
unlocks when the process ends for any reason: an existing file without a lock belongs to a process that has died.

    partitioner-.../rank-1          created and locked at the start of partition()
                                    unlocked by the kernel: rank 1 has died
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class LocalMarks:
    """The lock files of the ranks on one machine. On systems other than Linux there are none, and no rank is found dead.

    Args:
        run_name: the same for all processes of one run, and different for any other run; None: make no files.
        rank, size: of this process; number of ranks.
    """

    def __init__(self, run_name: str | None, rank: int, size: int) -> None:
        self._size = size
        self._rank = rank
        self._descriptor: int | None = None
        self._folder: Path | None = None
        if run_name is None or sys.platform == "win32":
            return
        with contextlib.suppress(OSError):  # a folder that cannot be written, or no /proc: then there are no marks
            network = Path("/proc/self/ns/net").stat().st_ino
            name = hashlib.blake2b(f"{run_name} {network}".encode(), digest_size=8).hexdigest()
            folder = Path(tempfile.gettempdir()) / f"partitioner-{os.getuid()}-{name}"
            folder.mkdir(mode=0o700, exist_ok=True)
            self._started = _process_start()
            unlocked = folder / f"new-{rank}-{os.getpid()}"
            self._descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self._path(folder, rank))  # no one sees it before it is locked, which would mean that this process has died
            self._folder = folder

    def dead(self) -> list[int]:
        """Return the ranks of this machine whose processes have died."""
        if self._folder is None:
            return []
        return [rank for rank in range(self._size) if rank != self._rank and self._is_dead(self._path(self._folder, rank))]

    def remove(self) -> None:
        """Remove this process's file, once the others watch the process by other means."""
        if self._folder is not None and self._descriptor is not None:
            self._path(self._folder, self._rank).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # by the last one
            self._folder = None

    def _is_dead(self, path: Path) -> bool:
        """Return whether a file is of this run and has lost its lock."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            if os.fstat(descriptor).st_mtime < self._started:
                return False  # of an earlier run, at the same place
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(descriptor), path.stat())  # not one that has been removed, or replaced, meanwhile
        except OSError:
            return False
        finally:
            os.close(descriptor)

    @staticmethod
    def _path(folder: Path, rank: int) -> Path:
        return folder / f"rank-{rank}"


def _process_start() -> float:
    """Return when this process was started, in seconds of the epoch, as file times are."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
