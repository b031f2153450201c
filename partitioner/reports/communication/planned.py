"""The communication of a step from the plan and the layouts of the sharded model: no program is lowered.

It has the collectives of ``partitioner.planner.costs.collectives``, by which the planner prices, with the names of the modules that read:

    result of ...self_attn.o_proj and 79 more    reduce_scatter over tensor, of every microbatch
    gradient of ...input_layernorm.weight ...    all_reduce over tensor, once a step
    add_30 and 12 more                           send, of every microbatch
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, fx

from cost_models.collectives.algorithms import Collective
from cost_models.formulas.symbols import Numbers
from cost_models.graph_cost import graph_cost, nodes_with_gradient, read_graph
from cost_models.hardware.units import format_bytes
from cost_models.ops.cost import tensor_shapes
from partitioner.planner.costs.collectives import (
    Exchange,
    find_exchanges,
    find_gradient_sums,
    fraction_of_message,
    with_coalescing_counts,
)
from partitioner.planner.costs.memory.checkpoint_selection import CheckpointSelection
from partitioner.planner.costs.part_sizes import PartSizes
from partitioner.reports.communication.transfer import Transfer
from partitioner.reports.module_names import short_name
from partitioner.reports.sources import Explained
from passes.analysis.axes import returned_values
from passes.autograd.recompute import Recompute
from passes.emit.gradient_buckets import BUCKET_BYTES
from passes.graph.provenance import module_path
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.errors import first_few
from passes.ir.layout import Layout
from passes.ir.mesh import GATHERED_ONCE, SCATTERED_ONCE, ranks_at_places
from passes.ir.plan import REDUCE_DTYPES, Plan
from passes.spmd.propagate.layouts import Layouts
from passes.spmd.shard_graph import CutModel
from passes.spmd.shard_stages import StagedCut
from passes.stages.split import stage_of_nodes


@dataclass(frozen=True)
class PlannedCollective:
    """A collective of the ranks of a stage, of all microbatches of a step.

    Attributes:
        kind: name of the function: ``"all_reduce"``.
        over: the mesh dimension whose ranks communicate.
        subject, name: of the value: ``"gradient of "``, ``"layers.0.mlp.up_proj.weight"``.
        stage: the number of the stage.
        message: bytes of the whole value, of the first microbatch.
        sent: bytes that a rank sends in a step.
        times: how often in a step; a fraction of a message that several small values share.
    """

    kind: str
    over: str
    subject: str
    name: str
    stage: int
    message: float
    sent: float
    times: float


@dataclass(frozen=True)
class PlannedMessage:
    """A value that a stage sends to a later one, in every microbatch.

    Attributes:
        value: its node.
        source, target: the stages; of several readers at one pipeline position the first.
        bytes: that a rank sends, of the first microbatch.
        has_gradient: whether its gradient comes back.
        reason: the modules that compute and read it: ``"layers.4 -> layers.5.input_layernorm"``.
    """

    value: str
    source: int
    target: int
    bytes: int
    has_gradient: bool
    reason: str


@dataclass(frozen=True)
class PlannedCommunication:
    """The communication of a step by a plan."""

    collectives: tuple[PlannedCollective, ...]
    messages: tuple[PlannedMessage, ...]


def planned_communication(explained: Explained) -> PlannedCommunication:
    """Return the communication of all stages of a plan; it is read once."""
    return explained.once("planned", lambda: _planned_communication(explained.plan, explained.planned))


def _planned_communication(plan: Plan, staged: StagedCut) -> PlannedCommunication:
    places: dict[int, tuple[CutModel, set[int]]] = {}  # id of a sharded model -> it, and the pipeline positions that have it
    for place, cut in enumerate(staged.of_places):
        places.setdefault(id(cut), (cut, set()))[1].add(place)
    every = [_Planned(plan, cut, frozenset(own)) for cut, own in places.values()]
    sharded = [planned for planned in every if planned.cut.cut.mesh.size > 1]
    collectives = tuple(collective for planned in sharded for collective in (*planned.exchanged(), *planned.summed()))
    return PlannedCommunication(collectives, tuple(message for planned in every for message in planned.sent()))


class _Planned:
    """The collectives of the stages at some pipeline positions, whose ranks have a model that is sharded alike."""

    def __init__(self, plan: Plan, cut: CutModel, places: frozenset[int]) -> None:
        self.plan, self.cut, self.graph = plan, cut, cut.graph
        self.lengths = dict(cut.layouts.mesh)
        self.nodes = {node.name: node for node in cut.graph.graph.nodes}
        self.shapes = {node: tensor_shapes(node.meta.get("val")) for node in self.nodes.values()}
        self.sizes = PartSizes(cut.graph, cut.axes, cut.layouts, cut.cut.rows, self.shapes)
        self.stages = stage_of_nodes(cut.graph, plan.first_nodes)
        self.flowing = nodes_with_gradient(cut.graph) if cut.graph.training else frozenset[str]()
        position = {name: index for index, name in enumerate(self.nodes)}
        self._firsts = [position[name] for name in plan.first_nodes[1:]]
        self._position = position
        self._stages = {index for index, stage in enumerate(plan.stages) if places.issuperset(stage.ranks)}
        own_rows = -(-plan.batch_size // math.prod(self.lengths.get(name, 1) for name in cut.cut.rows))
        self.rows = tuple(microbatch_sizes(own_rows, plan.n_microbatches))
        self.share = [1.0 if cut.graph.batch is not None else rows / own_rows for rows in self.rows]
        self.numbers = [Numbers(rows) for rows in self.rows]
        self.recomputed, self.policies = self._recomputation()
        dtypes = {name: self.nodes[name].meta["val"].dtype.itemsize for name in cut.graph.parameters}
        self.widths = {name: REDUCE_DTYPES.get(plan.reduce_dtype or "", size) / size for name, size in dtypes.items()}

    def _recomputation(self) -> tuple[frozenset[str], Mapping[str, str]]:
        """Return the nodes that the backward recomputes, and the policy of the region of each node."""
        plan, graph = self.plan, self.graph
        if plan.recompute == "none" or not self.flowing:
            return frozenset(), {}
        cost = graph_cost(graph, differentiate=True, parts=self.sizes, reading=read_graph(graph, differentiate=True))
        within = frozenset(node.name for node in graph.computing_nodes())
        selection = CheckpointSelection(graph, cost, within, cast(Recompute, plan.recompute), plan.regions, plan.recomputed)
        return selection.recomputed, selection.policy_of

    def stage_of(self, name: str) -> int:
        """Return the number of the stage that computes a node."""
        return bisect_right(self._firsts, self._position[name])

    def exchanged(self) -> Iterator[PlannedCollective]:
        """Yield the collectives of values: of each microbatch, or once a step of parameters that are gathered once."""
        layouts = self.cut.layouts
        if self.graph.training:  # ranks compute the loss of their own rows
            layouts = replace(layouts, needs={**layouts.needs, "output": self._own_rows(layouts)})
        known = (self.graph, self.cut.axes, layouts, self.sizes, self.flowing, self.widths, self.stages)
        for each in with_coalescing_counts(find_exchanges(*known), self.graph.graph, self.lengths, lambda name: (name,)):
            if (stage := self.stage_of(each.reader)) in self._stages:
                yield from self._of_exchange(each.in_stages(len(self.plan.stages)), stage)

    def _own_rows(self, layouts: Layouts) -> tuple[Layout, ...]:
        """Return the layouts of the results, of which each rank has its own rows."""
        operands = returned_values(self.graph.graph.output_node())
        have = [layouts.results[operand.name][0] for operand in operands]
        of_rows = [name in self.cut.cut.rows for name, _ in layouts.mesh]
        return tuple(
            tuple(own if is_rows else need for own, need, is_rows in zip(held, needed, of_rows, strict=True))
            for held, needed in zip(have, layouts.needs["output"], strict=True)
        )

    def _of_exchange(self, each: Exchange, stage: int) -> Iterator[PlannedCollective]:
        is_once = each.is_stored and each.dimension in GATHERED_ONCE
        is_lost = each.forward == "all_gather" and self.policies.get(each.reader, "none") != "none"
        is_read_again = is_lost or each.reader in self.recomputed
        repeats = is_read_again and not is_once and each.regather is None and each.value not in self.graph.returned
        is_scattered_once = is_once and each.dimension in SCATTERED_ONCE and each.forward == "all_gather"
        forward, backward = ("parameters of ", "gradients of ") if each.is_stored else ("result of ", "input gradient of ")
        legs = (
            (each.forward, forward, is_once, 1.0),
            (each.forward if repeats else None, forward + "recomputed ", False, 1.0),
            (each.backward, backward, is_scattered_once, each.wider),
            (each.regather, "parameters, again, of " if each.is_stored else forward, False, 1.0),
        )
        name = self._name(each)
        for kind, subject, once, wider in legs:
            if kind is not None:
                yield self._collective(each, kind, subject, name, stage, once=once, wider=wider)

    def _name(self, each: Exchange) -> str:
        """Return the parameter that is gathered; of other values the module that computes a sum, or that reads what is gathered."""
        if each.is_stored:
            return self.graph.parameters[self.cut.layouts.casts.get(each.value, each.value)]
        summed = each.value and each.forward in ("all_reduce", "reduce_scatter")
        return module_path(self.nodes[each.value if summed else each.reader])

    def _collective(
        self, each: Exchange, kind: Collective, subject: str, name: str, stage: int, *, once: bool, wider: float
    ) -> PlannedCollective:
        n_ranks = self.lengths[each.dimension]
        sizes = [numbers[each.size] * share * wider for numbers, share in zip(self.numbers, self.share, strict=True)]
        runs = sizes[:1] if once else sizes
        part = 1.0 if once else 1 / len(self.plan.stages[stage].ranks)  # ranks of a replicated stage share the microbatches
        is_small = each.is_stored and kind in ("all_gather", "reduce_scatter")
        fraction = fraction_of_message(kind, sizes[0], n_ranks, each.n_coalesced) if is_small else 1.0
        sent = sum(_sent(kind, size, n_ranks) for size in runs) * part
        return PlannedCollective(kind, each.dimension, subject, name, stage, sizes[0], sent, len(runs) * part * fraction)

    def sent(self) -> Iterator[PlannedMessage]:
        """Yield the values that stages send to ranks at other pipeline positions."""
        if len(self.plan.stages) == 1:
            return
        stages, readers = self.stages, dict[fx.Node, frozenset[int]]()
        for node in reversed(self.nodes.values()):  # through replicable nodes, which stages compute where they read them
            own = (frozenset((stages[user.name],)) if user.name in stages else readers[user] for user in node.users)
            readers[node] = frozenset[int]().union(*own)
        for node in self.nodes.values():
            source = stages.get(node.name)
            if source is None or source not in self._stages or readers[node] <= {source} or not isinstance(node.meta.get("val"), Tensor):
                continue  # not of these stages, or sent to no other
            places = {self.plan.stages[stage].ranks: stage for stage in sorted(readers[node], reverse=True)}  # the first reader at each
            places.pop(self.plan.stages[source].ranks, None)
            size = self.numbers[0][self.sizes.results(node)[0].bytes] * self.share[0]
            for target in places.values():
                reader = next(user for user in node.users if stages.get(user.name, target) == target)
                reason = f"{short_name(module_path(node))} -> {short_name(module_path(reader))}"
                yield PlannedMessage(node.name, source, target, round(size), node.name in self.flowing, reason)

    def summed(self) -> Iterator[PlannedCollective]:
        """Yield the sums of gradients of parameters, once a step, each as its fraction of a bucket."""
        sizes = {name: self.sizes.results(self.nodes[name])[0].bytes for name in self.graph.parameters if name in self.flowing}
        numbers = self.numbers[0]
        for each in find_gradient_sums(self.cut.layouts, {name: numbers[size] for name, size in sizes.items()}, self.flowing, self.widths):
            stages = {self.stage_of(user.name) for user in self.nodes[each.parameter].users if user.op == "call_function"}
            n_ranks, name = self.lengths[each.dimension], self.graph.parameters[each.parameter]
            for stage in sorted(stages & self._stages):
                known = ("all_reduce", each.dimension, "gradient of ", name, stage, each.size)
                yield PlannedCollective(*known, _sent("all_reduce", each.size, n_ranks), min(1.0, each.held / BUCKET_BYTES))


def _sent(kind: Collective, size: float, n_ranks: int) -> float:
    """Return the bytes that a rank sends in a collective of a value of ``size`` bytes, in a ring."""
    if kind == "halo_exchange":
        return size
    others = (n_ranks - 1) / n_ranks
    return others * size * (2 if kind == "all_reduce" else 1 / n_ranks if kind == "all_to_all" else 1)


def sent_by_place(plan: Plan, planned: PlannedCommunication) -> list[dict[str, int]]:
    """Return for each pipeline position, name of a function -> bytes that a rank there sends in a step."""
    sent = [defaultdict[str, float](float) for _ in range(1 + max(place for stage in plan.stages for place in stage.ranks))]
    for each in planned.collectives:
        for place in plan.stages[each.stage].ranks:
            sent[place][each.kind] += each.sent
    for message in planned.messages:
        for stage in (message.source, *([message.target] if message.has_gradient else [])):
            places = plan.stages[stage].ranks
            for place in places:
                sent[place]["send"] += plan.n_microbatches * message.bytes / len(places)
    return [{kind: round(size) for kind, size in each.items()} for each in sent]


def planned_transfers(plan: Plan, planned: PlannedCommunication) -> list[Transfer]:
    """Return one transfer for all collectives of a kind, a mesh dimension and a size, and for equal messages between stages."""
    n_ranks = [len(ranks) for ranks in ranks_at_places(plan.grid)]
    groups: dict[tuple[str, str, str, int], list[PlannedCollective]] = {}
    for each in planned.collectives:
        groups.setdefault((each.kind, each.over, each.subject, round(each.message)), []).append(each)
    messages: dict[tuple[int, bool], list[PlannedMessage]] = {}
    for message in planned.messages:
        messages.setdefault((message.bytes, message.has_gradient), []).append(message)
    sent = [transfer for alike in messages.values() for transfer in _of_messages(plan, alike, n_ranks)]
    return [*sent, *(_of_collectives(plan, alike, n_ranks) for alike in groups.values())]


def _of_collectives(plan: Plan, alike: Sequence[PlannedCollective], n_ranks: Sequence[int]) -> Transfer:
    """Return the transfer of equal collectives; ``n_ranks``: the number of ranks at each pipeline position."""
    first = alike[0]
    ranks_of = {each.stage: sum(n_ranks[place] for place in plan.stages[each.stage].ranks) for each in alike}
    times_of = {stage: sum(each.times for each in alike if each.stage == stage) for stage in ranks_of}
    members = plan.grid.length(first.over)
    n_groups = sum(n_ranks[place] for place in {place for each in alike for place in plan.stages[each.stage].ranks}) // members
    return Transfer(
        first.subject + first_few([short_name(name) for name in dict.fromkeys(each.name for each in alike)], 1),
        format_bytes(first.message),
        round(sum(each.sent * ranks_of[each.stage] for each in alike)),
        sum(math.ceil(times - _ROUNDING) * ranks_of[stage] for stage, times in times_of.items()),
        f"over {first.over}",
        f"{n_groups} group{'s' if n_groups > 1 else ''} of {members} ranks",
        f"{first.kind.replace('_', '-')}: {_WHY.get(first.subject, _REASONS[first.kind])}",
    )


def _of_messages(plan: Plan, alike: Sequence[PlannedMessage], n_ranks: Sequence[int]) -> Iterator[Transfer]:
    """Yield the transfer of values of one size, and that of their gradients."""
    count = sum(max(n_ranks[place] for place in plan.stages[each.source].ranks) for each in alike) * plan.n_microbatches
    names = first_few([each.value for each in alike], 1)
    source, target = (first_few([f"stage {getattr(each, end)}" for each in alike], 1) for end in ("source", "target"))
    message, moved, reason = format_bytes(alike[0].bytes), alike[0].bytes * count, first_few([each.reason for each in alike], 1)
    yield Transfer(names, message, moved, count, source, target, reason)
    if alike[0].has_gradient:
        yield Transfer(f"gradient of {names}", message, moved, count, target, source, reason.replace(" -> ", " <- "))


_ROUNDING = 1e-6
"""Margin for the rounding of sums of fractions."""

_REASONS: Mapping[str, str] = {
    "all_reduce": "each rank has a part of the sum",
    "reduce_scatter": "each rank needs its part of the sum",
    "all_gather": "what reads it needs it whole",
    "all_to_all": "what reads it is cut over another axis",
    "halo_exchange": "windows reach beyond the rank's own part",
}

_WHY: Mapping[str, str] = {
    "gradient of ": "parameters that these ranks share",
    "gradients of ": "each rank keeps its part",
    "parameters of ": "held in parts, needed whole",
    "parameters, again, of ": "held in parts, needed whole again for the backward",
}
"""Subject -> the reason, where it does not follow from the function."""
