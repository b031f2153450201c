"""How a case is trained: checkpoints of the model itself, policies of recomputation by module, and precisions."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.programs.configuration import Configuration
from tests.fuzz.programs.program import FAILURES, Program, Statement, build, names_in
from tests.fuzz.programs.structures import leaves, leaves_of
from tests.fuzz.running.comparison import DifferenceError, compare, has_gradient
from tests.fuzz.running.observations import Reference, observations
from tests.fuzz.running.precision import converted, default_dtype

CHECKPOINTED, BY_MODULE, IN_PRECISION = 0.4, 0.2, 0.25
"""How many programs have checkpoints of their own, patterns of modules, and a precision."""

PRECISIONS = ("bf16-mixed", "bf16-mixed", "bf16-true", "32-true")

CALL = re.compile(r"(self\.\w+)\((v\d+|x\d+)\)$")


def with_checkpoints(program: Program, rng: random.Random) -> Program:
    """Put ``torch.utils.checkpoint`` around some statements at times, if the program's gradients stay the same."""
    if rng.random() >= CHECKPOINTED or not program.training:
        return program
    expected: list[tuple[str, Any]] | None = None
    wanted = rng.randint(1, 3)
    for _ in range(4 * wanted):
        use_reentrant = rng.random() < 0.5
        candidate = _checkpointed(program, rng, use_reentrant=use_reentrant)
        if candidate is None:
            continue
        expected = expected or _observed(program)
        if expected is not None and _is_equal(expected, candidate):
            kind = "reentrant" if use_reentrant else "checkpoint"
            program, wanted = replace(candidate, features=program.features | {f"own {kind}"}), wanted - 1
        if not wanted:
            break
    return program


def draw_training(configuration: Configuration, program: Program, rng: random.Random) -> Configuration:
    """Add patterns of the program's modules to the configuration at times, or a precision in which its model runs."""
    if rng.random() < BY_MODULE:
        names = [name for name, _ in build(program).named_modules()]
        patterns = dict(_pattern(rng, names) for _ in range(rng.randint(1, 3)))
        configuration = replace(configuration, recompute=tuple(patterns.items()))
    if rng.random() < IN_PRECISION:
        precision = rng.choice(PRECISIONS)
        if _observed(program, precision) is not None:
            configuration = replace(configuration, precision=precision)
    return configuration


def _pattern(rng: random.Random, names: list[str]) -> tuple[str, str]:
    """Return a module's name, mostly with a ``*`` for a part of it, and a policy."""
    parts = rng.choice(names).split(".")
    if parts != [""] and rng.random() < 0.6:
        place = rng.randrange(len(parts))
        parts[place] = rng.choice(("*", f"{parts[place].rstrip('0123456789')}*"))
    return ".".join(parts), rng.choice(("none", "selective", "full", "full"))


def _checkpointed(program: Program, rng: random.Random, *, use_reentrant: bool) -> Program | None:
    """Return the program with a checkpoint around a few consecutive statements; None where they cannot be one expression each."""
    first = rng.randrange(len(program.statements)) if program.statements else 0
    region = program.statements[first : first + rng.choice((1, 1, 2, 3, 4))]
    expressions = [each.code.partition(" = ")[2] for each in region]
    if not region or any(len(each.defines) != 1 or not each.defines[0].startswith("v") for each in region):
        return None
    rest = program.statements[first + len(region) :]
    later = {name for each in rest for name in names_in(each.code)} | set(leaves(program.returned))
    results = [name for each in region for name in each.defines if name in later]
    defined = {name for each in region for name in each.defines}
    read = list(dict.fromkeys(name for each in expressions for name in _read(each) if name not in defined))
    if not results or not read:
        return None
    call = CALL.match(expressions[0]) if len(region) == 1 else None
    if call is not None:
        function = call[1]
    else:
        lines = [f"({each.defines[0]} := {code})" for each, code in zip(region, expressions, strict=True)]
        function = f"lambda {', '.join(read)}: ({', '.join(lines)}, {', '.join(results)})[{len(lines)}:]"
    unpacked = f"{results[0]}" if call is not None else f"{', '.join(results)}{',' if len(results) == 1 else ''}"
    code = f"{unpacked} = checkpoint({function}, {', '.join(read)}, use_reentrant={use_reentrant})"
    statement = Statement(code, tuple(results))
    return replace(program, statements=(*program.statements[:first], statement, *rest))


def _read(expression: str) -> list[str]:
    """Return the variables that an expression reads; of a checkpoint, its arguments alone."""
    found = re.search(r", ((?:[vx]\d+, )+)use_reentrant=\w+\)$", expression)
    return names_in(found[1] if found else expression)


def _observed(program: Program, precision: str | None = None) -> list[tuple[str, Any]] | None:
    """Return the observations of the unpartitioned model; None where it fails, or has numbers that are not finite."""
    try:
        with default_dtype(precision):
            model = build(program)
            trains = any(parameter.requires_grad for parameter in model.parameters())
            side = Reference(converted(model, precision), is_partitioned=False, precision=precision, trains=trains)
            found = list(observations(side, program))
    except FAILURES:
        return None
    return found if all(bool(each.isfinite().all()) for each in _numbers(found)) else None


def _numbers(observed: list[tuple[str, Any]]) -> Iterator[torch.Tensor]:
    for _, value in observed:
        yield from (each for each in leaves_of(value) if isinstance(each, torch.Tensor) and has_gradient(each))


def _is_equal(expected: list[tuple[str, Any]], program: Program) -> bool:
    """Return whether the model does the same; a checkpoint that draws, writes or keeps something may change it."""
    found = _observed(program)
    if found is None or len(found) != len(expected):
        return False
    try:
        for (what, wanted), (_, got) in zip(expected, found, strict=True):
            compare(what, wanted, got)
    except DifferenceError:
        return False
    return True
