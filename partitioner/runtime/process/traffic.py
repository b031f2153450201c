"""What the programs of all ranks communicate, read from their graphs.

Every process has the programs of all ranks, so each knows without asking which channels and groups are needed, and when a message that it
sent must have arrived:

    rank 0   send h (tag 0) ──────────>                  wait dh ─> h has left: its memory may go
    rank 1                    wait h      send dh (tag 0)
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from passes.ir.comm.primitives import COLLECTIVES, COMMUNICATION, draw_alike, receive, send, wait
from passes.ir.comm.semantics import collective_arguments
from passes.ir.program import Program

__all__ = ["Traffic", "arrivals_shown", "message_name", "traffic_of"]


@dataclass(frozen=True)
class Traffic:
    """Who communicates with whom.

    Attributes:
        channels: ``(source, destination)`` of every message, sorted.
        groups: the ranks of every collective that communicates, sorted.
        name: kind and a digest of all communication of all ranks: equal exactly where programs fit together.
    """

    channels: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    name: str


@dataclass(frozen=True)
class _Message:
    """One step of a message, in one rank's program, and the name of the value there."""

    step: Literal["send", "receive"]
    peer: int
    tag: int
    value: str


def traffic_of(programs: Sequence[Program]) -> Traffic:
    """The traffic of one run of the programs of all ranks."""
    sends = {(rank, message.peer) for rank, program in enumerate(programs) for message in _messages(program) if message.step == "send"}
    groups: set[tuple[int, ...]] = set()
    digest = hashlib.sha256()
    for rank, program in enumerate(programs):
        for node in _communication(program):
            digest.update(f"{rank} {node.name} {node.args} {node.kwargs}\n".encode())
            if node.target in COLLECTIVES:
                groups.add(collective_arguments(node.target, node.args, node.kwargs)["group"])
        groups.update(node.args[1] for node in program.module.graph.nodes if node.target is draw_alike)
    kinds = sorted({program.kind for program in programs})
    communicating = sorted(group for group in groups if len(group) > 1)
    return Traffic(tuple(sorted(sends)), tuple(communicating), f"{' and '.join(kinds)} {digest.hexdigest()[:8]}")


def arrivals_shown(programs: Sequence[Program], rank: int) -> dict[int, dict[int, int]]:
    """What a message from a peer shows of the messages to it: peer -> tag -> how many of those had arrived when it was sent.

    A process group does not tell whether a send is over without waiting for it. But a rank that has waited for messages 0 to n-1 of a
    channel before it sends, says so by sending.
    """
    shown: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for peer, program in enumerate(programs):
        arrived: set[int] = set()
        count = told = 0
        for message in _messages(program):
            if message.peer != rank:
                continue
            if message.step == "receive":
                arrived.add(message.tag)
                while count in arrived:
                    count += 1
            elif count > told:
                shown[peer][message.tag] = told = count
    return dict(shown)


def message_name(program: Program, step: Literal["send", "receive"], peer: int, tag: int) -> str:
    """The name of the value that a message carries."""
    names = (message.value for message in _messages(program) if (message.step, message.peer, message.tag) == (step, peer, tag))
    return next(names, f"message {tag}")


def _messages(program: Program) -> Iterator[_Message]:
    """The messages that a rank sends, and those that it waits for, in order."""
    for node in _communication(program):
        keywords = _keywords(node)
        if node.target is send:
            yield _Message("send", keywords["destination"], keywords["tag"], node.all_input_nodes[0].name)
        elif node.target is wait and (pending := node.all_input_nodes[0]).target is receive:
            yield _Message("receive", _keywords(pending)["source"], _keywords(pending)["tag"], node.name)


def _communication(program: Program) -> Iterator[fx.Node]:
    return (node for node in program.module.graph.nodes if node.target in COMMUNICATION)


def _keywords(node: fx.Node) -> dict[str, Any]:
    return dict(node.kwargs)
