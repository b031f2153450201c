"""Exchange JSON lines between two processes over a TCP connection that notices when the other side dies."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import Any

_ANSWER = 3.0
"""Seconds that the other side may take to accept and identify itself."""

_ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation, so that its route is the default route."""

_PROBES = 4
"""Number of unanswered keepalive probes after which a connection ends."""


class Channel:
    """One end of a connection.

    Args:
        connected: the socket.
        silence: seconds without an answer of the other machine after which the connection ends.
    """

    def __init__(self, connected: socket.socket, silence: float) -> None:
        self.socket = connected
        self.rank = -1  # of the other side, when it is known
        self._sending = threading.Lock()
        self._incomplete_line = b""
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _keep_alive(connected, silence)
        _close_in_children(connected)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; errors are ignored here, and raised by ``receive``."""
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Wait for data; return the complete messages in it.

        Raises:
            EOFError: the other side has closed the connection.
            OSError: the connection is broken.
        """
        data = self.socket.recv(2**16)
        if not data:
            raise EOFError
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def shut_down(self) -> None:
        """End the connection, so that ``receive`` raises at both ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def connect(address: str, port: int, hello: Mapping[str, Any], silence: float) -> Channel:
    """Connect, send ``hello``, and check that the other side answers with its token.

    Raises:
        OSError: no process answers, or another one.
    """
    connected = socket.create_connection((address, port), timeout=_ANSWER)
    channel = Channel(connected, silence)
    channel.send(hello)
    if not _is_welcome(connected, hello["token"]):
        channel.close()
        raise ConnectionAbortedError(f"{address}:{port} belongs to another job")
    connected.settimeout(None)
    return channel


def _is_welcome(connected: socket.socket, token: str) -> bool:
    """Return whether the peer answers with the token, as rank 0 does."""
    connected.settimeout(_ANSWER)
    expected = json.dumps({"welcome": token}).encode() + b"\n"
    line = b""
    with contextlib.suppress(OSError):
        while expected.startswith(line) and line != expected:  # byte by byte: later messages are left to ``receive``
            byte = connected.recv(1)
            if not byte:
                return False
            line += byte
    return line == expected


def local_addresses(near: str | None) -> list[str]:
    """Return the addresses of this machine; first that of the route to ``near``, then that of the default route."""
    addresses: list[str] = []
    for host in (near, _ELSEWHERE):
        with contextlib.suppress(OSError):
            if host is None:
                continue
            family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                addresses.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        addresses += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys([*addresses, "127.0.0.1"]))


def _keep_alive(connected: socket.socket, silence: float) -> None:
    """Let the kernel probe whether the other machine answers, which needs no action of the process there."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, int(silence / (_PROBES + 1)))
    options = {"TCP_KEEPIDLE": pause, "TCP_KEEPINTVL": pause, "TCP_KEEPCNT": _PROBES, "TCP_USER_TIMEOUT": int(1000 * silence)}
    for name, value in options.items():
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_children(connected: socket.socket) -> None:
    """Close the socket in forked children (workers of a data loader), which would keep it open after the death of this process."""
    if not _open and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)
    _open.add(connected)


def _close_all() -> None:
    for connected in list(_open):
        connected.close()
