"""The communication of a step, read from its programs: values, bytes, sources, destinations and reasons."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from partitioner.reports.communication.collectives import Collective, collective_transfers, collectives_of, has_collectives
from partitioner.reports.communication.transfer import Transfer
from partitioner.reports.module_names import short_name
from partitioner.reports.sources import RankClass
from passes.autograd.staged_model import SplitModel
from passes.emit.communication_plan import Message
from passes.graph.provenance import module_path
from passes.graph.symbolic_sizes import size_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import send
from passes.ir.mesh import Mesh, rank_list, ranks_at_places
from passes.verify.value_specs import describe_values


def transfers(
    lowered: SplitModel,
    classes: Sequence[RankClass],
    mesh: Mesh | None = None,
    collectives: Sequence[Sequence[Collective]] | None = None,
) -> tuple[Transfer, ...]:
    """Return everything that the programs communicate: activations, results, gradients and the loss, then the collectives.

    Args:
        lowered: the stages of the first pipeline.
        classes: the programs, by classes of equal ranks.
        mesh: the mesh, if it has several pipelines; the same message of all of them is one transfer. None: one pipeline.
        collectives: of each class; None: they are read here.
    """
    programs = [of_class.program for of_class in classes]
    if collectives is None:
        collectives = [collectives_of(lowered, describe_values(program)) if has_collectives(program) else () for program in programs]
    ranks_at = ranks_at_places(mesh) if mesh is not None else tuple((rank,) for rank in range(len(programs)))
    sends = [(node, len(of_class.ranks)) for of_class in classes for node in of_class.program.module.graph.nodes if node.target is send]
    groups: dict[Message, list[tuple[fx.Node, int]]] = {}
    for node, n_ranks in sends:
        groups.setdefault(_message_of_step(lowered, node.meta["message"]), []).append((node, n_ranks))
    n_microbatches = 1 + max((node.meta["message"].microbatch or 0 for node, _ in sends), default=0)
    position = {node.name: index for index, node in enumerate(lowered.graph.graph.nodes)}
    ordered = sorted(groups.items(), key=lambda item: _order(item[0], position.get(item[0].value, 0)))
    batch = programs[0].module.meta["batch_size"]
    messages = [
        (message.kind, _transfer(lowered, message, nodes, microbatch_sizes(batch, n_microbatches), ranks_at)) for message, nodes in ordered
    ]
    return (*_summed_up(messages), *collective_transfers(classes, collectives, mesh))


_FEW = 3
"""Messages of one kind and shape up to which each has a row."""


def _summed_up(messages: Sequence[tuple[str, Transfer]]) -> list[Transfer]:
    """Return one transfer for many messages of one kind and shape: those between equal stages."""
    alike: dict[tuple[str, str], list[Transfer]] = {}
    for kind, transfer in messages:
        alike.setdefault((kind, transfer.shape), []).append(transfer)
    return [transfer for transfers in alike.values() for transfer in (transfers if len(transfers) <= _FEW else [_sum(transfers)])]


def _sum(transfers: Sequence[Transfer]) -> Transfer:
    """Return transfers as one: ``"add_3 and 6 more"``, from ``"stage 0 and 6 more"``."""
    first, more = transfers[0], f" and {len(transfers) - 1} more"
    source, destination = (end.partition(",")[0] + more if end else "" for end in (first.source, first.destination))
    sent, times = sum(each.bytes for each in transfers), sum(each.times for each in transfers)
    return Transfer(first.value + more, first.shape, sent, times, source, destination, first.reason + more)


def _order(message: Message, position: int) -> tuple[int, int, int]:
    """Return the sort key of a message whose value has this position in the graph; gradients come in reverse order."""
    kinds = {"activation": 0, "output": 1, "gradient": 2, "loss": 3}
    return kinds[message.kind], -position if message.kind == "gradient" else position, message.destination


def _message_of_step(lowered: SplitModel, message: Message) -> Message:
    """Return the message that stands for those of all microbatches, all replicas of a stage, and all receivers (-1) of a result."""
    source, destination = _replicas(lowered, message.source)[0], _replicas(lowered, message.destination)[0]
    to_all = message.kind in ("loss", "output")
    return Message(message.kind, message.value, None, message.consumer, source, -1 if to_all else destination)


def _replicas(lowered: SplitModel, place: int) -> tuple[int, ...]:
    """Return the pipeline positions that run the same replicated stage as ``place``."""
    return next(places for places in lowered.stage_ranks if place in places)


def _transfer(
    lowered: SplitModel,
    message: Message,
    nodes: Sequence[tuple[fx.Node, int]],
    rows: Sequence[int],
    ranks_at: Sequence[tuple[int, ...]],
) -> Transfer:
    """Sum up the messages of a step with the same value and route. Messages name pipeline positions, transfers ranks.

    Args:
        message: see ``_message_of_step``.
        nodes: the sends, each with the number of ranks that it is the send of.
        rows: rows of each microbatch.
        ranks_at: the ranks at each pipeline position.
    """
    sent, times = sum(node.meta["bytes"] * n_ranks for node, n_ranks in nodes), sum(n_ranks for _, n_ranks in nodes)
    first: Message = nodes[0][0].meta["message"]
    sending = _ranks(lowered, message.source, ranks_at)
    receivers = ""
    if message.destination == -1:
        places = {node.meta["message"].destination for node, _ in nodes}
        receivers = rank_list(tuple(sorted(rank for place in places for rank in ranks_at[place])))
    if message.kind == "loss":
        return Transfer("loss", "one number", sent, times, rank_list(sending), receivers, "all ranks return it")
    node = next(node for node in lowered.graph.graph.nodes if node.name == message.value)
    size = sum(rows) if first.microbatch is None else rows[first.microbatch]
    source, destination, reason = route(lowered, message, node, ranks_at)
    name = f"gradient of {message.value}" if message.kind == "gradient" else message.value
    return Transfer(name, _shape(lowered, node, size), sent, times, source, receivers or destination, reason)


def _shape(lowered: SplitModel, node: fx.Node, rows: int) -> str:
    """Format a value as ``"float32 (2, 6, 12)"``, for a batch of ``rows`` rows."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    sizes = [size if isinstance(size, int) else size.subs(lowered.graph.batch, rows) for size in map(size_of, value.shape)]
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(str(size) for size in sizes)})"


def _ranks(lowered: SplitModel, place: int, ranks_at: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks at a pipeline position and at its replicas."""
    return tuple(sorted(rank for replica in _replicas(lowered, place) for rank in ranks_at[replica]))


def route(lowered: SplitModel, message: Message, node: fx.Node, ranks_at: Sequence[tuple[int, ...]]) -> tuple[str, str, str]:
    """Return source, destination and reason of a message: ``("stage 0, rank 0", "stage 1, rank 1", "blocks.0 -> blocks.1")``.

    Args:
        lowered: the stages of its pipeline.
        node: the node of their graph that computes the value.
        ranks_at: the ranks at each pipeline position.
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


def _reader(lowered: SplitModel, value: str, stages: Sequence[int]) -> str:
    """Return the module of the first node of these stages that reads a value."""
    for index in stages:
        for node in lowered.stages[index].module.graph.nodes:
            if node.op == "call_function" and any(source.name == value for source in node.all_input_nodes):
                return short_name(module_path(node))
    return short_name("")
