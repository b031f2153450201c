"""The text of errors: problem, place, call of a framework, remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from passes.ir.errors import ConfigError, Place


def of_package(name: str, inner: Callable[[], None]) -> Callable[[], None]:
    """Return a function of a module of some package, that calls another one."""
    space = {"__name__": f"{name}.module", "inner": inner}
    exec("class Trainer:\n    def fit(self):\n        inner()\n", space)  # noqa: S102
    trainer = space["Trainer"]
    assert isinstance(trainer, type)
    fit: Callable[[], None] = trainer().fit
    return fit


def fails() -> None:
    raise ConfigError("a problem", place=Place(module="up"), remedy="another one")


def text_of(call: Callable[[], None]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value).splitlines()


def test_the_call_of_a_framework_is_named() -> None:
    """The one that the script makes: frameworks call each other, torch, and this package."""
    calls = of_package("lightning", of_package("torch", of_package("accelerate", of_package("partitioner", fails))))
    problem, where, during, remedy = text_of(calls)
    assert [problem, where, remedy] == ["a problem", "  where: module up", "  remedy: another one"]
    assert during.startswith("  during: Trainer.fit of lightning, called at ")
    assert __file__ in during


@pytest.mark.parametrize(
    "call", [fails, of_package("torch", fails), of_package("partitioner", of_package("torch", of_package("transformers", fails)))]
)
def test_outside_of_frameworks_there_is_no_such_call(call: Callable[[], None]) -> None:
    """The forward of a model of transformers that this package traces is none."""
    assert len(text_of(call)) == 3
