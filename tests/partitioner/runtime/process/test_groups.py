"""The process groups of a connection are closed together when a rank fails."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from partitioner.runtime.process.groups import Connection


def test_closing_nccl_groups_passes_over_those_of_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    first, last = (SimpleNamespace(abort=lambda name=name: aborted.append(name)) for name in ("first", "last"))
    connection: Any = SimpleNamespace(
        world=dist.group.WORLD, _backend="nccl", _closing=threading.Lock(), _groups={(0, 1, 2): first}, _channels={(1, 2): last}
    )
    Connection._close_groups(cast("Connection", connection))
    assert aborted == ["first", "last"]
