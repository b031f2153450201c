"""Write a program statement by statement: every line runs on two batch sizes before the next is written."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.programs.program import FAILURES, Input, Layer, Program, Statement, make_inputs, names_in, namespace
from tests.fuzz.programs.structures import leaves_of

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
    def is_complex(self) -> bool:
        return self.dtype == torch.complex128

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
        then: lines that follow; ``{0}`` stands for the first variable.
    """

    code: str
    outputs: int = 1
    features: tuple[str, ...] = ()
    then: tuple[Draft, ...] = ()


class Writer:
    """Holds the program so far and its values on two batches."""

    def __init__(self, rng: random.Random, seed: int, rows: int, other_rows: int, inputs: Sequence[Input], *, training: bool) -> None:
        self.rng = rng
        self.training = training
        self.features: set[str] = set()
        self.layers: list[Layer] = []
        self.statements: list[Statement] = []
        self.kept: list[str] = []
        self._pending: list[Layer] = []
        self._pending_kept: list[str] = []
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

    @property
    def rows(self) -> int:
        return self._start.rows

    @property
    def inputs(self) -> dict[str, Input]:
        """The inputs by name."""
        return {each.name: each for each in self._start.inputs}

    def _reset(self) -> None:
        """Run what is written so far anew, on both batches."""
        self._scopes: list[dict[str, Any]] = []
        for rows in (self._start.rows, self._start.other_rows):
            args, kwargs, _ = make_inputs(self._start, rows)
            positional = [each.name for each in self._start.inputs if not each.keyword]
            given = dict(zip(positional, args, strict=True)) | kwargs
            for name, value in given.items():
                for each in leaves_of(value):
                    if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
                        each.requires_grad_(not self.inputs[name].is_written)
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
        """Return the variable of a name; None unless it is a tensor."""
        first, second = (scope[name] for scope in self._scopes)
        return _variable(name, first, second) if isinstance(first, Tensor) else None

    def written_tensors(self) -> list[tuple[str, Variable]]:
        """Return the tensors of arguments that may be written, and how a line names them."""
        found = []
        for name, given in self.inputs.items():
            if given.is_written:
                first, second = (dict(_paths(name, scope[name])) for scope in self._scopes)
                found += [(path, _variable(name, value, second[path])) for path, value in first.items()]
        return found

    def variables(self) -> list[Variable]:
        """Return every value so far, inputs first."""
        names = [each.name for each in self._start.inputs if not each.is_apart] + [
            name for each in self.statements for name in each.defines
        ]
        return [found for name in names if (found := self.variable(name)) is not None]

    def pick(self, accepts: Callable[[Variable], bool] = lambda _: True, *, recent: int = 3) -> Variable | None:
        """Return one value that is accepted, mostly a late one."""
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

    def keep(self, *places: str) -> None:
        """Propose tensors that are kept on modules, by how they are read from the model."""
        self._pending_kept += places

    def amend(self, name: str, code: str) -> None:
        """Propose a line of ``__init__`` after the layer that it changes."""
        self._pending = [Layer(each.name, f"{each.code}; {code}") if each.name == name else each for each in self._pending]

    def write(self, draft: Draft) -> bool:
        """Write a line where it runs on both batches and its values are fit to go on with."""
        pending, self._pending = self._pending, []
        kept, self._pending_kept = self._pending_kept, []
        try:
            for layer in pending:
                self._run(layer.code)
            statements = self._written(draft)
        except FAILURES:
            statements = None
        if statements is None:
            self._reset()
            return False
        self.layers += pending
        self.kept += kept
        self.statements += statements
        self._count += sum(len(each.defines) for each in statements)
        self.features |= set(draft.features)
        return True

    def _written(self, draft: Draft) -> list[Statement] | None:
        """Return the lines of a draft, which have run; None where a value of theirs is not fit to go on with."""
        found: list[Statement] = []
        for each in (draft, *draft.then):
            count = self._count + sum(len(statement.defines) for statement in found)
            names = tuple(f"v{count + place}" for place in range(each.outputs))
            code = each.code.replace("{0}", found[0].defines[0] if found and found[0].defines else "")
            target = ", ".join(names) + ("," if each.outputs == 1 and code.startswith("*") else "")
            code = f"{target} = {code.removeprefix('*')}" if names else code
            self._run(code)
            if not all(self._fits(name) for name in names):
                return None
            found.append(Statement(code, names))
        self.statements += found
        try:
            is_fit = all(self._is_differentiable(each.defines, each.code) for each in found)
        finally:
            del self.statements[-len(found) :]
        return found if is_fit else None

    def depth(self, name: str) -> int:
        """Return the number of statements that a value depends on; those with layers count twice."""
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
        """Forget the proposed layers and kept tensors of a template that gave up."""
        self._pending, self._pending_kept = [], []

    def _fits(self, name: str) -> bool:
        for scope in self._scopes:
            value = scope[name]
            if not isinstance(value, Tensor) or not 0 < value.numel() <= LARGEST or value.dim() > 6:
                return False
            is_number = value.is_floating_point() or value.is_complex()
            if is_number and not (bool(value.isfinite().all()) and float(value.detach().abs().max()) < 100):
                return False
        return True

    def _is_differentiable(self, names: Sequence[str], code: str) -> bool:
        """Return whether a backward through everything still runs, where a line writes in place."""
        if names and not _writes(code):
            return True
        for scope in self._scopes:
            values = [scope[each.name] for each in self.variables()]
            total = sum((value.abs() ** 2).sum() for value in values if value.requires_grad)
            if isinstance(total, Tensor):
                total.backward(retain_graph=True)
        return True


def _variable(name: str, first: Tensor, second: Tensor) -> Variable:
    """Describe a value by its tensors on the two batches."""
    changed = tuple(dim for dim, sizes in enumerate(zip(first.shape, second.shape, strict=True)) if sizes[0] != sizes[1])
    return Variable(name, tuple(first.shape), changed, first.dtype)


def _paths(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an argument, each with the expression that reads it."""
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value):
        for each in fields(value):
            yield from _paths(f"{path}.{each.name}", getattr(value, each.name))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _paths(f"{path}[{key!r}]", each)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _paths(f"{path}[{place}]", each)


def _writes(code: str) -> bool:
    """Return whether a line writes in place."""
    return not re.match(r"(v\d+, ?)*v\d+,? = ", code) or "_(" in code or "inplace=True" in code


Template = Callable[[Writer, Variable], Draft | str | None]
"""A line from a value, or nothing where it does not apply. An expression alone defines one variable."""
