"""Faults, each brought about in processes of its own: a rank that is killed, one that skips a step, a link that is cut.

``outcome("killed")`` starts the processes, waits for the fault and for their ends, and says how long each rank took and what it said. Two
nodes are network namespaces joined by a pair of virtual interfaces, which only root can make; they are gone afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from examples import elastic_training
from partitioner import PartitionedModel, partition

ROOT = Path(__file__).parent.parent
_FAULT = "FAULT "
_RAISED = "RAISED "
_RUNNING = "RUNNING"
_LINK = "joint"
"""The interface of each node."""


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        rank: which.
        code: its exit code; negative: the signal that killed it; None: it had to be stopped.
        raised: seconds from the fault to its error; None where there was none.
        seconds: from the fault to its end.
        output: all that it printed.
    """

    rank: int
    code: int | None
    raised: float | None
    seconds: float
    output: str

    @property
    def said(self) -> str:
        """The error that ended it, without its remedy; or the last line."""
        found = list(re.finditer(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w+Error: .*(?:\n  first failure: .*)?)", self.output, re.MULTILINE))
        if found:
            return found[-1][1]
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "nothing")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a fault in each process, including the faulty one."""

    endings: tuple[Ending, ...]

    @property
    def survivors(self) -> tuple[Ending, ...]:
        """Those that were not killed."""
        return tuple(ending for ending in self.endings if ending.code != -signal.SIGKILL)

    @property
    def seconds(self) -> float:
        """From the fault to the end of the last process."""
        return max(ending.seconds for ending in self.survivors)


# -- what a rank does --------------------------------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


def _partitioned(mode: str) -> tuple[PartitionedModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    pm = partition(model, size, mode, example_inputs=(torch.zeros(16, 64),), progress=False)
    return pm, torch.optim.SGD(pm.parameters(), lr=0.1)


def _batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(16, 64, generator=generator), torch.randn(16, 64, generator=generator)


def _step(pm: PartitionedModel, optimizer: torch.optim.Optimizer, number: int) -> float:
    x, target = _batch(number)
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _fault() -> None:
    print(f"{_FAULT}{time.time()}", flush=True)


def _die() -> None:
    _fault()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_partition(rank: str) -> None:
    """Kill a rank 0.2 s into ``partition()``."""
    if _rank() == int(rank):
        threading.Timer(0.2, _die).start()
    _partitioned("pipeline")
    time.sleep(0.2)


def skips_a_step(mode: str) -> None:
    """Leave out the sixth of many batches on rank 1."""
    pm, optimizer = _partitioned(mode)
    for number in range(1000):
        if number == 5 and _rank() == 1:
            _fault()
            continue
        _step(pm, optimizer, number)


def skips_a_train_step(mode: str) -> None:
    """Leave out ``train_step`` once on rank 1, but not its optimizer step; the batch is always the same."""
    pm, optimizer = _partitioned(mode)
    x, target = _batch(0)
    for number in range(1000):
        if number == 5 and _rank() == 1:
            _fault()
        else:
            pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        optimizer.step()


def ends_a_step_early(mode: str) -> None:
    """Leave out a step of ten with the same batch on rank 1, which then gathers the weights during the last step of the rest."""
    pm, _ = _partitioned(mode)
    x, target = _batch(0)
    for number in range(10):
        if number == 5 and _rank() == 1:
            continue
        if number == 9:
            _fault()
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    pm.full_state_dict()


def killed(mode: str) -> None:
    """Kill rank 2 during training, from the process that it does not expect."""
    pm, optimizer = _partitioned(mode)
    for number in range(10**6):
        if number == 5 and _rank() == 2:
            threading.Timer(0.05, _die).start()
        _step(pm, optimizer, number)


def trains(seconds: str) -> None:
    """Train for ever, in a process group with a timeout."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(seconds)))
    pm, optimizer = _partitioned("pipeline")
    for number in range(10**6):
        _step(pm, optimizer, number)
        if number == 5:
            print(_RUNNING, flush=True)


def spawns() -> None:
    """Spawn processes and make their group in a script."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(f"{_FAULT}{time.time()}", flush=True)
    spawn(_spawned, (port,), nprocs=2)


def _spawned(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    pm, optimizer = _partitioned("pipeline")
    losses = [_step(pm, optimizer, number) for number in range(3)]
    ranks = pm.data_parallel_size, len(list(pm.parameters()))
    sys.stdout.write(f"rank {rank} holds {ranks[1]} of 8 parameters, losses {losses}\n")


def killed_while_saving() -> None:
    """Kill the last rank while it writes its part of the third checkpoint, on the first attempt."""
    if elastic_training.ATTEMPT == 0 and elastic_training.RANK == elastic_training.RANKS - 1:
        _die_in_checkpoint(9)
    elastic_training.main(sys.argv[2:])


def _die_in_checkpoint(step: int) -> None:
    """Be killed while the checkpoint after a step is written."""
    save, write = elastic_training.save, torch.save
    written: list[int] = []

    def save_and_die(folder: Path, number: int, *rest: Any) -> None:
        if number == step:
            written.append(0)
        save(folder, number, *rest)

    def write_or_die(*args: Any, **kwargs: Any) -> None:
        if written:
            written[0] += 1
            if written[0] == 4:
                os.kill(os.getpid(), signal.SIGKILL)
        write(*args, **kwargs)

    vars(elastic_training)["save"], torch.save = save_and_die, write_or_die  # no sooner and no later


CASES: dict[str, Callable[..., None]] = {
    "killed_in_partition": killed_in_partition,
    "skips_a_step": skips_a_step,
    "skips_a_train_step": skips_a_train_step,
    "ends_a_step_early": ends_a_step_early,
    "killed": killed,
    "trains": trains,
    "spawns": spawns,
    "killed_while_saving": killed_while_saving,
}


# -- processes ---------------------------------------------------------------------------------------------------------------------


class Process:
    """A rank's process.

    Args:
        rank, size: which, of how many; no rank: a script by itself.
        address: host and port of the store, which rank 0 holds.
        arguments: of ``main`` below.
        node: the network namespace that it runs in.
    """

    def __init__(self, rank: int | None, size: int, address: tuple[str, int], arguments: Sequence[str], node: str | None = None) -> None:
        self.rank = rank or 0
        self.ended: float | None = None
        self._output: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if rank is not None:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            environment |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
        prefix = [] if node is None else ["ip", "netns", "exec", node]
        if node is not None:
            environment["GLOO_SOCKET_IFNAME"] = _LINK
        command = [*prefix, sys.executable, "-m", "benchmarks.fault_injection", *arguments]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._output, "stderr": self._output}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)  # type: ignore[call-overload]

    @property
    def output(self) -> str:
        """Its output so far."""
        self._output.seek(0)
        return self._output.read()

    def is_running(self) -> bool:
        """Return whether it is running; record the time when it has ended."""
        if self._process.poll() is None:
            return True
        self.ended = self.ended or time.time()
        return False

    def ending(self, fault: float) -> Ending:
        """Return its ending; stop it if it is running."""
        code = None if self.is_running() else self._process.returncode
        if code is None:
            self._process.kill()
            self._process.wait()
        raised = re.search(rf"^{_RAISED}(\S+)", self.output, re.MULTILINE)
        seconds = (self.ended or time.time()) - fault
        found = Ending(self.rank, code, None if raised is None else float(raised[1]) - fault, seconds, self.output)
        self._output.close()
        return found


def outcome(case: str, *arguments: str, size: int = 4, limit: float = 60.0) -> Outcome:
    """Start the processes of a case, and see how they end within so many seconds from the fault on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", int(probe.getsockname()[1]))
    ranks: Sequence[int | None] = [None] if case == "spawns" else range(size)
    processes = [Process(rank, size, address, (case, *arguments)) for rank in ranks]
    return _ended(processes, limit, lambda: _printed_fault(processes))


def _printed_fault(processes: Sequence[Process]) -> float | None:
    found = [float(time_of) for process in processes for time_of in re.findall(rf"^{_FAULT}(\S+)", process.output, re.MULTILINE)]
    return max(found, default=None)


def _ended(processes: Sequence[Process], limit: float, fault: Callable[[], float | None]) -> Outcome:
    """Return the outcome of processes within so many seconds of a fault, which comes within two minutes."""
    start = time.time()
    at: float | None = None
    while sum(process.is_running() for process in processes) > 0:
        at = at or fault()
        if time.time() > (start + 120 if at is None else at + limit):
            break
        time.sleep(0.05)
    began = at or fault() or start
    return Outcome(tuple(process.ending(began) for process in processes))


# -- two nodes ---------------------------------------------------------------------------------------------------------------------


def can_make_nodes() -> str | None:
    """Why there can be no network namespaces here; None if there can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces are for root on Linux"
    try:
        name = f"probe{os.getpid()}"
        for step in ("add", "delete"):
            subprocess.run(["ip", "netns", step, name], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"ip netns cannot make network namespaces: {error}"
    return None


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield name and address of two network namespaces, joined by a link."""
    names = f"node{os.getpid()}a", f"node{os.getpid()}b"
    addresses = "10.111.0.1", "10.111.0.2"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", _LINK, "netns", names[0], "type", "veth", "peer", "name", _LINK, "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _LINK)
            _ip("-n", name, "link", "set", _LINK, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield (names[0], addresses[0]), (names[1], addresses[1])
    finally:
        for name in names:  # the link goes with its ends
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def cut_link(timeout: float = 20.0, limit: float = 60.0) -> Outcome:
    """Cut the link between two nodes of two ranks each during a step; waits may last so many seconds."""
    with two_nodes() as nodes:
        processes = [Process(rank, 4, (nodes[0][1], 29400), ("trains", str(timeout)), nodes[rank // 2][0]) for rank in range(4)]
        start = time.time()
        while not all(_RUNNING in process.output for process in processes) and all(process.is_running() for process in processes):
            if time.time() > start + 120:
                break
            time.sleep(0.05)
        _ip("-n", nodes[0][0], "link", "set", _LINK, "down")
        at = time.time()
        return _ended(processes, limit, lambda: at)


# -- a training that is started again ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Output of a run of ``examples/elastic_training.py``.

    Attributes:
        losses: step -> its loss, to the last bit; one for each time that the step was made.
        first_steps: with which step each attempt began.
        checkpoints: that are there afterwards.
        output: all that was printed.
    """

    losses: dict[int, tuple[str, ...]]
    first_steps: tuple[int, ...]
    checkpoints: tuple[str, ...]
    output: str

    def has_losses_of(self, other: Training) -> bool:
        """Return whether every step has the loss of another run, each time that it was made."""
        return self.losses.keys() == other.losses.keys() and all(set(each) == set(other.losses[step]) for step, each in self.losses.items())


def train(folder: Path, *arguments: str, restarts: int | None, script: Sequence[str] = ("examples/elastic_training.py",)) -> Training:
    """Run the example: under torchrun with so many restarts, or in this one process (None)."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    command = [sys.executable, *([] if restarts is None else launch), *script, "--folder", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    steps = [(int(step), loss) for step, loss in re.findall(r"^ +(\d+) +\d\S* +(\S+)$", done.stdout, re.MULTILINE)]
    losses = {number: tuple(loss for step, loss in steps if step == number) for number, _ in steps}
    first = tuple(step for before, (step, _) in zip([None, *steps], steps, strict=False) if before is None or step != before[0] + 1)
    checkpoints = tuple(sorted(path.name for path in folder.glob("step-*")))
    return Training(losses, first, checkpoints, done.stdout + done.stderr)


@contextlib.contextmanager
def small_disk(kilobytes: int) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield a folder on a disk of so many kilobytes, and a function that frees space on it; for root."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder]
        subprocess.run(mount, check=True, capture_output=True)
        try:
            yield Path(folder), lambda: _run("mount", "-o", "remount,size=100m", folder)
        finally:
            _run("umount", folder)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        CASES[sys.argv[1]](*(() if sys.argv[1] == "killed_while_saving" else sys.argv[2:]))
    except BaseException:
        print(f"{_RAISED}{time.time()}", flush=True)
        raise
