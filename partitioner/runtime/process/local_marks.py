"""Which processes of this machine have come and died before there was a store that they could have told of it.

Where rank 0 holds the store, whoever comes before it has nobody to talk to. So each process locks a file of its own, and the kernel unlocks
it when the process ends, however it ends: a file that exists, and that nobody holds, is that of a process that is gone.

    partitioner-.../rank-1          made and locked at the start of partition()
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

__all__ = ["LocalMarks"]


class LocalMarks:
    """The marks of the ranks on one machine. Without Linux there are none, and nobody is found dead.

    Args:
        meeting: what all processes of one run have in common, and no others; None: no marks are needed.
        rank, size: who this is, of how many.
    """

    def __init__(self, meeting: str | None, rank: int, size: int) -> None:
        self._size = size
        self._rank = rank
        self._own: int | None = None
        self._folder: Path | None = None
        if meeting is None or sys.platform == "win32":
            return
        with contextlib.suppress(OSError):  # a folder that cannot be written, or no /proc: then there are no marks
            network = Path("/proc/self/ns/net").stat().st_ino
            name = hashlib.blake2b(f"{meeting} {network}".encode(), digest_size=8).hexdigest()
            folder = Path(tempfile.gettempdir()) / f"partitioner-{os.getuid()}-{name}"
            folder.mkdir(mode=0o700, exist_ok=True)
            self._started = _process_start()
            unlocked = folder / f"new-{rank}-{os.getpid()}"
            self._own = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(self._path(folder, rank))  # never seen without its lock, which would mean that this process is gone
            self._folder = folder

    def dead(self) -> list[int]:
        """The ranks of this machine that have come and are gone."""
        if self._folder is None:
            return []
        return [rank for rank in range(self._size) if rank != self._rank and self._is_dead(self._path(self._folder, rank))]

    def remove(self) -> None:
        """Take this process's mark away: all others have ways to see it go."""
        if self._folder is not None and self._own is not None:
            self._path(self._folder, self._rank).unlink(missing_ok=True)
            os.close(self._own)
            self._own = None
            with contextlib.suppress(OSError):
                self._folder.rmdir()  # by the last one
            self._folder = None

    def _is_dead(self, path: Path) -> bool:
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
    """When this process was started, as files have their times."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
