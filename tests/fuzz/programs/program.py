"""A random model as text: inputs, layers, statements and a returned structure, printed as Python that stands alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.programs.structures import Structure, leaves, leaves_of, returned_text
from tests.fuzz.templates.modules import CLASSES

FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, AttributeError, NotImplementedError)
"""Of statements that do not fit their values, and of a model that does not run in a precision or with a checkpoint."""

VARIABLE = re.compile(r"\b[vx]\d+\b")
ATTRIBUTE = re.compile(r"\bself\.(\w+)")


@dataclass(frozen=True)
class Input:
    """One input of the model.

    Attributes:
        name: ``x0``, ``x1`` ...
        code: an expression that makes it from ``rows``, the rows of the batch.
        keyword: whether the call passes it by name.
        is_float: whether it has a gradient.
        is_written: whether ``forward`` may write into it; it then has no gradient.
        is_apart: whether only lines that are written for it read it.
    """

    name: str
    code: str
    keyword: bool = False
    is_float: bool = True
    is_written: bool = False
    is_apart: bool = False


@dataclass(frozen=True)
class Layer:
    """A line of ``__init__`` that sets one attribute."""

    name: str
    code: str


@dataclass(frozen=True)
class Statement:
    """A line of ``forward``.

    Attributes:
        code: the line.
        defines: the variables that it assigns; none where it writes in place.
    """

    code: str
    defines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Usage:
    """How a caller uses a model, besides calling it.

    Attributes:
        target: the target of the loss, an expression of ``rows``.
        kept: tensors that ``forward`` keeps on modules, as they are read from the model: ``"keeps3.l_aux"``.
        in_loss: those of them that the loss adds.
        changes: how the caller changes leaves of the output in place: the place of a leaf, and a line that changes ``leaf``.
        switch: a keyword input that some calls leave out.
        starts_switched: whether the first call passes it.
        frozen: parameters that are frozen until the second step.
        frozen_later: parameters that are frozen from the second step on.
        batch_dims: the dimension of the batch of inputs, as ``partition`` takes it.
    """

    target: str = "torch.randn(rows)"
    kept: tuple[str, ...] = ()
    in_loss: tuple[str, ...] = ()
    changes: tuple[tuple[int, str], ...] = ()
    switch: str | None = None
    starts_switched: bool = False
    frozen: tuple[str, ...] = ()
    frozen_later: tuple[str, ...] = ()
    batch_dims: tuple[tuple[str, int | None], ...] = ()


@dataclass(frozen=True)
class Program:
    """A model, its inputs and what it returns.

    Attributes:
        seed: of the weights, the inputs and the target.
        rows: rows of the batch.
        other_rows: rows of a second batch.
        inputs: in the order of ``forward``.
        layers: in the order of ``__init__``; those that no statement reads are not printed.
        statements: in the order of ``forward``.
        returned: the variables that it returns.
        training: the mode of the modules.
        features: what decides which partitionings apply, and what a campaign counts: ``"batchnorm"``, ``"mixes"``, ``"sequence"``,
            ``"space"``, ``"single"``, ``"buffer"``, ``"unbatched"``, ``"dropout"``, ``"time_first"``, ``"complex"``, ``"keeps"`` ..., and
            ``"attends 12 3 True"``: fused attention of 12 positions by three heads, causal.
        usage: how a caller uses it.
    """

    seed: int
    rows: int
    other_rows: int
    inputs: tuple[Input, ...]
    layers: tuple[Layer, ...]
    statements: tuple[Statement, ...]
    returned: Structure
    training: bool
    features: frozenset[str] = frozenset()
    usage: Usage = Usage()

    def without_unused(self) -> Program:
        """Return the same program without unread layers and inputs."""
        read = {name for statement in self.statements for name in ATTRIBUTE.findall(statement.code)}
        layers = []
        for layer in reversed(self.layers):
            if layer.name in read:
                layers.append(layer)
                read |= set(ATTRIBUTE.findall(layer.code))
        variables = {name for statement in self.statements for name in names_in(statement.code)} | set(leaves(self.returned))
        inputs = tuple(each for each in self.inputs if each.name in variables) or self.inputs[:1]
        return replace(self, layers=tuple(reversed(layers)), inputs=inputs)

    def live(self) -> tuple[Statement, ...]:
        """Return the statements that returned values depend on, in-place writes into their inputs, and statements with effects."""
        needed, found = set(leaves(self.returned)), []
        for statement in reversed(self.statements):
            if is_effect(statement) or needed & set(statement.defines or names_in(statement.code)[:1]):
                found.append(statement)
                needed |= set(names_in(statement.code))
        return tuple(reversed(found))

    def source(self) -> str:
        """Return the model as Python that stands alone, and ``make_inputs`` for its inputs and target."""
        arguments = [each.name + (" = None" if each.keyword else "") for each in self.inputs]
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {layer.code}" for layer in self.layers]
        lines += ["", f"    def forward(self, {', '.join(arguments)}):"]
        lines += [f"        {statement.code}" for statement in self.statements]
        lines += [f"        return {returned_text(self.returned)}", ""]
        return "\n".join(lines)


def names_in(code: str) -> list[str]:
    """Return the variables and inputs that a line reads or assigns."""
    return VARIABLE.findall(code)


def is_effect(statement: Statement) -> bool:
    """Return whether a statement writes into an argument, into a buffer or to an attribute."""
    return not statement.defines and statement.code.startswith(("x", "self."))


def namespace() -> dict[str, Any]:
    """Return the names that a program's text may use."""
    return {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor, "checkpoint": checkpoint, **CLASSES}


def build(program: Program) -> nn.Module:
    """Return the model, its weights drawn from the program's seed."""
    scope = namespace()
    exec(compile(program.source(), f"<program of seed {program.seed}>", "exec"), scope)  # noqa: S102  text of our own
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(program.seed)
        model: nn.Module = scope["Model"]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in program.usage.frozen)
    return model.train(program.training)


def make_inputs(program: Program, rows: int, *, is_switched: bool = True) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Positional inputs, keyword inputs and a target for a number of rows.

    Args:
        is_switched: whether the input that some calls leave out is there.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(program.seed + rows)
        made = {each.name: eval(each.code, namespace() | {"rows": rows}) for each in program.inputs}  # noqa: S307  text of our own
        target = eval(program.usage.target, namespace() | {"rows": rows})  # noqa: S307  text of our own
    args = tuple(made[each.name] for each in program.inputs if not each.keyword)
    named = [each.name for each in program.inputs if each.keyword and (is_switched or each.name != program.usage.switch)]
    return args, {name: made[name] for name in named}, target


def shapes_of(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the sizes of every floating value of a run, by name."""
    scope = namespace() | {"self": build(program)}
    args, kwargs, _ = make_inputs(program, program.rows)
    scope |= dict(zip([each.name for each in program.inputs if not each.keyword], args, strict=True)) | kwargs
    for statement in program.statements:
        exec(statement.code, scope)  # noqa: S102  text of our own
    return {name: tuple(value.shape) for name, value in scope.items() if isinstance(value, Tensor) and value.is_floating_point()}


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return a mean over the batch for every floating or complex leaf that has rows, plus a mean of every other leaf.

    A target of two dimensions has the batch last, as leaves of its first two sizes have it in dimension 1.
    """
    total = target.new_zeros(())
    of_rows = target if target.dim() == 1 else target.mean(0)
    for leaf in leaves_of(output):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        value = torch.stack((leaf.real, leaf.imag), -1) if leaf.is_complex() else leaf
        if target.dim() == 2 and value.dim() >= 2 and value.shape[:2] == target.shape:
            error = value.reshape(target.shape[0], target.shape[1], -1) - target[..., None]
        elif value.dim() and value.shape[0] == target.shape[-1]:
            error = value.reshape(value.shape[0], -1) - of_rows[:, None]
        else:
            error = value
        total = total + (error * error).mean().to(total.dtype)
    return total
