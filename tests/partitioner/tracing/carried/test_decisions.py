"""A forward that computes by what is neither a tensor nor an argument is refused by name, or passes where nothing follows from it."""

# A module returns Any when it is called.
# mypy: no-warn-return-any
# ruff: noqa: DTZ005, NPY002  what models call

from __future__ import annotations

import datetime as dt
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partitioner import partition
from passes.ir.errors import ConfigError, TraceError
from tests.support.running.slow_values import slow

STEP = 0
RNG = random.Random(3)
SETTINGS = {"scale": 1.0}
SCALES = [1.0]


class Schedule:
    """Of a temperature, as a training loop steps it."""

    warm = True

    def __init__(self) -> None:
        self.steps = 0
        self.kind: str | None = None

    def value(self) -> float:
        return 1.0 + self.steps


class Model(nn.Module):
    """Asks a source, and computes with the answer or not.

    Args:
        ask: returns a number of the source; it differs from call to call, or between states of the program.
        use: ``"branch"``, ``"factor"`` or ``"log"``.
    """

    def __init__(self, ask: Callable[[Model], Any], use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.ask, self.use = ask, use
        self.python, self.numpy, self.schedule = random.Random(1), np.random.default_rng(1), Schedule()
        self.temperature, self.seen = 1.0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        answer = self.ask(self)
        if self.use == "branch" and answer > 1.0:
            return x
        if self.use == "factor":
            x = x * answer
        if self.use == "log":
            self.seen[0] = float(answer)
        return self.second(x)


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def partitioned(model: nn.Module) -> Any:
    return partition(model, 2, "model", example_inputs=(X,), progress=False)


def fast_clock(_: Model) -> float:
    return time.perf_counter_ns() // 1000 % 2 * 2.0


DRAWS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "random": (lambda model: random.random() * 1.1, "random"),
    "rare": (lambda model: random.random() + 0.999, "random"),
    "integers": (lambda model: random.randint(0, 9), "random"),
    "normal": (lambda model: random.gauss(1.0, 1.0), "random"),
    "held": (lambda model: model.python.random() * 2, "a random.Random"),
    "global": (lambda model: RNG.random() * 2, "a random.Random"),
    "numpy": (lambda model: np.random.rand() * 1.1, "numpy.random"),
    "numpy_held": (lambda model: model.numpy.random() * 2, "a numpy.random.Generator"),
    "permutation": (lambda model: float(np.random.permutation(4)[0]), "numpy.random"),
    "clock": (fast_clock, "time.perf_counter_ns()"),
    "date": (lambda model: dt.datetime.now().microsecond % 2 * 2.0, "datetime.datetime.now()"),
    "system": (lambda model: os.urandom(1)[0] / 128, "os.urandom()"),
    "secrets": (lambda model: float(secrets.randbelow(4)), "os.urandom()"),
    "uuid": (lambda model: uuid.uuid4().int % 4, "os.urandom()"),
}
"""Name -> what a forward asks, and how the error calls it."""


@pytest.mark.parametrize(
    ("source", "use"),
    [
        *(pytest.param(source, "branch", marks=() if source in ("numpy_held", "clock") else pytest.mark.slow) for source in DRAWS),
        *(pytest.param(source, "factor", marks=() if source == "permutation" else pytest.mark.slow) for source in DRAWS),
    ],
)
def test_draws_and_clocks_that_decide_are_refused_by_name(source: str, use: str) -> None:
    ask, name = DRAWS[source]
    with pytest.raises(TraceError) as raised:
        partitioned(Model(ask, use).double())
    assert f"lets {name} decide" in str(raised.value)
    assert f"{__file__}:" in str(raised.value)


@pytest.mark.parametrize("source", [pytest.param(each, marks=() if each == "numpy" else pytest.mark.slow) for each in DRAWS])
def test_draws_and_clocks_of_which_nothing_follows_pass(source: str) -> None:
    model = Model(DRAWS[source][0], "log").double()
    torch.testing.assert_close(partitioned(model)(X), model(X))


def test_generators_are_left_as_they_were() -> None:
    def ask(own: Model) -> float:
        return float(random.random() + np.random.rand() + own.python.random() + own.numpy.random() + RNG.random())

    model = Model(ask, "log").double()

    def states() -> list[Any]:
        return [random.getstate(), str(np.random.get_state()), model.python.getstate(), model.numpy.bit_generator.state, RNG.getstate()]

    before = states()
    partitioned(model)
    assert states() == before


def step_twice() -> Callable[[Model], Any]:
    offset = 0.0

    def ask(_: Model) -> float:
        return offset

    def change() -> None:
        nonlocal offset
        offset = 2.0

    ask.change = change  # type: ignore[attr-defined]
    return ask


def set_step(value: int) -> None:
    globals()["STEP"] = value


CLOSURE = step_twice()
STATES: dict[str, tuple[Callable[[Model], Any], Callable[[Model], object], str]] = {
    "global": (lambda model: STEP, lambda model: set_step(2), "STEP of the module"),
    "setting": (lambda model: SETTINGS["scale"], lambda model: SETTINGS.update(scale=2.0), "scale of SETTINGS"),
    "list": (lambda model: SCALES[0], lambda model: SCALES.__setitem__(0, 2.0), "the content of SCALES"),
    "attribute": (lambda model: model.temperature, lambda model: setattr(model, "temperature", 2.0), "temperature of the model"),
    "object": (lambda model: model.schedule.value(), lambda model: setattr(model.schedule, "steps", 2), "steps of schedule"),
    "class": (lambda model: 2.0 if Schedule.warm else 1.0, lambda model: setattr(Schedule, "warm", False), "warm of Schedule"),
    "closure": (CLOSURE, lambda model: CLOSURE.change(), "offset of step_twice.<locals>.ask"),  # type: ignore[attr-defined]
    "environment": (
        lambda model: 2.0 if os.environ.get("DECIDES_IN_TEST") else 1.0,
        lambda model: os.environ.update(DECIDES_IN_TEST="1"),
        "DECIDES_IN_TEST of os.environ",
    ),
}
"""Name -> what a forward reads, how a loop changes it, and how the error calls it."""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECIDES_IN_TEST", raising=False)
    monkeypatch.setitem(SETTINGS, "scale", 1.0)
    SCALES[0] = 1.0
    monkeypatch.setattr(Schedule, "warm", True)
    monkeypatch.setitem(globals(), "STEP", 0)


@pytest.mark.parametrize("state", [pytest.param(each, marks=() if each == "global" else pytest.mark.slow) for each in STATES])
def test_state_of_the_program_that_changes_is_refused_by_name(state: str) -> None:
    ask, change, name = STATES[state]
    model = AsksWithoutAttribute(ask)
    pm = partitioned(model)
    torch.testing.assert_close(pm(X), model(X))
    change(model)
    with pytest.raises(ConfigError) as raised:
        pm(X)
    assert name in str(raised.value)
    with pytest.raises(ConfigError):
        pm.train_step(X, target=X, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(partitioned(model)(X), model(X))


class AsksWithoutAttribute(Model):
    """Calls its source as a factor."""

    def __init__(self, ask: Callable[[Model], Any]) -> None:
        super().__init__(ask, "factor")
        self.double()


def test_state_of_which_nothing_follows_may_change() -> None:
    printed: list[int] = []

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()

        def forward(self, x: Tensor) -> Tensor:
            if STEP % 2 == 0:
                printed.append(STEP)
            return self.layer(x)

    model = Logs()
    pm = partitioned(model)
    for step in range(3):
        set_step(step)
        torch.testing.assert_close(pm(X), model(X))


def test_state_that_forward_changes_itself() -> None:
    class Counts(nn.Module):
        def __init__(self, *, uses: bool) -> None:
            super().__init__()
            self.layer, self.uses = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), uses

        def forward(self, x: Tensor) -> Tensor:
            global STEP  # noqa: PLW0603
            STEP += 1
            return self.layer(x) * (STEP if self.uses else 1)

    with pytest.raises(TraceError, match="changes STEP of the module"):
        partitioned(Counts(uses=True))
    assert STEP == 0
    model = Counts(uses=False)
    torch.testing.assert_close(partitioned(model)(X), model(X))


def test_items_of_lists_that_forward_changes_itself() -> None:
    class Counts(Model):
        def forward(self, x: Tensor) -> Tensor:
            SCALES[0] += 1
            return torch.as_tensor(self.first(x) * SCALES[0])

    with pytest.raises(TraceError, match="changes the content of SCALES"):
        partitioned(Counts(lambda _: 1.0, "factor").double())
    assert SCALES == [1.0]


class Problem(Model):
    """Writes its kind into a setting at its first call, by the type of its input, as models of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        if self.schedule.kind is None:
            self.schedule.kind = "regression" if x.dtype.is_floating_point and x.device.type in ("cpu", "meta") else "classes"
        return self.second(self.first(x)) if self.schedule.kind == "regression" else x


def test_a_setting_that_the_first_call_writes() -> None:
    model = Problem(lambda _: 0.0, "log").double()
    pm = partitioned(model)
    expected = model(X)
    assert model.schedule.kind == "regression"
    torch.testing.assert_close(pm(X), expected)


class LayerDrop(nn.Module):
    """Drops layers as encoders of transformers do."""

    def __init__(self, drop: float, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(4))
        self.drop, self.draw = drop, draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and self.draw() < self.drop:
                continue
            x = torch.relu(layer(x))
        return x


@pytest.mark.parametrize("draw", [*slow(random.random), np.random.rand, lambda: torch.rand([]), *slow(lambda: torch.rand(()).item())])
def test_layer_drop(draw: Callable[[], Any]) -> None:
    with pytest.raises(TraceError):
        partitioned(LayerDrop(0.05, draw))
    model = LayerDrop(0.05, draw).eval()
    torch.testing.assert_close(partitioned(model)(X), model(X))
    if getattr(draw, "__name__", "") != "<lambda>":
        model = LayerDrop(0.0, draw)
        torch.testing.assert_close(partitioned(model)(X), model(X))
