"""A random model as text: inputs, layers, statements and a returned structure, printed as Python that stands alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Input", "Layer", "Program", "Statement", "Structure", "build", "leaves", "loss_of", "make_inputs", "names_in", "shapes_of"]

Structure = str | None | tuple["Structure", ...] | list["Structure"] | dict[str, "Structure"]
"""What ``forward`` returns: variable names in tuples, lists and dicts, None leaves between them."""

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
    """

    name: str
    code: str
    keyword: bool = False
    is_float: bool = True


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
        features: what decides which partitionings apply: ``"batchnorm"``, ``"mixes"``, ``"sequence"``, ``"space"``, ``"single"``,
            ``"buffer"``, ``"unbatched"``, ``"dropout"``, ``"time_first"``, and ``"attends 12 3 True"``: fused attention of 12 positions by
            three heads, causal.
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

    def without_unused(self) -> Program:
        """The same program less the layers and inputs that nothing reads."""
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
        """The statements that returned values depend on, and those that write in place into what these read."""
        needed, found = set(leaves(self.returned)), []
        for statement in reversed(self.statements):
            if needed & set(statement.defines or names_in(statement.code)[:1]):
                found.append(statement)
                needed |= set(names_in(statement.code))
        return tuple(reversed(found))

    def source(self) -> str:
        """The model as Python that stands alone, and ``make_inputs`` for its inputs and target."""
        arguments = [each.name + (" = None" if each.keyword else "") for each in self.inputs]
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {layer.code}" for layer in self.layers]
        lines += ["", f"    def forward(self, {', '.join(arguments)}):"]
        lines += [f"        {statement.code}" for statement in self.statements]
        lines += [f"        return {returned_text(self.returned)}", ""]
        return "\n".join(lines)


def returned_text(structure: Structure) -> str:
    """A structure as the expression that makes it."""
    if isinstance(structure, dict):
        return "{" + ", ".join(f'"{key}": {returned_text(each)}' for key, each in structure.items()) + "}"
    if isinstance(structure, list):
        return "[" + ", ".join(map(returned_text, structure)) + "]"
    if isinstance(structure, tuple):
        return "(" + "".join(returned_text(each) + ", " for each in structure).strip() + ")"
    return str(structure)


def leaves(structure: Structure) -> Iterator[str]:
    """The variables of a structure."""
    if isinstance(structure, str):
        yield structure
    elif structure is not None:
        for each in structure.values() if isinstance(structure, dict) else structure:
            yield from leaves(each)


def names_in(code: str) -> list[str]:
    """The variables and inputs that a line reads or assigns."""
    return VARIABLE.findall(code)


def namespace() -> dict[str, Any]:
    """The names that a program's text may use."""
    return {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor}


def build(program: Program) -> nn.Module:
    """The model, its weights drawn from the program's seed."""
    scope = namespace()
    exec(compile(program.source(), f"<program of seed {program.seed}>", "exec"), scope)  # noqa: S102  text of our own
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(program.seed)
        model: nn.Module = scope["Model"]()
    return model.train(program.training)


def make_inputs(program: Program, rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Positional inputs, keyword inputs and a target for a number of rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(program.seed + rows)
        made = {each.name: eval(each.code, namespace() | {"rows": rows}) for each in program.inputs}  # noqa: S307  text of our own
        target = torch.randn(rows)
    args = tuple(made[each.name] for each in program.inputs if not each.keyword)
    return args, {each.name: made[each.name] for each in program.inputs if each.keyword}, target


def shapes_of(program: Program) -> dict[str, tuple[int, ...]]:
    """The sizes of every floating value of a run, by name."""
    scope = namespace() | {"self": build(program)}
    args, kwargs, _ = make_inputs(program, program.rows)
    scope |= dict(zip([each.name for each in program.inputs if not each.keyword], args, strict=True)) | kwargs
    for statement in program.statements:
        exec(statement.code, scope)  # noqa: S102  text of our own
    return {name: tuple(value.shape) for name, value in scope.items() if isinstance(value, Tensor) and value.is_floating_point()}


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A mean over the rows of the batch for every floating leaf that has rows, plus a mean of every other leaf."""
    total = target.sum() * 0
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            has_rows = leaf.dim() and leaf.shape[0] == target.shape[0]
            error = leaf.reshape(leaf.shape[0], -1) - target[:, None] if has_rows else leaf
            total = total + (error * error).mean().to(total.dtype)
    return total
