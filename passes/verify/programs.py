"""Prove, without running them, that the programs of all ranks fit together.

    rank 0   send(h, destination=1, tag=0)  ─────>  receive(shape, dtype, source=0, tag=0)   rank 1
                                                    wait(...)

It proves, for every batch size:

- every graph is well formed, and every stage gets the arguments that its graph takes (``passes.verify.value_specs``);
- every send has exactly one receive, with the same tag, dtype and shape;
- on each channel (a source and a destination) receives are posted in the order of sending, so a transport without tags serves as well;
- any two ranks start the collectives that both take part in in the same order: of the same kind, along the same dimensions, each giving
  the other tensors of the shapes and dtypes that it expects;
- every receive and collective that is started is waited for once;
- no call writes memory in place, except the declared writes of buffers (``passes.graph.buffer_writes``);
- the ranks cannot deadlock.

The last is decided by simulating the communication alone. A send never blocks (its receive is posted without waiting for anything), so a
rank stops only at a wait, and the result does not depend on the order in which the ranks run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from typing import Any, TypeAlias

from torch import fx

from passes.graph.buffer_writes import verify_writes
from passes.ir.comm.primitives import COLLECTIVES, receive, send, wait
from passes.ir.comm.semantics import CollectiveSpec
from passes.ir.errors import VerificationError
from passes.ir.program import Program, StageCall
from passes.ir.tensor_spec import TensorSpec
from passes.verify.value_specs import Pending, ValueSpecs, describe_values

Channel: TypeAlias = tuple[int, int]
Group: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """A node of a rank's program that communicates."""

    rank: int
    node: fx.Node

    def __str__(self) -> str:
        return f"{self.node.name} of rank {self.rank}"


@dataclass(frozen=True)
class _Message(_Step):
    """A send or a receive."""

    channel: Channel
    tag: int
    value: Any


@dataclass(frozen=True)
class _Collective(_Step):
    """One rank's part in a collective; ``number`` counts the collectives of its group."""

    number: int
    spec: CollectiveSpec


@dataclass(frozen=True)
class _Wait(_Step):
    """A wait for the receive or collective that the node ``started`` started."""

    started: fx.Node


@dataclass(frozen=True)
class _Trace:
    """The communication of one rank, in order."""

    rank: int
    specs: ValueSpecs
    steps: tuple[_Step, ...]

    def messages(self, function: object) -> Iterator[_Message]:
        return (step for step in self.steps if isinstance(step, _Message) and step.node.target is function)

    def collectives(self) -> Iterator[_Collective]:
        return (step for step in self.steps if isinstance(step, _Collective))


def verify(programs: Sequence[Program]) -> None:
    """Prove that the programs of all ranks fit together; see the module's text.

    Args:
        programs: one for each rank.

    Raises:
        VerificationError: naming the nodes and ranks that do not fit.
    """
    ranks = sorted(program.rank for program in programs)
    if ranks != list(range(len(programs))):
        raise VerificationError(f"there are programs for ranks {ranks}", remedy="pass one program for each rank, counted from 0")
    for program in programs:
        _check_writes(program)
    traces = [_trace(program, len(programs)) for program in sorted(programs, key=lambda program: program.rank)]
    for trace in traces:
        _check_waits(trace)
    sends = _check_messages(traces)
    _check_collectives(traces)
    _check_progress(traces, sends)


def _check_writes(program: Program) -> None:
    """Check the in-place writes of the program's graph and of its stages' graphs."""
    verify_writes(program.module.graph, f"emitting the program of rank {program.rank}", owns_memory=True)
    for name, module in program.module.named_children():
        if isinstance(module, StageCall):
            verify_writes(module.graph.graph, f"emitting {name} of rank {program.rank}", owns_memory=True)


def _trace(program: Program, n_ranks: int) -> _Trace:
    """Read the communication of a program; raises VerificationError for a malformed graph or a rank that does not exist."""
    try:
        program.module.graph.lint()
    except (RuntimeError, ValueError) as error:
        raise VerificationError(
            f"the graph of rank {program.rank} is not well formed: {error}", remedy="a node reads a later or a removed one"
        ) from error
    specs = describe_values(program)
    counts: defaultdict[Group, int] = defaultdict(int)
    steps: list[_Step] = []
    for node in program.module.graph.nodes:
        if node.target in (send, receive):
            steps.append(_message(program.rank, node, specs, n_ranks))
        elif node.target in COLLECTIVES:
            steps.append(_collective(program.rank, node, specs, n_ranks, counts))
        elif node.target is wait:
            steps.append(_Wait(program.rank, node, node.args[0]))
    return _Trace(program.rank, specs, tuple(steps))


def _message(rank: int, node: fx.Node, specs: ValueSpecs, n_ranks: int) -> _Message:
    """Read a send or receive; raises VerificationError if the peer does not exist or the value is not a tensor."""
    sends = node.target is send
    peer = node.kwargs["destination" if sends else "source"]
    tag = node.kwargs["tag"]
    assert isinstance(peer, int)
    assert isinstance(tag, int)
    communicated = node.args[0] if sends and isinstance(node.args[0], fx.Node) else node
    value = specs.of[communicated]
    value = value.value if isinstance(value, Pending) else value
    if not 0 <= peer < n_ranks or peer == rank:
        raise VerificationError(
            f"rank {rank}, {node.name}: there is no other rank {peer} to communicate with",
            remedy=f"ranks are 0 to {n_ranks - 1}; a value that stays on its rank is read unchanged",
        )
    if not isinstance(value, TensorSpec):
        raise VerificationError(
            f"rank {rank}, {node.name}: cannot tell what is sent: {value}", remedy="send the result of a stage, or a sum of such results"
        )
    return _Message(rank, node, (rank, peer) if sends else (peer, rank), tag, value)


def _collective(rank: int, node: fx.Node, specs: ValueSpecs, n_ranks: int, counts: defaultdict[Group, int]) -> _Collective:
    spec = specs.of[node].collective
    if not set(spec.group) <= set(range(n_ranks)):
        raise VerificationError(
            f"rank {rank}, {node.name}: the group {spec.group} has ranks that are not there", remedy=f"ranks are 0 to {n_ranks - 1}"
        )
    counts[spec.group] += 1
    return _Collective(rank, node, counts[spec.group], spec)


def _check_waits(trace: _Trace) -> None:
    """Check that every receive and collective is waited for once, and that nothing else reads it."""
    waits: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for step in trace.steps:
        if isinstance(step, _Wait):
            waits[step.started].append(step.node)
    for step in trace.steps:
        if isinstance(step, _Wait) or step.node.target is send:
            continue
        step_waits = waits[step.node]
        if not step_waits:
            raise VerificationError(f"{step} is never waited for", remedy="wait for it, even where its value is not used")
        if len(step_waits) > 1:
            names = " and ".join(node.name for node in step_waits)
            raise VerificationError(f"{step} is waited for more than once: {names}", remedy="wait once and use the value")
        others = [user.name for user in step.node.users if user not in step_waits]
        if others:
            raise VerificationError(f"{step} is read by {', '.join(others)} before it is waited for", remedy="read what wait returns")


# -- messages --------------------------------------------------------------------------------------------------------------------------


def _check_messages(traces: Sequence[_Trace]) -> dict[fx.Node, _Message]:
    """Match sends with receives by channel and tag; return the send of each receive node."""
    sends, receives = _by_channel(traces, send), _by_channel(traces, receive)
    matched: dict[fx.Node, _Message] = {}
    for channel in sorted(sends.keys() | receives.keys()):
        sent, posted = _by_tag(sends[channel]), _by_tag(receives[channel])
        for tag in sorted(sent.keys() | posted.keys()):
            if tag not in posted:
                raise VerificationError(
                    f"{sent[tag]} sends message {tag} to rank {channel[1]}, which does not receive it",
                    remedy=f"rank {channel[1]} needs one receive with source={channel[0]}, tag={tag}",
                )
            if tag not in sent:
                raise VerificationError(
                    f"{posted[tag]} waits for message {tag} of rank {channel[0]}, which does not send it",
                    remedy=f"rank {channel[0]} needs one send with destination={channel[1]}, tag={tag}",
                )
            _check_pair(traces[channel[1]].specs, sent[tag], posted[tag])
            matched[posted[tag].node] = sent[tag]
        _check_order(sends[channel], receives[channel])
    return matched


def _by_channel(traces: Sequence[_Trace], function: object) -> defaultdict[Channel, list[_Message]]:
    messages: defaultdict[Channel, list[_Message]] = defaultdict(list)
    for trace in traces:
        for message in trace.messages(function):
            messages[message.channel].append(message)
    return messages


def _by_tag(messages: Sequence[_Message]) -> dict[int, _Message]:
    """Return the messages of one channel by tag; raises VerificationError if a tag is used twice."""
    by_tag: dict[int, _Message] = {}
    for message in messages:
        if message.tag in by_tag:
            raise VerificationError(
                f"{by_tag[message.tag]} and {message.node.name} are both message {message.tag} {_between(message.channel)}",
                remedy="a tag is used once in a step between two ranks in one direction",
            )
        by_tag[message.tag] = message
    return by_tag


def _check_pair(specs: ValueSpecs, sent: _Message, posted: _Message) -> None:
    """Check that a send and its receive have the same shape and dtype."""
    if not specs.same(sent.value, posted.value):
        raise VerificationError(
            f"{sent} sends {sent.value}, but {posted} expects {posted.value}",
            remedy="a receive names the dtype and the shape of what its peer sends, in the same microbatch",
        )


def _check_order(sent: Sequence[_Message], posted: Sequence[_Message]) -> None:
    """Check that the receives of a channel are posted in the order of its sends."""
    for first, second in zip(sent, posted, strict=True):
        if first.tag != second.tag:
            raise VerificationError(
                f"{_between(first.channel)}, {first} sends message {first.tag} where {second} expects message {second.tag}",
                remedy="post the receives of a channel in the order of its sends: not every transport has tags",
            )


def _between(channel: Channel) -> str:
    return f"from rank {channel[0]} to rank {channel[1]}"


# -- collectives -----------------------------------------------------------------------------------------------------------------------


def _check_collectives(traces: Sequence[_Trace]) -> None:
    """Check that any two ranks agree on their common collectives. Pairs are compared only after a mismatch, to locate it."""
    if _groups_agree(traces):
        return
    for left, right in combinations(traces, 2):
        both = {left.rank, right.rank}
        pairs = zip_longest(
            (step for step in left.collectives() if both <= set(step.spec.group)),
            (step for step in right.collectives() if both <= set(step.spec.group)),
        )
        for first, second in pairs:
            if first is None or second is None:
                started, absent = (first, right) if second is None else (second, left)
                raise VerificationError(
                    f"{started} goes between ranks {_listed(started.spec.group)}, but rank {absent.rank} takes no part in it",
                    remedy="every rank of a group starts the same collectives",
                )
            _check_partners(left.specs, first, second)


def _groups_agree(traces: Sequence[_Trace]) -> bool:
    """Return whether any two ranks agree, without comparing every two: the ranks of each group, and the order of any two groups.

    Two ranks start their common groups in the same order if, for any two groups, they agree when all other groups are removed.
    """
    collectives: defaultdict[Group, dict[int, list[_Collective]]] = defaultdict(dict)
    orders: dict[frozenset[Group], list[Group]] = {}
    unique_specs: dict[TensorSpec, TensorSpec] = {}
    for trace in traces:
        steps = list(trace.collectives())
        for step in steps:
            collectives[step.spec.group].setdefault(trace.rank, []).append(step)
        for two_groups in combinations(dict.fromkeys(step.spec.group for step in steps), 2):
            order = [step.spec.group for step in steps if step.spec.group in two_groups]
            if orders.setdefault(frozenset(two_groups), order) != order:
                return False
    for group, steps_of_rank in collectives.items():
        if len(steps_of_rank) != len(group) or len({len(steps) for steps in steps_of_rank.values()}) > 1:
            return False
        for parts in zip(*(steps_of_rank[rank] for rank in group), strict=True):
            if not _parts_agree(traces[group[0]].specs, parts, unique_specs):
                return False
    return True


def _parts_agree(specs: ValueSpecs, parts: Sequence[_Collective], unique_specs: dict[TensorSpec, TensorSpec]) -> bool:
    """Return whether all ranks of a group start a collective of the same kind, and each gives the tensors that the others expect.

    Args:
        parts: of the ranks, in the order of the group.
        unique_specs: spec -> the first equal object, so that tuples compare by identity.
    """
    if len({(part.spec.signature, len(part.spec.given)) for part in parts}) > 1:
        return False
    for index in range(len(parts[0].spec.given)):
        given_to_ranks = zip(*(_deduplicated(part.spec.given[index], unique_specs) for part in parts), strict=True)
        for part, given in zip(parts, given_to_ranks, strict=True):
            expected = _deduplicated(part.spec.expected[index], unique_specs)
            if given != expected and not all(map(specs.same, given, expected)):
                return False
    return True


def _deduplicated(tensors: Sequence[TensorSpec], unique_specs: dict[TensorSpec, TensorSpec]) -> tuple[TensorSpec, ...]:
    """Replace each spec by the first equal object; hashes each object once, since a sequence often repeats one."""
    by_id = {id(spec): spec for spec in tensors}
    first_equal = {key: unique_specs.setdefault(spec, spec) for key, spec in by_id.items()}
    return tuple(first_equal[id(spec)] for spec in tensors)


def _check_partners(specs: ValueSpecs, first: _Collective, second: _Collective) -> None:
    """Check that two ranks' parts in one collective are of the same kind, and that each gives the tensors that the other expects."""
    if first.spec.group != second.spec.group:
        raise VerificationError(
            f"{first} goes between ranks {_listed(first.spec.group)} where {second} goes between ranks {_listed(second.spec.group)}",
            remedy="ranks that share groups start their collectives in the same order",
        )
    if first.spec.signature != second.spec.signature:
        raise VerificationError(
            f"{first} is {first.spec.signature} where {second} is {second.spec.signature}",
            remedy="every rank of a group starts the same collectives, in the same order",
        )
    if len(first.spec.given) != len(second.spec.given):
        raise VerificationError(
            f"{first} has {len(first.spec.given)} tensors where {second} has {len(second.spec.given)}",
            remedy="every rank of a group gives as many tensors, in the same order",
        )
    for giver, taker in ((first, second), (second, first)):
        taker_index, giver_index = giver.spec.group.index(taker.rank), giver.spec.group.index(giver.rank)
        for index, (given, expected) in enumerate(zip(giver.spec.given, taker.spec.expected, strict=True)):
            if not specs.same(given[taker_index], expected[giver_index]):
                raise VerificationError(
                    f"{giver} gives {given[taker_index]} as tensor {index} where {taker} expects {expected[giver_index]}",
                    remedy="every rank of a group gives tensors of the shapes and dtypes that the others' sizes say",
                )


def _listed(group: Group) -> str:
    return ", ".join(str(rank) for rank in group)


def _check_progress(traces: Sequence[_Trace], sends: Mapping[fx.Node, _Message]) -> None:
    """Simulate the communication of all ranks until all are done or none can go on.

    A receive completes once its send has started, a collective once all its ranks have started their parts.
    """
    missing: dict[fx.Node, dict[fx.Node, None]] = {}  # started node -> the nodes that must start before it completes
    waited_on: dict[fx.Node, dict[fx.Node, None]] = {}  # node -> the entry of ``missing`` that it is in
    for received, message in sends.items():
        missing[received] = waited_on[message.node] = {message.node: None}
    for parts in _parts_by_collective(traces):
        nodes = {part.node: None for part in parts}
        for node in nodes:
            missing[node] = waited_on[node] = nodes
    position = [0] * len(traces)
    advanced = True
    while advanced:
        advanced = False
        for trace in traces:
            while position[trace.rank] < len(trace.steps):
                step = trace.steps[position[trace.rank]]
                if isinstance(step, _Wait) and missing[step.started]:
                    break
                if step.node in waited_on:
                    del waited_on[step.node][step.node]
                position[trace.rank] += 1
                advanced = True
    blocked = {trace.rank: trace.steps[position[trace.rank]] for trace in traces if position[trace.rank] < len(trace.steps)}
    if blocked:
        rank_of = {step.node: trace.rank for trace in traces for step in trace.steps}
        waits = [(rank, step) for rank, step in blocked.items() if isinstance(step, _Wait)]
        raise _deadlock({rank: (step.node, next(iter(missing[step.started]))) for rank, step in waits}, rank_of)


def _parts_by_collective(traces: Sequence[_Trace]) -> list[list[_Collective]]:
    """Return for each collective the parts of all its ranks."""
    groups: defaultdict[tuple[Group, int], list[_Collective]] = defaultdict(list)
    for trace in traces:
        for step in trace.collectives():
            groups[step.spec.group, step.number].append(step)
    return list(groups.values())


def _deadlock(waiting: Mapping[int, tuple[fx.Node, fx.Node]], rank_of: Mapping[fx.Node, int]) -> VerificationError:
    """Return the error that lists a cycle of blocked ranks: follow each to the rank that it waits for, until one repeats.

    Args:
        waiting: blocked rank -> its wait node, and the node of another rank that it waits for.
    """
    path: list[int] = []
    rank = min(waiting)
    while rank not in path:
        path.append(rank)
        rank = rank_of[waiting[rank][1]]
    lines = []
    for blocked in path[path.index(rank) :]:
        wait_node, missing = waiting[blocked]
        lines.append(f"  rank {blocked} waits at {wait_node.name} for {missing.name} of rank {rank_of[missing]}")
    return VerificationError(
        "the ranks wait for each other in a circle\n" + "\n".join(lines),
        remedy="order each rank's actions so that a send never comes after the wait that depends on it",
    )
