"""Worker processes, each one rank, started as torchrun starts them and shared by many tests.

    workers = Workers(4)                                    # four processes that import torch once
    answers = workers.call(some_function, "gpt", 8)         # on every rank; a value or an error from each
    endings = workers.end_with(last_function)               # as a script would run it: exit code and output of each

A function is named by its module, so it must stand at the top of one that workers can import. Nothing here waits without a limit: workers
that do not answer in time are killed, and the test gets their output.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

import torch
import torch.distributed as dist

from tests import ROOT


@dataclass(frozen=True)
class Answer:
    """Result of a function on one rank.

    Attributes:
        value: what it returned.
        error: what it raised.
    """

    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        code: its exit code; negative: the signal that killed it.
        output: all that it printed.
    """

    code: int
    output: str


class Workers:
    """Processes of ranks 0 to size - 1, connected through a store in this process, which outlives them as that of torchrun does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
        self._outputs: list[IO[str]] = []
        self._connections: list[Connection[Any, Any]] = []
        self._processes = [self._start(rank) for rank in range(size)]

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Answer]:
        """Call a function on every rank at once.

        Raises:
            TimeoutError: a rank did not answer in so many seconds; all are killed.
        """
        self._send((function.__module__, function.__qualname__, args, False))
        deadline = time.monotonic() + timeout
        answers: list[Answer] = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(deadline - time.monotonic(), 0.0)):
                    raise self._late(rank, timeout)
                answers.append(pickle.loads(connection.recv_bytes()))  # noqa: S301  from our own process
            except EOFError:
                raise self._late(rank, timeout) from None
        return answers

    def values(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on every rank at once; no rank may raise. After an error the processes are ended: their group may be broken."""
        answers = self.call(function, *args, timeout=timeout)
        errors = [f"rank {rank}: {answer.error!r}" for rank, answer in enumerate(answers) if answer.error is not None]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return [answer.value for answer in answers]

    def end_with(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Ending]:
        """Call a function on every rank as the end of a script: an error that it raises ends the process."""
        self._send((function.__module__, function.__qualname__, args, True))
        deadline = time.monotonic() + timeout
        for rank, process in enumerate(self._processes):
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                raise self._late(rank, timeout) from None
        endings = [Ending(process.returncode, self._output(rank)) for rank, process in enumerate(self._processes)]
        self.close()
        return endings

    @property
    def usable(self) -> bool:
        """Whether all processes are there."""
        return bool(self._processes) and all(process.poll() is None for process in self._processes)

    def close(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()
            process.wait()
        for connection, output in zip(self._connections, self._outputs, strict=True):
            connection.close()
            output.close()
        self._processes, self._connections, self._outputs = [], [], []

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        here, there = Pipe()
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the worker
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", f"from tests.support.processes.processes import serve; serve({there.fileno()})"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        there.close()
        self._outputs.append(output)
        self._connections.append(here)
        return process

    def _send(self, call: tuple[str, str, tuple[Any, ...], bool]) -> None:
        for connection in self._connections:
            connection.send(call)

    def _output(self, rank: int) -> str:
        self._outputs[rank].seek(0)
        return self._outputs[rank].read()

    def _late(self, rank: int, timeout: float) -> TimeoutError:
        said = "\n".join(f"-- rank {other} printed:\n{self._output(other)[-2000:]}" for other in range(self.size))
        self.close()
        return TimeoutError(f"rank {rank} has ended, or did not answer within {timeout:.0f} s\n{said}")


def serve(descriptor: int) -> None:
    """Call functions, as a worker, until the last one, or until the test has ended."""
    connection: Connection[Any, Any] = Connection(descriptor)
    torch.set_num_threads(1)
    started_with = dict(os.environ)
    while True:
        try:
            module, name, args, last = connection.recv()
        except EOFError:
            return
        function = getattr(importlib.import_module(module), name)
        if last:
            function(*args)
            return
        try:
            answer = Answer(function(*args))
        except Exception as error:  # noqa: BLE001  the test decides what may be raised
            traceback.print_exc()
            answer = Answer(error=error)
        for name in os.environ.keys() - started_with.keys():  # Lightning deletes WORLD_SIZE at the end of a fit, accelerate sets its own
            del os.environ[name]
        os.environ.update(started_with)
        # Not connection.send(): torch would pass tensors by shared memory.
        connection.send_bytes(pickle.dumps(answer))
