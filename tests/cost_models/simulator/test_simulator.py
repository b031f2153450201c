"""Simulated steps: the bubbles that papers state, times that can be worked out by hand, bytes that are counted otherwise."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from cost_models.collectives.alpha_beta import all_reduce, send_receive
from cost_models.cost_model import Roofline
from cost_models.hardware.clusters import Cluster, Device, Level, Link
from cost_models.ops.work import Work
from cost_models.simulator import read_stage as stage_template
from cost_models.simulator.contention import Passages
from cost_models.simulator.events import run_ranks
from cost_models.simulator.memory import memory_of
from cost_models.simulator.message_bytes import copied_bytes
from cost_models.simulator.read_program import RankWork, _ProgramReader
from cost_models.simulator.result import Simulation
from cost_models.simulator.simulate import Representatives, simulate_programs
from cost_models.simulator.storages import Held, Storage
from cost_models.simulator.tasks import Step, Transfer
from partitioner import partition
from partitioner.schedules.catalog import find_schedule
from passes.ir.comm import primitives as communication
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from tests.support.models.case import Case, mean_squared_error, real
from tests.support.running.programs import programs

WIDTH = 8
DEVICE = Device("device", {"float32": 1e12}, 2**34, 1e11, launch_overhead=0.0)
FREE = Link(0.0, float("inf"))


@dataclass(frozen=True)
class UnitTime:
    """Every matrix product takes one second, and nothing else takes any: the clock of the papers."""

    def operation_time(self, work: Work, device: Device, dtype: torch.dtype) -> float:
        return 1.0 if work.flops else 0.0

    def transfer_time(self, size: float, link: Link) -> float:
        return float(send_receive(size, link))


@functools.cache
def equal_stages(schedule: str, n_ranks: int, n_microbatches: int, n_layers: int) -> tuple[Program, ...]:
    """Return one linear layer a stage, so that forward, input and weight gradient are one product each."""
    case = Case(
        f"linear_{n_layers}",
        lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_layers))),
        lambda generator, rows: ((real(generator, rows, WIDTH),), {}),
        lambda generator, rows: real(generator, rows, WIDTH),
        mean_squared_error,
    )
    batch = 2 * n_microbatches
    return programs(case, schedule, n_ranks, n_microbatches, input_gradients=True, batch_size=batch)["train_step"]


def simulated(schedule: str, n_ranks: int, n_microbatches: int, link: Link = FREE) -> Simulation:
    stages = n_ranks * find_schedule(schedule).default_stages_per_rank
    work = equal_stages(schedule, n_ranks, n_microbatches, stages)
    return simulate_programs(work, Cluster([DEVICE] * n_ranks, link), UnitTime(), 2 * n_microbatches)


@pytest.mark.parametrize(("schedule", "v"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
@pytest.mark.parametrize(("n_ranks", "m"), [(2, 4), (4, 8)])
def test_bubble_is_the_formula_of_huang_and_narayanan(schedule: str, v: int, n_ranks: int, m: int) -> None:
    """(R-1)/(v m + R-1), the programs being those that run."""
    found = simulated(schedule, n_ranks, m)
    assert found.step_time == 3 * (v * m + n_ranks - 1)
    assert found.bubble_fraction == pytest.approx((n_ranks - 1) / (v * m + n_ranks - 1))


@pytest.mark.parametrize(("n_ranks", "m"), [(2, 4), (4, 8)])
def test_zero_bubble_idles_a_third_of_1f1b(n_ranks: int, m: int) -> None:
    """(R-1)(F+I-W) with F = I = W (Qi et al. 2023)."""
    assert simulated("ZB1P", n_ranks, m).step_time == 3 * m + (n_ranks - 1)


@pytest.mark.parametrize(("n_ranks", "m"), [(2, 4), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_zbv_and_dualpipe_v_end_when_their_papers_say(n_ranks: int, m: int) -> None:
    """Two stages a rank: R-1 forwards before the last rank starts (ZBV), (R-1)(F+I-W) (DualPipeV in sequence)."""
    assert simulated("ZBV", n_ranks, m).step_time == 6 * m + n_ranks - 1
    assert simulated("DualPipeV", n_ranks, m).step_time == 6 * m + n_ranks - 1


def test_a_message_delays_who_waits_for_it() -> None:
    """Two stages, one microbatch: forward, message, forward, backward, message, backward; then the input's gradient for both ranks."""
    size = 2 * WIDTH * 8
    link = Link(latency=0.25, bandwidth=size / 0.5)
    found = simulated("GPipe", 2, 1, link)
    assert found.step_time == pytest.approx(1 + 0.75 + 1 + 2 + 0.75 + 2 + all_reduce(size, 2, link))
    assert found.communication == {(0, 1): size + size, (1, 0): size + 4 + size}
    assert found.latency == pytest.approx(1 + 0.75 + 1)
    assert found.throughput == pytest.approx(2 / found.step_time)


def data_parallel(cluster: Cluster) -> Simulation:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    pm = partition(model, 4, "data", example_inputs=(torch.zeros(8, WIDTH),), cluster=cluster, cost_model=UnitTime(), progress=False)
    return pm.simulate()


def test_a_collective_takes_what_its_formula_says() -> None:
    link = Link(1e-3, 1e4)
    found = data_parallel(Cluster([DEVICE] * 4, link))
    size = WIDTH * WIDTH * 4
    loss = all_reduce(4, 4, link)
    assert found.step_time == pytest.approx(1 + 1 + all_reduce(size, 4, link) + loss, rel=0.05)
    assert found.communication[0, 1] == pytest.approx((size + 4) * 2 * 3 / 4, abs=1)


def _held(*shape: int) -> Held:
    return Held(Storage("", 0, "activations"), shape, torch.float32)


@pytest.mark.parametrize(
    ("kind", "given", "got", "dims", "goes_in", "comes_out"),
    [
        ("all_reduce", [(4, 6)], [(4, 6)], [], 24, 0),  # what is summed in place is a copy
        ("all_gather", [(4, 6)], [(8, 6)], [[0]], 0, 0),  # parts arrive in place
        ("all_gather", [(4, 6)], [(4, 12)], [[1]], 0, 48),  # are put together, row by row
        ("all_gather", [(1, 6)], [(1, 12)], [[1]], 0, 0),  # of one row they are one run of memory
        ("all_gather", [(4, 6), (2,)], [(8, 6), (4,)], [[0], [0]], 26, 52),  # two in one message
        ("reduce_scatter", [(4, 6)], [(2, 6)], [[0]], 0, 0),
        ("reduce_scatter", [(4, 6)], [(4, 3)], [[1]], 24, 0),
        ("all_to_all", [(4, 6)], [(2, 12)], [[0], [1]], 0, 24),
        ("all_to_all", [(4, 6)], [(8, 3)], [[1], [0]], 24, 0),
        ("halo_exchange", [(4, 6)], [(4, 8)], [[1]], 0, 0),
    ],
)
def test_what_does_not_lie_as_it_is_sent_is_copied(
    kind: str, given: list[tuple[int, ...]], got: list[tuple[int, ...]], dims: list[list[int]], goes_in: int, comes_out: int
) -> None:
    """In elements; on two ranks."""
    found = copied_bytes(getattr(communication, kind), [_held(*shape) for shape in given], got, dims)
    assert found == (4 * goes_in, 4 * comes_out)


def test_copies_take_time_where_the_link_says_so() -> None:
    model, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.zeros(8, WIDTH)
    pm = partition(model, 4, "data", example_inputs=(x,), cluster=Cluster([DEVICE] * 4, Link(1e-3, 1e4)), progress=False)
    apart, alone = (pm.simulate(Cluster([DEVICE] * 4, Link(0.0, 1e18, copies=copies))).step_time for copies in (True, False))
    copies = (Work(0, 2 * size, 1) for size in (WIDTH * WIDTH * 4, 4))  # the gradient, and the loss
    assert apart - alone == pytest.approx(sum(Roofline().operation_time(work, DEVICE, torch.uint8) for work in copies), rel=1e-6)


def test_not_all_ranks_need_be_joined() -> None:
    """Nothing joins ranks 0 and 1, and nothing is sent between them."""
    link = Link(1e-6, 1e9)
    cluster = Cluster([DEVICE] * 3, {(0, 1): link, (1, 2): replace(link, copies=False)})
    across = Cluster([DEVICE] * 3, {(0, 2): link, (2, 1): link})
    assert cluster.copies
    assert across.copies
    assert not Cluster([DEVICE] * 3, {(0, 1): replace(link, copies=False)}).copies
    found = simulate_programs(equal_stages("GPipe", 1, 2, 1), across, UnitTime(), 4)
    assert found.step_time > 0


def test_transfers_that_share_a_link_share_its_bandwidth() -> None:
    """Two pipelines of two stages whose messages go through one way out take twice as long as each alone."""
    cluster = Cluster([DEVICE] * 3, [Level(3, Link(0.0, 100.0))])

    def work(rank: int, *transfers: Transfer) -> RankWork:
        steps = [Step("start", each.name, "", transfer=each) for each in transfers]
        waits = [Step("wait", each.name, "", transfer=each) for each in transfers if each.kind != "message" or each.group[1] == rank]
        return RankWork(rank, (*steps, *waits), (), ())

    to_one = Transfer("to_one", "message", (0, 1), "to_one", 100)
    to_two = Transfer("to_two", "message", (0, 2), "to_two", 300)
    runs, traffic = run_ranks([work(0, to_one, to_two), work(1, to_one), work(2, to_two)], Passages(cluster, Roofline()).of)
    assert runs[1].finish == pytest.approx(2.0)  # half of the bandwidth until it is over
    assert runs[2].finish == pytest.approx(4.0)  # the whole of it from then on
    assert traffic == {(0, 1): {(0, 1): 100}, (0, 2): {(0, 2): 300}}


def test_a_ring_over_nodes_leaves_the_rest_of_the_links_inside_to_others() -> None:
    """A ring of 100 B/s between nodes takes a tenth of the 1000 B/s inside a node: a message there keeps nine tenths."""
    cluster = Cluster([DEVICE] * 4, [Level(2, Link(0.0, 1000.0)), Level(4, Link(0.0, 100.0))])
    ring, inside = Transfer("ring", "all_gather", (0, 1, 2, 3), "ring", 400), Transfer("inside", "all_gather", (0, 1), "inside", 2000)
    steps = [Step(kind, "", "", transfer=transfer) for kind in ("start", "wait") for transfer in (ring, inside)]
    runs, _ = run_ranks([RankWork(rank, tuple(steps), (), ()) for rank in (0, 1)], Passages(cluster, Roofline()).of)
    ends = {each.name: each.end for each in runs[0].transferred}
    assert ends["inside"] == pytest.approx(1.1)
    assert ends["ring"] == pytest.approx(3.1)


@pytest.mark.parametrize(
    ("share", "first", "then", "finish"),
    [
        (0.0, 3.0, 1.0, 4.0),  # 2 s on the way, all of them beside computing
        (0.5, 3.0, 1.0, 5.0),  # half of 2 s are the processor's
        (0.5, 1.0, 1.0, 3.5),  # 1 s of computing is held up by half, then 1 s of waiting
        (1.0, 0.0, 1.0, 3.0),  # a rank that only waits loses nothing more
        (1.0, 9.0, 0.0, 11.0),
    ],
)
def test_processors_that_move_messages_compute_less(share: float, first: float, then: float, finish: float) -> None:
    cluster = Cluster([DEVICE] * 2, Link(0.0, 100.0, host_share=share))
    to_one = Transfer("to_one", "message", (0, 1), "to_one", 200)

    def work(rank: int) -> RankWork:
        steps = [Step("start", "to_one", "", transfer=to_one)]
        steps += [Step("compute", "while it travels", "", seconds=first), Step("wait", "to_one", "", transfer=to_one)]
        return RankWork(rank, (*steps, Step("compute", "after", "", seconds=then)), (), ())

    runs, _ = run_ranks([work(0), work(1)], Passages(cluster, Roofline()).of)
    assert [run.finish for run in runs.values()] == pytest.approx([finish, finish])
    assert [run.busy for run in runs.values()] == [first + then] * 2


def test_what_a_collective_reads_is_there_until_the_rank_waits() -> None:
    """Its handle holds it. 2 s on the way, 3 s of computing beside it."""
    held = Storage("gradient", 200, "gradients")
    transfer = Transfer("sum", "message", (0, 1), "sum", 200, inputs=(held,))
    start = Step("start", "sum", "", made=[held], dropped=[held], transfer=transfer)
    work = (start, Step("compute", "beside", "", seconds=3.0), Step("wait", "sum", "", transfer=transfer))
    cluster = Cluster([DEVICE] * 2, Link(0.0, 100.0))
    runs, _ = run_ranks([RankWork(rank, work, (), ()) for rank in (0, 1)], Passages(cluster, Roofline()).of)
    memory, curve = memory_of(runs[0], (), 0)
    assert memory.peak == 200
    assert curve.times[-1] == pytest.approx(3.0)
    assert curve.bytes[-1] == 0


def test_memory_adds_up_to_the_peak_and_names_what_is_alive() -> None:
    found = simulated("1F1B", 2, 4)
    for memory, peak in zip(found.memory, found.peak_memory, strict=True):
        assert sum(memory.values()) == peak == memory.peak
        assert memory.parameters == WIDTH * WIDTH * 8
        assert memory["parameters"] == memory.parameters
        assert 0 <= memory.peak_time <= found.step_time
        assert memory.alive[0].bytes == WIDTH * WIDTH * 8


def test_representatives_stand_for_all_ranks() -> None:
    """A mesh simulated rank by rank, inlined, and by one pipeline whose stages are calls."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)))
    mesh = {"data": 2, "pipeline": 2, "tensor": 2}
    cluster = Cluster([DEVICE] * 8, Link(1e-6, 1e9))
    x = torch.zeros(16, WIDTH)
    pm = partition(model.to("meta"), 8, mesh, example_inputs=(x,), n_microbatches=4, schedule="1F1B", cluster=cluster, progress=False)
    shown = pm.inspected()
    programs, of = shown.sharded.representatives(shown.request)
    whole, few = (
        pm.simulate(),
        simulate_programs(
            programs, cluster, Roofline(), 16, optimizer="adamw", n_row_parts=2, representatives=Representatives(Mesh(pm.plan.mesh), of)
        ),
    )
    assert len(programs) == 2
    assert few.communication == whole.communication
    assert few.step_time == pytest.approx(whole.step_time, rel=0.05)
    assert few.peak_memory == pytest.approx(whole.peak_memory, rel=0.05)


@pytest.mark.slow
def test_one_reading_serves_all_ranks_of_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's own reading is equal, storage by storage."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(8)))
    cluster = Cluster([DEVICE] * 16, Link(1e-6, 1e9))
    mesh = {"data": 2, "pipeline": 4, "tensor": 2}
    x = torch.zeros(16, WIDTH)
    pm = partition(model.to("meta"), 16, mesh, example_inputs=(x,), n_microbatches=4, schedule="1F1B", cluster=cluster, progress=False)
    shown = pm.inspected()
    programs, of = shown.sharded.representatives(shown.request)

    def run() -> Simulation:
        everybody = Representatives(Mesh(pm.plan.mesh), of)
        return simulate_programs(programs, cluster, Roofline(), 16, optimizer="adamw", n_row_parts=2, representatives=everybody)

    shared = run()
    read: list[int] = []

    def as_read(steps: list[Step], _: object) -> list[Step]:
        read.append(len(steps))
        return steps

    monkeypatch.setattr(stage_template, "combine_storages", as_read)
    monkeypatch.setattr(_ProgramReader, "_place", property(lambda self: self.program.rank))
    alone = run()
    assert len(read) == 2 * 4  # forward and backward of four ranks
    assert (shared.step_time, shared.bubble_fraction, shared.latency) == (alone.step_time, alone.bubble_fraction, alone.latency)
    assert shared.communication == alone.communication
    assert shared.timeline.computed == alone.timeline.computed
    assert shared.timeline.communicated == alone.timeline.communicated
    for one, other in zip(shared.memory, alone.memory, strict=True):
        assert dict(one) == dict(other)
        assert (one.peak_time, one.highest, one.kept) == (other.peak_time, other.highest, other.kept)
        assert sorted(one.alive, key=str) == sorted(other.alive, key=str)


def test_timeline_is_a_trace_and_a_picture() -> None:
    found = simulated("1F1B", 2, 4)
    events = json.loads(found.timeline.to_json())["traceEvents"]
    actions = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0 and event["pid"] == 0]
    assert actions[:4] == ["0F0", "0F1", "0B0", "0F2"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == pytest.approx(found.step_time * 1e6)
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", found.timeline.svg())
    assert {"rank 0", "rank 1", "0F0", "1B3"} <= set(labels)
