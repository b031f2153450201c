"""Waits for collectives that run while ranks compute: small programs on a clock that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cost_models.collectives.algorithms import GroupLinks
from cost_models.formulas.symbols import Numbers
from cost_models.hardware.clusters import Cluster, Device, Level, Link
from partitioner import Constraints, partition
from partitioner.planner.costs.overlap.messages import Activation, GradientOfCall, Regather, Repeat, Stored
from partitioner.planner.costs.overlap.waits import CallSeconds, FirstHalf, waiting_for_messages
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.model import CuttableModel
from partitioner.tracing.trace import trace
from passes.ir.mesh import Mesh
from tests.support.running.slow_values import all_but

LARGE = 4 * 2**20
"""Bytes of a parameter whose shard is sent alone."""

LINKS = GroupLinks(2, Link(0.0, LARGE / 2, "inside"))
"""A gather of a large parameter takes a second."""


def parameter(place: int, *, again: bool = False, sent: float = 0.0) -> Stored:
    return Stored(place, f"w{place}", "fsdp", LARGE, sent, LINKS, 0, again, torch.float32)


def waits(
    stored: list[Stored],
    seconds: list[list[float]],
    *,
    sums: tuple[GradientOfCall, ...] = (),
    activations: tuple[Activation, ...] = (),
    recomputed: tuple[float, ...] = (),
    of_weight: tuple[float, ...] = (),
    first: FirstHalf = "",
    needed: tuple[int, ...] = (),
    repeat: Repeat | None = None,
    n_microbatches: int = 1,
    n_stages: int = 1,
    is_split: bool = False,
) -> list[list[float]]:
    nothing = [0.0] * len(seconds[0])
    of_calls = CallSeconds(seconds[0], seconds[1], of_weight or nothing, nothing, recomputed or nothing)
    halves = [first] * len(nothing)
    found: list[list[float]] = waiting_for_messages(
        stored,
        activations,
        sums,
        of_calls,
        halves,
        needed or range(len(nothing)),
        repeat,
        n_microbatches=n_microbatches,
        n_stages=n_stages,
        is_split=is_split,
    ).tolist()
    return found


def test_parameters_are_gathered_one_message_ahead() -> None:
    """The first is waited for; the second arrives beside the first call, of half a second."""
    assert waits([parameter(0), parameter(1), parameter(2)], [[0.5, 2.0, 1.0], [0.0] * 3])[0] == pytest.approx([1.0, 0.5, 0.0])


def test_of_several_microbatches_the_first_alone_waits_for_its_first_gather() -> None:
    stored, seconds = [parameter(0), parameter(1)], [[2.0, 2.0], [0.0, 0.0]]
    assert waits(stored, seconds, n_microbatches=2)[0] == pytest.approx([1 / 2, 0.0])
    assert waits(stored, seconds, n_microbatches=8)[0] == pytest.approx([1 / 8, 0.0])


def test_the_last_gather_of_a_backward_starts_the_first_of_the_next_microbatch() -> None:
    """It runs beside the last call of the backward, of a quarter of a second: the other three quarters are waited for."""
    stored, seconds = [parameter(0, again=True), parameter(1, again=True)], [[2.0, 2.0], [0.25, 3.0]]
    forward, backward, _ = waits(stored, seconds, n_microbatches=2)
    assert forward == pytest.approx([(1.0 + 0.75) / 2, 0.0])
    assert backward == pytest.approx([0.0, 1.0])


def test_scatters_of_a_microbatch_delay_the_gathers_of_the_next_one() -> None:
    """The scatter of a second begins when the backward ends, after the gather of the next forward, which the second gather waits for."""
    stored, seconds = [parameter(0, sent=LARGE), parameter(1)], [[0.5, 1.0], [1.0, 1.0]]
    first, second = waits(stored, seconds)[0], waits(stored, seconds, n_microbatches=1_000_000)[0]
    assert first == pytest.approx([1.0, 0.5])
    assert second == pytest.approx([0.0, 1.5], abs=1e-5)


def test_a_forward_after_a_forward_waits_for_its_first_gather() -> None:
    """It starts with the call of half a second in which a stage of half of the model ends; a backward between the two would hide it."""
    stored, seconds = [parameter(0), parameter(1), parameter(2)], [[1.0, 0.5, 1.0], [3.0, 3.0, 3.0]]
    assert waits(stored, seconds, n_microbatches=4)[0] == pytest.approx([0.25, 0.0, 0.5])
    assert waits(stored, seconds, n_microbatches=4, n_stages=2)[0] == pytest.approx([0.5, 0.0, 0.5])


def test_scatters_run_in_weight_halves_alone_where_these_are_apart() -> None:
    """Four scatters of a second each, beside a second of weight halves: the first starts after a quarter, and two are under way."""
    stored = [parameter(place, sent=LARGE) for place in range(4)]
    _, together, _ = waits(stored, [[9.0] * 4, [1.0] * 4], of_weight=(0.25,) * 4)
    _, of_input, of_weight = waits(stored, [[9.0] * 4, [1.0] * 4], of_weight=(0.25,) * 4, is_split=True)
    assert sum(together) == pytest.approx(1.0)
    assert of_input == pytest.approx([0.0] * 4)
    assert sum(of_weight) == pytest.approx(0.25 + 4 * 1.0 - 4 * 0.25)


def test_gathers_that_whole_backwards_wait_for_run_ahead_in_weight_halves() -> None:
    """Of the gathers for two weight halves of two seconds, a second each, the first is waited for."""
    activations = tuple(Activation(place, "tensor", 1.0, 0.0, LINKS, regather=Regather(place, LARGE, maker=place)) for place in range(2))
    seconds = [[1.0, 1.0], [1.0, 1.0]]
    assert sum(waits([], seconds, of_weight=(2.0, 2.0), activations=activations)[1]) == pytest.approx(2.0)
    _, of_input, of_weight = waits([], seconds, of_weight=(2.0, 2.0), activations=activations, is_split=True)
    assert of_input == pytest.approx([0.0, 0.0])
    assert of_weight == pytest.approx([0.0, 1.0])


def test_a_kernel_of_both_gradients_waits_in_the_input_half() -> None:
    """Such as that of a convolution: two of four seconds, and a gather of a second for each, of which the second runs ahead."""
    again = tuple(Activation(place, "tensor", 0.0, 0.0, LINKS, regather=Regather(place, LARGE)) for place in range(2))
    _, of_input, of_weight = waits([], [[1.0, 1.0], [4.0, 4.0]], activations=again, is_split=True)
    assert of_input == pytest.approx([0.0, 1.0])
    assert of_weight == pytest.approx([0.0, 0.0])


def test_a_recomputed_shard_is_gathered_while_the_calls_after_it_are_recomputed() -> None:
    """Its gather, of a second, runs beside half a second of recomputation of call 1, whose weight half waits for the rest."""
    again = Activation(0, "tensor", 0.0, 0.0, LINKS, regather=Regather(1, LARGE, maker=0))
    _, backward, _ = waits([], [[1.0, 1.0], [0.0, 0.0]], of_weight=(0.0, 2.0), recomputed=(0.25, 0.5), needed=(1, 1), activations=(again,))
    assert backward == pytest.approx([0.0, 0.5])


@pytest.mark.parametrize("last", [0, 2])
def test_the_last_reader_waits_for_a_value_that_is_gathered_again(last: int) -> None:
    """The backward comes to it first; the saved shard of call 0 is gathered right before."""
    again = Activation(0, "tensor", 0.0, 0.0, LINKS, regather=Regather(last, LARGE))
    _, backward, _ = waits([], [[1.0] * 3, [1.0] * 3], of_weight=(2.0,) * 3, activations=(again,))
    assert backward == pytest.approx([float(place == last) for place in range(3)])


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(("n_stages", "waited"), [(1, [0.0, 1.0]), (2, [1.0, 1.0])])
def test_each_stage_waits_for_its_first_repeated_gather(n_stages: int, waited: list[float], is_split: bool) -> None:
    """Two calls of two seconds, each with a saved shard: in one stage the second gather runs beside the first weight half."""
    again = tuple(Activation(place, "tensor", 0.0, 0.0, LINKS, regather=Regather(place, LARGE)) for place in range(2))
    seconds = [[1.0, 1.0], [1.0, 1.0]]
    _, *halves = waits([], seconds, of_weight=(2.0, 2.0), activations=again, n_stages=n_stages, is_split=is_split)
    assert halves[is_split] == pytest.approx(waited)


def test_saved_shards_are_gathered_ahead_of_recomputations() -> None:
    """Two calls of a second that are computed again, each in a region of its own: the second gather runs beside the first backward."""
    again = tuple(Activation(place, "tensor", 0.0, 0.0, LINKS, regather=Regather(place, LARGE, is_recomputed=True)) for place in range(2))
    _, backward, _ = waits([], [[1.0, 1.0], [1.0, 1.0]], recomputed=(1.0, 1.0), activations=again)
    assert backward == pytest.approx([0.0, 1.0])


def test_parameters_of_uneven_parts_share_no_message_with_others() -> None:
    """Two small gathers with a latency of a second each: together they are waited for once."""
    links = GroupLinks(2, Link(1.0, 1e18, "inside"))
    one, other = (Stored(place, f"w{place}", "fsdp", 8.0, 0.0, links, 0, False, torch.float32) for place in range(2))
    seconds = [[0.0, 0.0], [0.0, 0.0]]
    assert sum(waits([one, other], seconds)[0]) == pytest.approx(links.seconds("all_gather", 16.0))
    assert sum(waits([one, replace(other, is_uneven=True)], seconds)[0]) == pytest.approx(2 * links.seconds("all_gather", 8.0))


@pytest.mark.parametrize(("n_columns", "is_uneven"), [(8, False), (6, True)])
def test_parts_of_a_parameter_are_uneven_if_its_columns_are(n_columns: int, is_uneven: bool) -> None:
    """Four ranks store columns of the table, whose rows are over two others."""
    graph = trace(nn.Sequential(nn.Embedding(64, n_columns), nn.Linear(n_columns, 8)), (torch.zeros(8, 4, dtype=torch.int64),))
    request = PlanRequest("model", ("cpu",) * 8, constraints=Constraints(axes={"vocab": "tensor"}))
    cut = CuttableModel(graph, request).cut(Mesh((("fsdp", 4), ("tensor", 2))))
    assert [each.is_uneven for each in cut.part.exchanges if each.value == "p_0_weight"] == [is_uneven]


def test_a_value_is_sent_once_it_is_made() -> None:
    """Its message of a second runs beside call 1, of three quarters of a second; the backward waits for the whole of it."""
    value = Activation(2, "tensor", 1.0, 1.0, LINKS, maker=0)
    forward, backward, _ = waits([], [[1.0, 0.75, 1.0], [1.0] * 3], activations=(value,))
    assert forward == pytest.approx([0.0, 0.0, 0.25])
    assert backward == pytest.approx([0.0, 0.0, 1.0])


class Attention(nn.Module):
    """Three projections of one value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x))
        heads = [part(normed).unflatten(-1, (4, -1)).transpose(1, 2) for part in self.parts]
        result: Tensor = self.last(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return result


def test_gradients_are_added_in_the_parts_that_their_readers_read() -> None:
    """The value is gathered for three readers, whose gradients are added before they are scattered: two sums of all of it."""
    graph = trace(Attention(8), (torch.zeros(4, 6, 8),))
    request = PlanRequest("model", ("cpu",) * 2, constraints=Constraints(axes={"heads": "tensor"}))
    cut = CuttableModel(graph, request).cut(Mesh((("tensor", 2),)), extra_axes=True)
    (gathered,) = (each for each in cut.part.exchanges if each.value == "layer_norm" and each.forward == "all_gather")
    assert gathered.n_readers == 3
    sums = cut.part.cost.nodes["layer_norm"].backward_input.then[-2:]
    numbers = Numbers(4)
    assert [numbers[each.bytes] for each in sums] == [3.0 * 4 * 4 * 6 * 8] * 2


def test_a_repeated_block_that_is_run_whole_has_the_waits_of_every_copy() -> None:
    """All 480 calls of the block hide the second gather, of a second; the 240 that are run otherwise hide half of it."""
    few = Repeat(1, 2, 480)
    stored, seconds = [parameter(0), parameter(2)], [[0.0, 1 / 480, 1.0], [0.0] * 3]
    assert waits(stored, seconds, repeat=few._replace(is_run_whole=True))[0] == pytest.approx([1.0, 0.0, 0.0])
    assert waits(stored, seconds, repeat=few)[0] == pytest.approx([1.0, 0.0, 0.5])


def test_input_halves_wait_for_all_that_they_send() -> None:
    """The last call of the input halves sends a message of a second, and weight halves follow it."""
    activations = tuple(Activation(place, "tensor", 0.0, 1.0, LINKS) for place in range(2))
    halves = waits([], [[1.0, 1.0], [1.0, 1.0]], of_weight=(2.0, 2.0), activations=activations, is_split=True)
    assert halves[1] == pytest.approx([1.0, 1.0])
    assert halves[2] == pytest.approx([0.0, 0.0])


def test_scatters_stand_before_gathers_on_the_links() -> None:
    """Call 1 computes a second backward, then its gradient leaves; the gather for call 0 was on the links before it."""
    stored = [parameter(0, again=True, sent=LARGE), parameter(1, again=True, sent=LARGE)]
    forward, backward, _ = waits(stored, [[1.0, 1.0], [3.0, 3.0]])
    assert forward == pytest.approx([1.0, 0.0])
    assert backward == pytest.approx([1.0, 1.0])  # the last scatter is waited for after call 0, the first gather before call 1


def test_at_most_two_scatters_are_under_way() -> None:
    """When call 2 has started the third, after 0.75 s, it waits for the first, which ends after 1.25 s; the last call waits for three."""
    stored = [parameter(place, sent=LARGE) for place in range(5)]
    assert waits(stored, [[9.0] * 5, [0.25] * 5])[1] == pytest.approx([2.75, 0.75, 0.5, 0.0, 0.0])


def test_sums_follow_the_scatters_whose_results_they_sum() -> None:
    slow = GroupLinks(2, Link(0.0, LARGE / 4, "between"))
    stored = [parameter(place, sent=LARGE) for place in range(2)]
    sums = tuple(GradientOfCall(place, f"w{place}", "data", LARGE / 2, LARGE / 2, slow) for place in range(2))
    without, with_sums = (waits(stored, [[9.0, 9.0], [1.0, 1.0]], sums=each)[1] for each in ((), sums))
    assert sum(without) == pytest.approx(1.0)
    assert sum(with_sums) > sum(without)


def test_small_parameters_share_a_message() -> None:
    """Two of 1 KiB over a link of a second's latency: one second, not two."""
    links = GroupLinks(2, Link(1.0, 1e12, "slow to start"))
    small = [Stored(place, f"w{place}", "fsdp", 1024.0, 0.0, links, 0, False, torch.float32) for place in range(2)]
    other = [small[0], Stored(1, "w1", "fsdp", 1024.0, 0.0, links, 0, False, torch.bfloat16)]
    assert sum(waits(small, [[0.0, 0.1], [0.0, 0.0]])[0]) == pytest.approx(1.0)
    assert sum(waits(other, [[0.0, 0.1], [0.0, 0.0]])[0]) == pytest.approx(2.0)


def test_small_gradients_of_one_type_share_a_message() -> None:
    """Whatever the types of the parameters that are gathered: of bfloat16 and float32, gradients in float32."""
    links = GroupLinks(2, Link(1.0, 1e12, "slow to start"))
    kinds = (torch.float32, torch.bfloat16)
    for widths, seconds in (((4.0, 4.0), 1.0), ((4.0, 2.0), 2.0)):
        places = enumerate(zip(kinds, widths, strict=True))
        small = [Stored(place, f"w{place}", "fsdp", 0.0, 1024.0, links, 0, False, kind, True, width) for place, (kind, width) in places]
        assert sum(waits(small, [[0.0, 0.0], [0.1, 0.1]])[1]) == pytest.approx(seconds, abs=0.2)


def test_calls_are_recomputed_before_the_backward_that_needs_them() -> None:
    """The gather for call 1 runs while call 0 is computed again, which the backward of call 1 needs."""
    stored = [parameter(0, again=True), parameter(1, again=True)]
    seconds = [[1.0, 1.0], [1.0, 1.0]]
    joint = waits(stored, seconds, recomputed=(1.0, 1.0), needed=(1, 1))[1]
    assert joint == pytest.approx([1.0, 0.0])


def test_a_repeated_block_waits_as_its_copies_do() -> None:
    """Four copies of a call: the first gather is waited for, those of the others run beside the call before."""
    stored, seconds = [parameter(0), parameter(1)], [[2.0, 2.0], [0.0, 0.0]]
    assert waits(stored, seconds, repeat=Repeat(0, 1, 4))[0] == pytest.approx([0.25, 0.0])


def test_collectives_of_activations_share_the_links() -> None:
    stored, activations = [parameter(0), parameter(1)], (Activation(0, "tensor", 1.0, 0.0, LINKS),)
    alone, both = (waits(stored, [[1.0, 1.0], [0.0, 0.0]], activations=each)[0] for each in ((), activations))
    assert sum(both) - sum(alone) >= 1.0


def test_a_weight_is_gathered_and_its_gradient_scattered_beside_the_halves_of_a_backward() -> None:
    """Gradients of weights first: call 1 scatters after 3 s and gathers after that, for 2 s in all; its input half waits."""
    stored = [parameter(0, again=True, sent=LARGE), parameter(1, again=True, sent=LARGE)]
    backward = waits(stored, [[1.0, 1.0], [1.0, 1.0]], of_weight=(3.0, 3.0), first="weight")[1]
    assert backward == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize(("is_beside", "waited"), [(True, 0.5), (False, 2.0)])
def test_gradients_of_inputs_are_reduced_beside_those_of_weights(is_beside: bool, waited: float) -> None:
    activations = (Activation(0, "tensor", 0.0, 2.0, LINKS, is_beside),)
    assert sum(each for (each,) in waits([], [[1.0], [1.0]], activations=activations, of_weight=(1.5,), first="activation")) == waited


MESHES = ({"data": 2, "fsdp": 2}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"data": 4}, {"pipeline": 2, "zero2": 2})


@pytest.mark.parametrize("mesh", all_but([{"data": 2, "fsdp": 2}, {"pipeline": 2, "zero2": 2}], MESHES), ids=str)
@pytest.mark.parametrize("flops", [2e12, 2e13])
def test_plans_agree_with_simulations_where_messages_bind(mesh: Mapping[str, int], flops: float) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU())))
        x = torch.zeros(4096, 2048)
    device = Device("d", {"float32": flops}, 2**40, 1e12, compute_efficiency=1.0)
    cluster = Cluster([device] * 4, [Level(2, Link(1e-5, 1e11, "inside", host_share=0.1)), Level(4, Link(2e-5, 2e10, "between"))])
    pm = partition(model, 4, mesh, example_inputs=(x,), cluster=cluster, progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.03)
