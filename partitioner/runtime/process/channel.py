"""Lines of JSON between two processes, over a TCP connection that notices when the other side is gone."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import Any

__all__ = ["Channel", "connect", "local_addresses"]

_ANSWER = 3.0
"""Seconds that the other side may take to answer at first."""

_ELSEWHERE = "192.0.2.1"
"""An address that is no machine's: the way there is the default route."""

_PROBES = 4
"""How many keepalive probes stay without an answer before a connection ends."""


class Channel:
    """One end of a connection.

    Args:
        connected: the socket.
        silence: seconds without an answer of the other machine after which the connection ends.
    """

    def __init__(self, connected: socket.socket, silence: float) -> None:
        self.socket = connected
        self.rank = -1
        self._sending = threading.Lock()
        self._rest = b""
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connected, silence)
        _close_in_children(connected)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; that the other side is gone is noticed by who receives."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Wait for messages.

        Raises:
            EOFError: the other side has closed the connection.
            OSError: it is gone.
        """
        found = self.socket.recv(2**16)
        if not found:
            raise EOFError
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def shut_down(self) -> None:
        """End the connection; who receives on it, at either end, hears of that."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket."""
        self.socket.close()


def connect(address: str, port: int, hello: Mapping[str, Any], silence: float) -> Channel:
    """Connect, and say who this is; the other side shows that it is who is meant.

    Raises:
        OSError: nobody answers, or somebody else.
    """
    connected = socket.create_connection((address, port), timeout=_ANSWER)
    channel = Channel(connected, silence)
    channel.send(hello)
    if not _is_welcome(connected, hello["token"]):
        channel.close()
        raise ConnectionAbortedError(f"{address}:{port} is somebody else")
    connected.settimeout(None)
    return channel


def _is_welcome(connected: socket.socket, token: str) -> bool:
    """Whether the other side answers as rank 0 does."""
    connected.settimeout(_ANSWER)
    wanted = json.dumps({"welcome": token}).encode() + b"\n"
    line = b""
    with contextlib.suppress(OSError):
        while wanted.startswith(line) and line != wanted:  # byte by byte: what comes behind it is for the reader
            byte = connected.recv(1)
            if not byte:
                return False
            line += byte
    return line == wanted


def local_addresses(near: str | None) -> list[str]:
    """The addresses of this machine, the one by which it reaches a host first."""
    found: list[str] = []
    for host in (near, _ELSEWHERE):
        with contextlib.suppress(OSError):
            if host is None:
                continue
            family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _keep_alive(connected: socket.socket, silence: float) -> None:
    """Have the kernel look whether the other machine answers; the process there need not do anything for it."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, int(silence / (_PROBES + 1)))
    options = {"TCP_KEEPIDLE": pause, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": _PROBES, "TCP_USER_TIMEOUT": int(1000 * silence)}
    for name, value in options.items():
        option = getattr(socket, name, None)  # which of them there are depends on the system
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_children(connected: socket.socket) -> None:
    """A forked child (a worker of a loader) must not hold the connection open when this process is gone."""
    if not _open and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)
    _open.add(connected)


def _close_all() -> None:
    for connected in list(_open):
        connected.close()
