"""What the programs of a step communicate, read from the programs: which value, how much, from where to where, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, fx

from partitioner.reports.communication.collectives import collective_transfers
from partitioner.reports.communication.transfer import Transfer
from partitioner.reports.module_names import rank_list, short_name
from passes.autograd.staged_model import LoweredStages
from passes.emit.communication_plan import Message
from passes.graph.provenance import module_path
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import send
from passes.ir.mesh import Mesh, ranks_at_places
from passes.ir.program import Program

__all__ = ["route", "transfers"]


def transfers(lowered: LoweredStages, programs: Sequence[Program], mesh: Mesh | None = None) -> tuple[Transfer, ...]:
    """Everything that the programs communicate: activations, gradients, results and the loss, then what collectives move.

    Args:
        lowered: the stages of the first pipeline.
        programs: of all ranks.
        mesh: of the ranks, where it has several pipelines: what these send alike is one line.
    """
    ranks_at = ranks_at_places(mesh) if mesh is not None else tuple((rank,) for rank in range(len(programs)))
    messages: dict[Message, list[fx.Node]] = {}
    for program in programs:
        for node in program.module.graph.nodes:
            if node.target is send:
                message: Message = node.meta["message"]
                messages.setdefault(_what(lowered, message), []).append(node)
    n_microbatches = 1 + max((message.microbatch or 0 for each in messages.values() for message in _messages(each)), default=0)
    position = {node.name: index for index, node in enumerate(lowered.graph.graph.nodes)}
    found = sorted(messages.items(), key=lambda item: _order(item[0], position.get(item[0].value, 0)))
    batch = programs[0].module.meta["batch_size"]
    return (
        *(_transfer(lowered, message, nodes, microbatch_sizes(batch, n_microbatches), ranks_at) for message, nodes in found),
        *collective_transfers(lowered, programs, mesh),
    )


def _order(message: Message, position: int) -> tuple[int, int, int]:
    """Activations as the graph computes them, gradients backwards, then what every rank is told."""
    kinds = {"activation": 0, "output": 1, "gradient": 2, "loss": 3}
    return kinds[message.kind], -position if message.kind == "gradient" else position, message.destination


def _messages(nodes: Sequence[fx.Node]) -> Iterator[Message]:
    return (node.meta["message"] for node in nodes)


def _what(lowered: LoweredStages, message: Message) -> Message:
    """The message without its microbatch; what every rank is told, without its destination. Replicas of a stage are as the first."""
    source, destination = (_sharing(lowered, place)[0] for place in (message.source, message.destination))
    return Message(message.kind, message.value, None, message.consumer, source, -1 if message.kind in ("loss", "output") else destination)


def _sharing(lowered: LoweredStages, place: int) -> tuple[int, ...]:
    """The places along the pipeline that are replicas of one."""
    return next(places for places in lowered.stage_ranks if place in places)


def _transfer(
    lowered: LoweredStages, message: Message, nodes: Sequence[fx.Node], rows: Sequence[int], ranks_at: Sequence[tuple[int, ...]]
) -> Transfer:
    """One line. Messages name places along the pipeline.

    Args:
        rows: of each microbatch.
        ranks_at: the ranks at each place.
    """
    sent = sum(node.meta["bytes"] for node in nodes)
    first: Message = nodes[0].meta["message"]
    sending = _ranks(lowered, message.source, ranks_at)
    told = ""
    if message.destination == -1:
        places = {each.destination for each in _messages(nodes)}
        told = rank_list(tuple(sorted(rank for place in places for rank in ranks_at[place])))
    if message.kind == "loss":
        return Transfer("loss", "one number", sent, len(nodes), rank_list(sending), told, "all ranks return it", sending)
    node = next(node for node in lowered.graph.graph.nodes if node.name == message.value)
    size = sum(rows) if first.microbatch is None else rows[first.microbatch]
    source, destination, reason = route(lowered, message, node, ranks_at)
    destination = told or destination
    name = f"gradient of {message.value}" if message.kind == "gradient" else message.value
    return Transfer(name, _shape(lowered, node, size), sent, len(nodes), source, destination, reason, sending)


def _shape(lowered: LoweredStages, node: fx.Node, rows: int) -> str:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    sizes = [size if isinstance(size, int) else size.subs(lowered.graph.batch, rows) for size in map(size_of, value.shape)]
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(str(size) for size in sizes)})"


def _ranks(lowered: LoweredStages, place: int, ranks_at: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks that stand at a place, and at its replicas."""
    return tuple(sorted(rank for each in _sharing(lowered, place) for rank in ranks_at[each]))


def route(lowered: LoweredStages, message: Message, node: fx.Node, ranks_at: Sequence[tuple[int, ...]]) -> tuple[str, str, str]:
    """From where to where a message goes, and why.

    Args:
        lowered: the stages of its pipeline.
        node: of their graph, whose value it is.
        ranks_at: the ranks at each place along the pipeline.
    """
    producer = lowered.producer(message.value)
    computed = short_name(module_path(node))
    producing = f"stage {producer}, {rank_list(_ranks(lowered, lowered.stage_ranks[producer][0], ranks_at))}"
    source = rank_list(_ranks(lowered, message.source, ranks_at))
    if message.kind == "output":
        return source, "", f"{computed} computes it, all ranks return it"
    if message.kind == "gradient":
        if message.consumer == -1:
            return source, producing, "the loss reads the result"
        reader = _reader(lowered, message.value, [message.consumer])
        return f"stage {message.consumer}, {source}", producing, f"{computed} <- {reader}"
    destination = rank_list(_ranks(lowered, message.destination, ranks_at))
    reading = [stage.index for stage in lowered.stages_of(message.destination) if message.value in stage.values]
    if not reading:
        return producing, destination, f"{computed} computes it, the model returns it"
    stages = f"stage{'s' if len(reading) > 1 else ''} {' and '.join(str(stage) for stage in reading)}"
    return producing, f"{stages}, {destination}", f"{computed} -> {_reader(lowered, message.value, reading)}"


def _reader(lowered: LoweredStages, value: str, stages: Sequence[int]) -> str:
    """The module of the first node of some stages that reads a value."""
    for index in stages:
        for node in lowered.stages[index].module.graph.nodes:
            if node.op == "call_function" and any(source.name == value for source in node.all_input_nodes):
                return short_name(module_path(node))
    return short_name("")
