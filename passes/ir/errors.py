"""One hierarchy of errors: what was wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

_BETWEEN = ("partitioner", "passes", "cost_models", "torch", "contextlib")
"""Packages between a call of the user, or of a framework, and a warning: ``Module.__call__`` and decorators are on the way to ours."""

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "peft", "pytorch_lightning", "transformers")
"""Packages that call a partitioned model for the user."""


@dataclass(frozen=True)
class Place:
    """A location in the user's model; any part may be unknown (None).

    >>> print(Place(module="encoder.0", operation="aten.conv2d", source="net.py:12"))
    module encoder.0, operation aten.conv2d, at net.py:12
    """

    module: str | None = None
    operation: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        parts = []
        if self.module is not None:
            parts.append(f"module {self.module or '(the model itself)'}")
        if self.operation is not None:
            parts.append(f"operation {self.operation}")
        if self.source is not None:
            parts.append(f"at {self.source}")
        return ", ".join(parts)


class PartitionError(Exception):
    """Base of every error raised on purpose by this package.

    Args:
        problem: what was wrong, one sentence.
        place: where in the model, when it is about one place.
        remedy: what the reader can do, one sentence or a few lines.

    Attributes:
        call: the user's call of a framework inside of which it was raised, in words; None outside of one.

    The text reads top to bottom as problem, place, call, remedy:

        the model cannot be traced: its control flow depends on the values of a tensor
          where: module decoder, at net.py:40
          during: Trainer.fit of lightning, called at train.py:12
          remedy: use torch.where or torch.cond in place of `if`
    """

    def __init__(self, problem: str, *, place: Place | None = None, remedy: str | None = None) -> None:
        self.problem = problem
        self.place = place
        self.remedy = remedy
        self.call = _call_of_framework()
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        if self.place is not None and str(self.place):
            lines.append(f"  where: {self.place}")
        if self.call is not None:
            lines.append(f"  during: {self.call}")
        if self.remedy is not None:
            lines.append("  remedy: " + self.remedy.replace("\n", "\n          "))
        return "\n".join(lines)


class PartitionWarning(UserWarning):
    """Results will differ from those of the unpartitioned model by a choice of the user, or it gains little; says where, and a remedy."""


class TraceError(PartitionError):
    """The model cannot be turned into one graph."""


class ConfigError(PartitionError, ValueError):
    """An argument, an input or a combination of them does not fit."""


class InfeasiblePlanError(PartitionError):
    """No plan fits the devices; says how much memory is missing and what would fit."""


class CommunicationError(PartitionError):
    """A rank could not finish a communication; names rank, operation and peer."""


class VerificationError(PartitionError):
    """The programs of the ranks do not fit together; names the nodes."""


def first_few(names: Sequence[object], most: int = 3) -> str:
    """Format the first ``most`` names, and the number of the others.

    >>> first_few(["bn1", "bn2", "bn3"], most=1)
    'bn1 and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """Return ``"did you mean 'adamw'? "`` for a name that is like a known one, whatever the case; else an empty text.

    Args:
        shown: formats the known name.
    """
    by_lower_case = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f"did you mean {shown(by_lower_case[close[0]])}? " if close else ""


def level_of_caller() -> int:
    """Return the ``stacklevel`` of a warning that points at the user's or a framework's call: the number of frames of ours and of torch."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and _package(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level


def _call_of_framework() -> str | None:
    """Return the outermost call of a framework that neither it nor this package makes, in words; None outside of one.

    The forward of a model of transformers that is traced here is no such call.
    """
    found, inner = None, inspect.currentframe()
    while inner is not None:
        outer = inner.f_back
        while outer is not None and _package(outer) in ("torch", "contextlib"):
            outer = outer.f_back
        if outer is not None and _package(inner) in _FRAMEWORKS and _package(outer) not in (*_FRAMEWORKS, *_BETWEEN):
            place = f"{outer.f_code.co_filename}:{outer.f_lineno}"
            found = f"{inner.f_code.co_qualname} of {_package(inner)}, called at {place}"
        inner = outer
    return found


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
