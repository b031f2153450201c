"""Read from the graphs of all programs which messages and collectives they communicate.

Every process has the programs of all ranks, so each knows which channels and groups are needed, and when a message that it sent must have
arrived:

    rank 0   send h (tag 0) ──────────>                  wait dh ─> h has arrived: its memory can be freed
    rank 1                    wait h      send dh (tag 0)
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from passes.ir.comm.primitives import COLLECTIVES, COMMUNICATION, receive, send, share_random_state, wait
from passes.ir.comm.semantics import collective_arguments
from passes.ir.program import Program


@dataclass(frozen=True)
class Traffic:
    """The channels and groups of one run.

    Attributes:
        channels: ``(source, destination)`` pairs with messages, sorted.
        groups: the ranks of each group of two or more that has collectives, sorted.
        name: kinds of the programs and a digest of the communication of all ranks, equal on ranks whose programs match.
    """

    channels: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    name: str


@dataclass(frozen=True)
class _Message:
    """One send, or wait for a receive, in a rank's program; ``value`` is the name of the carried value there."""

    step: Literal["send", "receive"]
    peer: int
    tag: int
    value: str


def traffic_of(programs: Sequence[Program]) -> Traffic:
    """Return the traffic of one run of the programs of all ranks."""
    channels = {(rank, message.peer) for rank, program in enumerate(programs) for message in _messages(program) if message.step == "send"}
    groups: set[tuple[int, ...]] = set()
    digest = hashlib.sha256()
    for rank, program in enumerate(programs):
        for node in _communication(program):
            digest.update(f"{rank} {node.name} {node.args} {node.kwargs}\n".encode())
            if node.target in COLLECTIVES:
                groups.add(collective_arguments(node.target, node.args, node.kwargs)["group"])
    kinds = sorted({program.kind for program in programs})
    communicating = sorted(group for group in groups if len(group) > 1)
    return Traffic(tuple(sorted(channels)), tuple(communicating), f"{' and '.join(kinds)} {digest.hexdigest()[:8]}")


def arrivals_shown(programs: Sequence[Program], rank: int) -> dict[int, dict[int, int]]:
    """Return the arrivals that messages of a peer prove: peer -> tag of its message -> number of messages that it had received by then.

    A process group cannot detect the end of a send without waiting. But a peer that waits for messages 0 to n-1 before it sends one
    proves by that message that they have arrived.
    """
    shown: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for peer, program in enumerate(programs):
        arrived: set[int] = set()
        count = proven = 0  # of messages to the peer: arrived in order, and proven by earlier messages
        for message in _messages(program):
            if message.peer != rank:
                continue
            if message.step == "receive":
                arrived.add(message.tag)
                while count in arrived:
                    count += 1
            elif count > proven:
                shown[peer][message.tag] = proven = count
    return dict(shown)


def message_name(program: Program, step: Literal["send", "receive"], peer: int, tag: int) -> str:
    """Return the name of the value that a message carries, ``message <tag>`` if the program has no such message."""
    names = (message.value for message in _messages(program) if (message.step, message.peer, message.tag) == (step, peer, tag))
    return next(names, f"message {tag}")


def _messages(program: Program) -> Iterator[_Message]:
    """Yield the sends, and the waits for receives, of a rank in program order."""
    for node in _communication(program):
        keywords = _keywords(node)
        if node.target is send:
            yield _Message("send", keywords["destination"], keywords["tag"], node.all_input_nodes[0].name)
        elif node.target is wait and node.all_input_nodes[0].target is receive:
            keywords = _keywords(node.all_input_nodes[0])
            yield _Message("receive", keywords["source"], keywords["tag"], node.name)


def _communication(program: Program) -> Iterator[fx.Node]:
    return (node for node in program.module.graph.nodes if node.target in COMMUNICATION or node.target is share_random_state)


def _keywords(node: fx.Node) -> dict[str, Any]:
    return dict(node.kwargs)
