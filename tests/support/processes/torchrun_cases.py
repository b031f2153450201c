"""Functions of worker processes in the tests of the torchrun runtime: each function runs on every rank at once."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from cost_models.profiling.op_times import MeasuredCosts
from partitioner import PartitionedModel, partition
from partitioner.runtime import torchrun
from partitioner.runtime.base import Runtime
from partitioner.runtime.executor import Executable, ProgramSet
from partitioner.runtime.process.failure import Failure
from partitioner.runtime.process.groups import Connection
from partitioner.runtime.process.transport import DistributedTransport
from partitioner.runtime.torchrun import TorchrunRuntime
from passes.ir.comm.primitives import all_reduce, receive, send, wait
from passes.ir.errors import CommunicationError
from passes.ir.program import Program
from tests.support.models.case import BATCH_SIZE, Case, Instance, mean_squared_error, real
from tests.support.models.zoo import case_named
from tests.support.processes.collective_cases import CASES, Part
from tests.support.running.transparency import (
    N_MICROBATCHES,
    compare_gradients,
    compare_values,
    first_difference,
    make_partitioned,
    reference_steps,
)


def rank() -> int:
    return int(os.environ["RANK"])


LINEAR = Case(
    "linear",
    lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))),
    lambda generator, rows: ((real(generator, rows, 5),), {}),
    lambda generator, rows: real(generator, rows, 5),
    mean_squared_error,
)
"""Small enough that failures are not waited for."""


def named(name: str) -> Case:
    return LINEAR if name == LINEAR.name else case_named(name)


def partitioned(name: str, **arguments: Any) -> tuple[Case, Instance, PartitionedModel]:
    """Return a case of the zoo over all ranks."""
    case = named(name)
    instance = case.build()
    options = {"devices": int(os.environ["WORLD_SIZE"]), "mode": "pipeline", "n_microbatches": N_MICROBATCHES, **arguments}
    return case, instance, make_partitioned(instance, **options)


def step(case: Case, instance: Instance, pm: PartitionedModel) -> Tensor:
    return pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)


# -- equal numbers -----------------------------------------------------------------------------------------------------------------


def sequences(length: int) -> tuple[Tensor, Tensor]:
    """Return vectors for each step of four sequences, and their targets."""
    generator = torch.Generator().manual_seed(length)
    return real(generator, 4, length, 8), real(generator, 4, length, 8)


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(torch.float64)


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2).to(torch.float64)


def length_differences(mode: Any, inputs: str) -> list[float]:
    """Return the largest differences of losses and gradients from one device's, for lengths that were not planned."""
    model = perceptron() if mode == "pipeline" else encoder()
    pm = partition(model, int(os.environ["WORLD_SIZE"]), mode, example_inputs=(sequences(6)[0],), inputs=inputs, progress=False)
    differences = []
    for length in (5, 9):
        pm.zero_grad()
        model.zero_grad()
        x, target = sequences(length)
        n_rows = 4 // pm.data_parallel_size
        own = slice(n_rows * pm.data_parallel_rank, n_rows * (pm.data_parallel_rank + 1)) if inputs == "local" else slice(4)
        arguments = () if mode == "pipeline" and rank() > 0 else (x[own],)  # the last stage reads no input, and learns the length
        loss = pm.train_step(*arguments, target=target[own], loss_fn=nn.functional.mse_loss)
        expected = nn.functional.mse_loss(model(x), target)
        expected.backward()
        differences.append(float((loss - expected).abs()))
        for name, gradient in pm.full_gradients().items():
            of_model = model.get_parameter(name).grad
            assert gradient is not None
            assert of_model is not None
            differences.append(float((gradient - of_model).abs().max()))
    return differences


def different_lengths() -> None:
    """Pad rank 1's rows to another length."""
    pm = partition(encoder(), 2, "data", example_inputs=(sequences(6)[0],), inputs="local", progress=False)
    x, target = sequences(7 if rank() == 1 else 5)
    pm.train_step(x[:2], target=target[:2], loss_fn=nn.functional.mse_loss)


def training_difference(name: str, schedule: str, batch_size: int = BATCH_SIZE) -> str | None:
    """Compare loss, gradients and weights of three AdamW steps, on this rank, with the unpartitioned model."""
    devices = int(os.environ["WORLD_SIZE"])
    difference = first_difference(named(name), batch_size=batch_size, devices=devices, mode="pipeline", schedule=schedule)
    return None if difference is None else str(difference)


def forward_difference(name: str, mode: Any = "pipeline") -> str | None:
    """Compare outputs in evaluation, for the batch of the trace and another one."""
    case = named(name)
    instance = case.build()
    instance.model.eval()
    pm = make_partitioned(instance, devices=int(os.environ["WORLD_SIZE"]), mode=mode, n_microbatches=N_MICROBATCHES)
    for batch_size in (BATCH_SIZE, 3):
        inputs = case.build(batch_size=batch_size)
        with torch.no_grad():
            reference = instance.model(*inputs.args, **inputs.kwargs)
            difference = compare_values(reference, pm(*inputs.args, **inputs.kwargs), case.tolerance)
        if difference is not None:
            return f"batch of {batch_size}: {difference}"
    return None


def plans_by_measured_times() -> list[str]:
    """Return the hashes of two plans by the same times; a step can be made by each."""
    costs, plans = MeasuredCosts(), []
    for _ in range(2):
        case, instance, pm = partitioned("linear", cost_model=costs)
        dist.barrier()
        step(case, instance, pm)
        plans.append(pm.plan.hash)
    return plans


def check_report(name: str) -> tuple[bool, str]:
    """Return the report of ``check`` on this rank, and whether a step still trains as before it."""
    case, instance, pm = partitioned(name)
    report = pm.check(*instance.args, **instance.kwargs)
    step(case, instance, pm)
    return bool(report), str(report)


def state_moves() -> str | None:
    """Compare outputs after a full state, or the parts of the ranks, are loaded into another model."""
    case, instance, pm = partitioned("shared_layer")
    _, _, other = partitioned("shared_layer", schedule="GPipe")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=0.1)
    for get_state in (pm.full_state_dict, pm.state_dict):
        step(case, instance, pm)
        optimizer.step()
        other.load_state_dict(get_state())
        instance.model.load_state_dict(pm.full_state_dict())
        with torch.no_grad():
            expected = instance.model(*instance.args)
            for model in (pm, other):
                difference = compare_values(expected, model(*instance.args), case.tolerance)
                if difference is not None:
                    return str(difference)
    return None


def backward_of_unlike_losses() -> None:
    """Give rank 1 another target: its gradient of the result differs from that of the last stage's loss."""
    case, instance, pm = partitioned("linear")
    assert case.loss_fn is not None
    case.loss_fn(pm(*instance.args), instance.target + rank()).backward()
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:  # ranks compare what they were given while they go on: one of the next calls reports it
        pm.full_state_dict()
        time.sleep(0.01)


def backward_on_one_rank() -> None:
    """Read the result on rank 0 only, and make the next call."""
    case, instance, pm = partitioned("linear")
    assert case.loss_fn is not None
    result = pm(*instance.args)
    if rank() == 1:
        case.loss_fn(result, instance.target).backward()
    else:
        pm(*instance.args)


# -- the transport -----------------------------------------------------------------------------------------------------------------


TENSORS = (
    torch.zeros(0, 3),
    torch.tensor(3.5, dtype=torch.float64),
    torch.tensor(7),
    torch.tensor([True, False, True]),
    torch.arange(6).reshape(2, 3).t(),
    torch.arange(24.0).reshape(1, 4, 3, 2).permute(0, 3, 1, 2),
    torch.arange(8.0)[::2],
    torch.arange(3, dtype=torch.int16),
    torch.arange(3.0).bfloat16(),
    torch.complex(torch.arange(3.0), torch.ones(3)),
)


def ring(size: int) -> ProgramSet:
    """Return programs that send all tensors to the next rank, receive the previous one's, and sum over all ranks and over two."""
    programs = [Program("forward", number, ring_program(number, size), ()) for number in range(size)]
    return ProgramSet(tuple(programs), {rank(): Executable(programs[rank()])})


def ring_program(number: int, size: int) -> fx.GraphModule:
    graph = fx.Graph()
    values = [graph.placeholder(f"value{index}") for index in range(len(TENSORS))]
    parts = [graph.placeholder(f"part{index}") for index in range(2)]
    before, after = (number - 1) % size, (number + 1) % size
    pending = [
        graph.call_function(receive, (tuple(tensor.shape), tensor.dtype), {"source": before, "tag": tag})
        for tag, tensor in enumerate(TENSORS)
    ]
    for tag, value in enumerate(values):
        graph.call_function(send, (value,), {"destination": after, "tag": tag})
    results = [graph.call_function(wait, (each,)) for each in reversed(pending)]
    groups = [group for group in (tuple(range(size)), (0, size - 1)) if number in group]
    started = [graph.call_function(all_reduce, (parts,), {"group": group}) for group in groups]
    results += [graph.call_function(wait, (each,)) for each in started]
    graph.output(results)
    return fx.GraphModule({}, graph)


def exchanged(tagged: bool) -> list[Tensor]:
    """Check that a rank receives the tensors of the previous one; return the sums, real numbers in two precisions."""
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    runtime = TorchrunRuntime([torch.device("cpu")] * size)
    if not tagged:
        use_channels(runtime)
    generator = torch.Generator().manual_seed(rank())
    parts = {"part0": torch.randn(1000, generator=generator), "part1": torch.randn(3, 5, dtype=torch.float64, generator=generator)}
    inputs = {**{f"value{index}": tensor for index, tensor in enumerate(TENSORS)}, **parts}
    (results,) = runtime.run(ring(size), {rank(): inputs}).values()
    received = results[: len(TENSORS)][::-1]
    for sent, got in zip(TENSORS, received, strict=True):
        torch.testing.assert_close(got, sent, rtol=0, atol=0)
    return [part for sums in results[len(TENSORS) :] for part in sums]


def collectives(tagged: bool) -> list[Tensor]:
    """Run every case of ``tests.support.processes.collective_cases`` in one program, over all ranks, over two, and over one.

    Each rank compares what it gets; returned are a small and a large sum of real numbers.
    """
    size = int(os.environ["WORLD_SIZE"])
    runtime = TorchrunRuntime([torch.device("cpu")] * size)
    if not tagged:
        use_channels(runtime)
    written = [collective_program(number, size) for number in range(size)]
    programs = tuple(Program("forward", number, module, ()) for number, (module, _) in enumerate(written))
    parts = written[rank()][1]
    given = {f"value{index}": tensor for index, tensor in enumerate(tensor for part in parts for tensor in part.tensors)}
    kept = {name: tensor.clone() for name, tensor in given.items()}
    executables = ProgramSet(programs, {rank(): Executable(programs[rank()])})
    generator = torch.Generator().manual_seed(rank())
    reals = [torch.randn(count, generator=generator) for count in (100, 200_000)]
    (results,) = runtime.run(executables, {rank(): {**given, "small": reals[0], "large": reals[1]}}).values()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in given.items())
    for part, got in zip(parts, results, strict=False):
        for tensor, wanted in zip(got, part.expected, strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
            assert tensor.is_contiguous()
    return [total for (total,) in results[len(parts) :]]


def collective_program(number: int, size: int) -> tuple[fx.GraphModule, list[Part]]:
    """Return a program that starts everything before it waits."""
    graph = fx.Graph()
    groups = [group for group in (tuple(range(size)), (0, size - 1), (number,)) if number in group]
    found = [(case, group, case.parts(len(group))[group.index(number)]) for case in CASES for group in dict.fromkeys(groups)]
    count = itertools.count()
    values = [[graph.placeholder(f"value{next(count)}") for _ in part.tensors] for _, _, part in found]
    reals = [graph.placeholder(name) for name in ("small", "large")]
    started = [
        graph.call_function(case.function, (given,), {"group": group, **part.keywords})
        for (case, group, part), given in zip(found, values, strict=True)
    ]
    started += [graph.call_function(all_reduce, ([real],), {"group": tuple(range(size))}) for real in reals]
    graph.output([graph.call_function(wait, (pending,)) for pending in reversed(started)][::-1])
    return fx.GraphModule({}, graph), [part for _, _, part in found]


def use_channels(runtime: Runtime) -> None:
    """Give a runtime a group for each channel, where messages have no tags: what NCCL needs, on gloo."""
    connect_anew(runtime, 60, tagged=False)


def connect_anew(runtime: Runtime, seconds: int, *, tagged: bool = True) -> Connection:
    assert isinstance(runtime, TorchrunRuntime)
    session, limit = torchrun.arrive(), timedelta(seconds=seconds)
    runtime._connection = Connection(
        torch.device("cpu"), limit, session.next_connection(), session.watch, session.store, tagged=tagged, members=session.members
    )
    return runtime._connection


def training_over_channels(name: str, schedule: str) -> str | None:
    """Compare a training step whose messages have no tags."""
    case, instance, pm = partitioned(name, schedule=schedule)
    use_channels(pm.traced.runtime)
    loss = step(case, instance, pm).detach()
    reference = reference_steps(case, n_steps=1)
    difference = compare_values(reference.losses[0], loss, case.tolerance)
    difference = difference or compare_gradients(reference.gradients[0], pm.full_gradients(), case.tolerance)
    return None if difference is None else str(difference)


def take_existing_group(seconds: int) -> tuple[float, bool]:
    """Initialise ``torch.distributed`` as a script; return the timeout that the runtime takes over."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    mine = dist.group.WORLD
    runtime = TorchrunRuntime([torch.device("cpu")] * dist.get_world_size())
    return runtime._connection.timeout.total_seconds(), runtime._connection.world is mine


# -- failures ----------------------------------------------------------------------------------------------------------------------


def different_batch_sizes(other: int) -> None:
    """Make two steps of 8 rows, then one in which a rank has 6."""
    case, instance, pm = partitioned("linear")
    for _ in range(2):
        step(case, instance, pm)
    rows = 6 if rank() == other else BATCH_SIZE
    step(case, case.build(batch_size=rows), pm)


def partition_another_model(difference: str, measured: bool) -> None:
    """Partition with other weights, another operation without any, or another batch on rank 1."""
    odd = rank() == 1
    width = 24 if odd and difference == "weights" else 16
    activation = nn.GELU() if odd and difference == "operation" else nn.ReLU()
    model = nn.Sequential(nn.Linear(8, width), activation, nn.Linear(width, 4))
    x = torch.zeros(4 if odd and difference == "batch" else BATCH_SIZE, 8)
    partition(model, 2, "data", example_inputs=(x,), cost_model=MeasuredCosts() if measured else None, progress=False)


def evaluate_on_one_rank() -> None:
    """After a step, rank 0 alone looks at the outputs."""
    case, instance, pm = partitioned("linear")
    step(case, instance, pm)
    if rank() == 0:
        with torch.no_grad():
            pm(*instance.args)
    else:
        step(case, instance, pm)


@contextlib.contextmanager
def second_step() -> Iterator[None]:
    """Tell a loss that this is the second step by a variable that it does not capture: a loss that captures another is tried first."""
    os.environ["SECOND_STEP"] = "1"
    try:
        yield
    finally:
        del os.environ["SECOND_STEP"]


def failing_loss() -> None:
    """Raise in the loss of the second step, on the rank that computes it."""
    _, instance, pm = partitioned("linear")

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if "SECOND_STEP" in os.environ:
            raise ValueError("no such label: 17")
        return nn.functional.mse_loss(output, target)

    pm.train_step(*instance.args, target=instance.target, loss_fn=loss_fn)
    with second_step():
        pm.train_step(*instance.args, target=instance.target, loss_fn=loss_fn)


def silent_loss() -> None:
    """Wait in the loss until some rank has timed out."""
    _, instance, pm = partitioned("linear")
    has_failed = [connect_anew(pm.traced.runtime, 4).record.first]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        while "SECOND_STEP" in os.environ and has_failed[0]() is None:
            time.sleep(0.05)
        return nn.functional.mse_loss(output, target)

    pm.train_step(*instance.args, target=instance.target, loss_fn=loss_fn)
    with second_step():
        pm.train_step(*instance.args, target=instance.target, loss_fn=loss_fn)


def use_after_failure() -> str:
    """Return the error of a model whose ranks have failed together before."""
    case, instance, pm = partitioned("linear")
    assert isinstance(pm.traced.runtime, TorchrunRuntime)
    pm.traced.runtime._connection.end(Failure(0, "rank 0 failed: ValueError: 17"))
    try:
        step(case, instance, pm)
    except CommunicationError as error:
        return str(error)
    return ""


def train_for_ever(dying: int) -> None:
    """Train until a rank is killed while it sends in the middle of the third step."""
    case, instance, pm = partitioned("linear", schedule="1F1B")
    for _ in range(2):
        step(case, instance, pm)
    if rank() == dying:
        die_at_send(3)
    while True:
        step(case, instance, pm)


def die_at_send(count: int) -> None:
    send_as_before = DistributedTransport.send
    sends: list[int] = []

    def send_or_die(self: DistributedTransport, tensor: Tensor, destination: int, tag: int) -> None:
        sends.append(tag)
        if len(sends) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        send_as_before(self, tensor, destination, tag)

    DistributedTransport.send = send_or_die  # type: ignore[method-assign]  # no sooner and no later


def fail_between_steps(failing: int) -> None:
    """Raise an error of the script itself, which the runtime does not see."""
    case, instance, pm = partitioned("linear")
    step(case, instance, pm)
    if rank() == failing:
        raise KeyError("no such file")
    step(case, instance, pm)
