"""Write a program statement by statement: every line runs on two batch sizes before the next is written."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.program import Input, Layer, Program, Statement, make_inputs, names_in, namespace

__all__ = ["Draft", "Template", "Variable", "Writer"]

LARGEST = 6000
"""Elements of a value."""


@dataclass(frozen=True)
class Variable:
    """A value so far: its sizes on the two batches.

    Attributes:
        name: in the program's text.
        shape: with the first batch.
        open: the dimensions whose size depends on the batch.
        dtype: of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    open: tuple[int, ...]
    dtype: torch.dtype

    @property
    def dim(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype == torch.float64

    @property
    def is_batched(self) -> bool:
        """Whether the batch is the first dimension and no other."""
        return self.open == (0,)

    @property
    def closed(self) -> list[int]:
        """The dimensions that do not depend on the batch."""
        return [dim for dim in range(self.dim) if dim not in self.open]


@dataclass(frozen=True)
class Draft:
    """A line that a template proposes.

    Attributes:
        code: an expression, or a whole line that writes in place.
        outputs: how many variables it defines.
        features: what the program then has.
    """

    code: str
    outputs: int = 1
    features: tuple[str, ...] = ()


class Writer:
    """Holds the program so far and its values on two batches."""

    def __init__(self, rng: random.Random, seed: int, rows: int, other_rows: int, inputs: Sequence[Input], *, training: bool) -> None:
        self.rng = rng
        self.training = training
        self.features: set[str] = set()
        self.layers: list[Layer] = []
        self.statements: list[Statement] = []
        self._pending: list[Layer] = []
        self._start = Program(seed, rows, other_rows, tuple(inputs), (), (), None, training)
        self._count = 0
        self._reset()

    @property
    def program(self) -> Program:
        return Program(
            self._start.seed,
            self._start.rows,
            self._start.other_rows,
            self._start.inputs,
            tuple(self.layers),
            tuple(self.statements),
            None,
            self.training,
            frozenset(self.features),
        )

    def _reset(self) -> None:
        """Run what is written so far anew, on both batches."""
        self._scopes: list[dict[str, Any]] = []
        for rows in (self._start.rows, self._start.other_rows):
            args, kwargs, _ = make_inputs(self._start, rows)
            positional = [each.name for each in self._start.inputs if not each.keyword]
            given = dict(zip(positional, args, strict=True)) | kwargs
            for value in given.values():
                value.requires_grad_(value.is_floating_point())
            module = nn.Module()
            self._scopes.append(namespace() | {"self": module} | given)
        for layer in self.layers:
            self._run(layer.code)
        for statement in self.statements:
            self._run(statement.code)

    def _run(self, code: str) -> None:
        with torch.random.fork_rng(devices=[]):
            for scope in self._scopes:
                torch.default_generator.manual_seed(self._start.seed)  # torch.manual_seed notes its caller for every accelerator
                exec(code, scope)  # noqa: S102  text of our own
                scope["self"].train(self.training)

    def variable(self, name: str) -> Variable | None:
        """What is known of a name; None for what is no tensor."""
        first, second = (scope[name] for scope in self._scopes)
        if not isinstance(first, Tensor):
            return None
        changed = tuple(dim for dim, sizes in enumerate(zip(first.shape, second.shape, strict=True)) if sizes[0] != sizes[1])
        return Variable(name, tuple(first.shape), changed, first.dtype)

    def variables(self) -> list[Variable]:
        """Every value so far, inputs first."""
        names = [each.name for each in self._start.inputs] + [name for each in self.statements for name in each.defines]
        return [found for name in names if (found := self.variable(name)) is not None]

    def pick(self, accepts: Callable[[Variable], bool] = lambda _: True, *, recent: int = 3) -> Variable | None:
        """One value that is accepted, mostly a late one."""
        found = [each for each in self.variables() if accepts(each)]
        if not found:
            return None
        return self.rng.choice(found[-recent:] if self.rng.random() < 0.75 else found)

    def layer(self, prefix: str, constructor: str) -> str:
        """Propose a layer and return how statements call it."""
        name = f"{prefix}{len(self.layers) + len(self._pending)}"
        self._pending.append(Layer(name, f"self.{name} = {constructor}"))
        return f"self.{name}"

    def parameter(self, *shape: int) -> str:
        """Propose a parameter."""
        return self.layer("weight", f"nn.Parameter(torch.randn({', '.join(map(str, shape))}) * 0.5)")

    def buffer(self, value: str) -> str:
        """Propose a buffer."""
        name = f"buffer{len(self.layers) + len(self._pending)}"
        self._pending.append(Layer(name, f'self.register_buffer("{name}", {value})'))
        return f"self.{name}"

    def amend(self, name: str, code: str) -> None:
        """Propose a line of ``__init__`` behind the layer that it changes."""
        self._pending = [Layer(each.name, f"{each.code}; {code}") if each.name == name else each for each in self._pending]

    def write(self, draft: Draft) -> bool:
        """Write a line where it runs on both batches and its values are fit to go on with."""
        pending, self._pending = self._pending, []
        names = tuple(f"v{self._count + place}" for place in range(draft.outputs))
        target = ", ".join(names) + ("," if draft.outputs == 1 and draft.code.startswith("*") else "")
        code = f"{target} = {draft.code.removeprefix('*')}" if names else draft.code
        try:
            for layer in pending:
                self._run(layer.code)
            self._run(code)
            fits = all(self._fits(name) for name in names) and self._is_differentiable(names, code)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError):
            fits = False
        if not fits:
            self._reset()
            return False
        self.layers += pending
        self.statements.append(Statement(code, names))
        self._count += len(names)
        self.features |= set(draft.features)
        return True

    def depth(self, name: str) -> int:
        """How many statements a value depends on; those with layers count twice."""
        return sum(1 + ("self." in each.code) for each in replace(self.program, returned=name).live())

    def drop_what_autograd_refuses(self) -> None:
        """Drop writes in place, the last first, until a backward through all values runs on both batches."""
        while not self._runs_backward():
            place = max(place for place, each in enumerate(self.statements) if _writes(each.code))
            dropped, left = set(self.statements[place].defines), self.statements[:place]
            for each in self.statements[place + 1 :]:
                if dropped & set(names_in(each.code)):
                    dropped |= set(each.defines)
                else:
                    left.append(each)
            self.statements = left

    def _runs_backward(self) -> bool:
        try:
            self._reset()
            return self._is_differentiable((), "")
        except RuntimeError:
            return False

    def discard(self) -> None:
        """Forget proposed layers of a template that gave up."""
        self._pending = []

    def _fits(self, name: str) -> bool:
        for scope in self._scopes:
            value = scope[name]
            if not isinstance(value, Tensor) or not 0 < value.numel() <= LARGEST or value.dim() > 6:
                return False
            if value.is_floating_point() and not (bool(value.isfinite().all()) and float(value.detach().abs().max()) < 100):
                return False
        return True

    def _is_differentiable(self, names: Sequence[str], code: str) -> bool:
        """Whether a backward through everything still runs, where a line writes in place."""
        if names and not _writes(code):
            return True
        for scope in self._scopes:
            values = [scope[each.name] for each in self.variables()]
            total = sum((value.double() ** 2).sum() for value in values if value.is_floating_point() and value.requires_grad)
            if isinstance(total, Tensor):
                total.backward(retain_graph=True)
        return True


def _writes(code: str) -> bool:
    """Whether a line writes in place."""
    return not re.match(r"(v\d+, ?)*v\d+,? = ", code) or "_(" in code or "inplace=True" in code


Template = Callable[[Writer, Variable], Draft | str | None]
"""A line from a value, or nothing where it does not apply. An expression alone defines one variable."""
