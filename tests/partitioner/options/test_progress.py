"""The line that shows progress: on a terminal alone, one line, gone at the end."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from partitioner import PartitionedModel, partition
from partitioner.options.progress import Progress
from passes.ir.errors import ConfigError, TraceError

CLEAR = "\r\x1b[2K"


@dataclass
class Screen:
    """Output to a terminal."""

    text: str = ""

    @property
    def lines(self) -> list[str]:
        """Successive contents of the line."""
        assert self.text == "" or self.text.startswith(CLEAR)
        return self.text.split(CLEAR)[1:]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """Yield a real terminal as the error stream."""
    screen = Screen()
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as stream:
        assert stream.isatty()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            try:
                yield screen
            finally:
                stream.write("\n")  # the end of what is read: a terminal gives what was written in pieces of its own
                stream.flush()
                found = b""
                while not found.endswith(b"\r\n"):
                    found += os.read(master, 65536)
                screen.text = found.decode().removesuffix("\r\n")
    os.close(master)


def two_steps(show: bool | None) -> None:
    progress = Progress("work", 2, show)
    with progress.step("first"):
        pass
    with progress.step("second"):
        pass


SHOWN = ["work  [--]  1/2  first", "", "work  [#-]  2/2  second", ""]


@pytest.mark.parametrize("show", [None, True])
def test_a_terminal_shows_each_step_and_then_nothing(show: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        two_steps(show)
    assert screen.lines == SHOWN
    assert "\n" not in screen.text


def test_a_step_is_shown_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("work", 3, show=True).step("first"):
        assert stream.getvalue() == f"{CLEAR}work  [---]  1/3  first"


def test_the_line_goes_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen, pytest.raises(KeyError, match="inside"), Progress("work", 2, show=None).step("first"):
        raise KeyError("inside")
    assert screen.lines == SHOWN[:2]


@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_written_where_there_is_no_terminal(show: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
    two_steps(show)
    assert capfd.readouterr() == ("", "")


def test_nothing_is_written_when_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        two_steps(show=False)
    assert screen.text == ""


def test_it_can_be_asked_for_where_there_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    two_steps(show=True)
    assert capfd.readouterr() == ("", "".join(CLEAR + line for line in SHOWN))


# -- of partition ----------------------------------------------------------------------------------------------------------------------


def partitioned(**arguments: Any) -> PartitionedModel:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return partition(model, devices=2, mode="pipeline", example_inputs=(torch.zeros(4, 4),), **arguments)


def test_partition_shows_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        plan = partitioned().plan
    steps = ["partition  [---]  1/3  tracing", "partition  [#--]  2/3  planning", "partition  [##-]  3/3  lowering"]
    assert [line for line in screen.lines if line.startswith("partition")] == steps
    assert screen.lines[-1] == ""
    with terminal(monkeypatch) as screen:
        partitioned(plan=plan)
    assert [line for line in screen.lines if line.startswith("partition")] == [
        "partition  [--]  1/2  tracing",
        "partition  [#-]  2/2  lowering",
    ]


def test_lowering_shows_its_phases_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        pm = partitioned(cluster="h100:1x2")
        pm.simulate()
    assert "lowering  [#######-----]  8/12  differentiate" in screen.lines
    assert screen.lines[-1] == ""
    with terminal(monkeypatch) as screen:
        pm.simulate()
    assert screen.text == ""


def test_partition_is_silent_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    partitioned()
    assert capfd.readouterr() == ("", "")


def test_a_failed_partition_leaves_a_clean_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with terminal(monkeypatch) as screen, pytest.raises(TraceError):
        partition(Branches(4, 4), devices=1, example_inputs=(torch.zeros(4, 4),))
    assert screen.lines == ["partition  [---]  1/3  tracing", ""]
    with terminal(monkeypatch) as screen, pytest.raises(ConfigError):
        partitioned(schedule="ZBV", n_microbatches=0)
    assert not any(screen.lines)  # refused before anything is traced
