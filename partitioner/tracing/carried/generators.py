"""Generators of random numbers outside of torch: find those that a model can draw from, keep their states, and set others.

    state words 0, 0, ...            random.random() gives 0.0
    state words that temper to ones  random.random() gives almost 1.0

Both are states of a Mersenne Twister for the first draws; later ones are ordinary, so that a loop that waits for a number ends.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

_WORDS, _EXTREME = 624, 400
"""Words of the state of a Mersenne Twister, and how many of them are set for extreme draws."""


@dataclass(frozen=True)
class Generator:
    """A generator outside of torch.

    Attributes:
        name: for messages.
        get: returns its state, which compares by value.
        set: sets one that ``get`` returned.
        others: states with which decisions come out otherwise.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    others: Sequence[Any]


def generators_of(model: nn.Module, held: Iterable[object] = ()) -> list[Generator]:
    """Return the generators of ``random`` and numpy that programs share, and those that a model holds in attributes.

    Args:
        held: further objects that may be generators.
    """
    objects = [value for module in model.modules() for value in vars(module).values()]
    inner = [each for value in objects if isinstance(value, list | tuple) for each in value]
    inner += [each for value in objects if isinstance(value, dict) for each in value.values()]
    inner += [each for value in objects if not isinstance(value, nn.Module) for each in getattr(value, "__dict__", {}).values()]
    found = [_of_python("random", random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        found.append(_of_numpy("numpy.random", numpy, numpy.mtrand._rand))  # noqa: SLF001  what its functions draw from
    for value in {id(each): each for each in (*objects, *inner, *held)}.values():
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            found.append(_of_python("a random.Random", value.getstate, value.setstate))
        elif numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState) and value is not numpy.mtrand._rand:  # noqa: SLF001
            found.append(_of_numpy(f"a numpy.random.{type(value).__name__}", numpy, value))
    return found


def _of_python(name: str, get: Callable[[], Any], set_: Callable[[Any], None]) -> Generator:
    return Generator(name, get, set_, tuple((3, (*words, 0), None) for words in _twister_words()))


def _of_numpy(name: str, numpy: Any, generator: Any) -> Generator:
    bits = generator._bit_generator if isinstance(generator, numpy.RandomState) else generator.bit_generator  # noqa: SLF001

    def get() -> Any:
        return _plain(bits.state)

    def set_(state: Any) -> None:
        bits.state = copy.deepcopy(state)

    if type(bits).__name__ == "MT19937":
        others = tuple({"bit_generator": "MT19937", "state": {"key": list(words), "pos": 0}} for words in _twister_words())
    else:
        others = tuple(_plain(type(bits)(seed).state) for seed in range(16))
    return Generator(name, get, set_, others)


def _plain(value: Any) -> Any:
    """Return a state without arrays."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


@functools.cache
def _twister_words() -> list[tuple[int, ...]]:
    """Return words of states: for least draws, for largest ones, and for ordinary ones."""
    ordinary = [random.Random(seed).getstate()[1][:_WORDS] for seed in range(4)]
    extremes = [(word,) * _EXTREME + ordinary[0][_EXTREME:] for word in (0, _WORD_OF_ONES)]
    return [*extremes, *ordinary]


_WORD_OF_ONES = 0x12DD9BB3
