"""Reduce a failing case: fewer statements, fewer results, a simpler partitioning, as long as it fails in the same way."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.programs.configuration import Configuration
from tests.fuzz.programs.generator import Case
from tests.fuzz.programs.program import Input, Program, Usage, shapes_of
from tests.fuzz.programs.structures import Structure, leaves, renamed
from tests.fuzz.running.outcome import Outcome, run_case


def reduce_case(case: Case, outcome: Outcome, seconds: float = 240.0, run: Callable[[Case], Outcome] = run_case) -> Case:
    """Return the smallest case found in so many seconds that fails as this one does."""
    deadline = time.monotonic() + seconds
    case = replace(case, program=case.program.without_unused())
    improved = True
    while improved:
        improved = False
        for candidate in _smaller(case):
            if time.monotonic() > deadline:
                return case
            found = run(candidate)
            if (found.kind, found.reason) == (outcome.kind, outcome.reason):
                case, improved = candidate, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases that are simpler by one step, the greatest steps first."""
    program = case.program
    for structure in _structures(program.returned):
        yield _with(case, replace(program, returned=structure))
    yield from (_with(case, each) for each in _earlier_results(program))
    yield from (_with(case, each) for each in _later_inputs(program))
    for place in reversed(range(len(program.statements))):
        yield from (_with(case, each) for each in _without_statement(program, place))
    yield from (_with(case, each) for each in _usages(program))
    for configuration in _configurations(case.configuration):
        yield replace(case, configuration=configuration)
    for index, each in enumerate(program.inputs):
        if "memory_format" in each.code or "[..., 0]" in each.code or each.keyword:
            plain = re.sub(r"\.to\(memory_format=.*?\)$|, 2\)\[\.\.\., 0\]$", lambda found: ")" if "[" in found[0] else "", each.code)
            is_named = each.keyword and each.name == program.usage.switch
            inputs = (*program.inputs[:index], replace(each, code=plain, keyword=is_named), *program.inputs[index + 1 :])
            inputs = tuple(sorted(inputs, key=lambda given: given.keyword))
            if inputs != program.inputs:
                yield _with(case, replace(program, inputs=inputs))


def _with(case: Case, program: Program) -> Case:
    return replace(case, program=program.without_unused())


def _structures(structure: Structure) -> Iterator[Structure]:
    """Yield one leaf alone, or the structure less one of its parts."""
    names = list(dict.fromkeys(leaves(structure)))
    if not isinstance(structure, str):
        yield from names
    if isinstance(structure, dict):
        yield from ({key: each for key, each in structure.items() if key != left} for left in structure)
    elif isinstance(structure, tuple | list) and len(structure) > 1:
        yield from (type(structure)(each for at, each in enumerate(structure) if at != left) for left in range(len(structure)))


def _earlier_results(program: Program) -> Iterator[Program]:
    """Yield programs with an earlier value as the last, and no later statements."""
    if not isinstance(program.returned, str):
        return
    for end in (len(program.statements) // 2, len(program.statements) - 1):
        kept = program.statements[:end]
        for statement in reversed(kept):
            if statement.defines and program.returned not in statement.defines:
                yield replace(program, statements=kept, returned=statement.defines[0])
                break


def _later_inputs(program: Program) -> Iterator[Program]:
    """Yield a value as an input of its sizes, in place of the statement that computes it."""
    sizes = shapes_of(program)
    for place in reversed(range(len(program.statements))):
        statement = program.statements[place]
        if len(statement.defines) != 1 or statement.defines[0] not in sizes:
            continue
        (name,) = statement.defines
        shape = sizes[name]
        if not shape or shape[0] != program.rows:
            continue
        fresh = f"x{10 + place}"
        made = Input(fresh, f"torch.randn({', '.join(map(str, ('rows', *shape[1:])))})")
        statements = tuple(
            replace(each, code=re.sub(rf"\b{name}\b", fresh, each.code)) for at, each in enumerate(program.statements) if at != place
        )
        inputs = tuple(sorted((*program.inputs, made), key=lambda each: each.keyword))
        yield replace(program, inputs=inputs, statements=statements, returned=_read_instead(program.returned, name, fresh))


def _without_statement(program: Program, place: int) -> Iterator[Program]:
    """Yield the program without a statement; readers of its value read an earlier one."""
    statement = program.statements[place]
    rest = (*program.statements[:place], *program.statements[place + 1 :])
    used = {name for each in rest for name in re.findall(r"\b[vx]\d+\b", each.code)} | set(leaves(program.returned))
    if not used & set(statement.defines):
        yield replace(program, statements=rest)
        return
    if len(statement.defines) != 1:
        return
    (name,) = statement.defines
    for source in dict.fromkeys(each for each in re.findall(r"\b[vx]\d+\b", statement.code) if each != name):
        changed = tuple(replace(each, code=re.sub(rf"\b{name}\b", source, each.code)) for each in rest)
        yield replace(program, statements=changed, returned=_read_instead(program.returned, name, source))


def _read_instead(structure: Structure, name: str, other: str) -> Structure:
    """Return the structure with another variable instead of one."""
    return renamed(structure, lambda each: other if each == name else each)


def _usages(program: Program) -> Iterator[Program]:
    """Yield programs whose callers do less."""
    usage = program.usage
    text = " ".join(each.code for each in program.statements)
    for name in ("changes", "in_loss", "kept", "frozen", "frozen_later", "batch_dims"):
        values: tuple[Any, ...] = getattr(usage, name)
        fewer: list[tuple[Any, ...]] = [()] * bool(values) + [(each,) for each in values if len(values) > 1]
        for chosen in fewer:
            less: dict[str, Any] = {name: chosen}
            yield replace(program, usage=replace(usage, **less))
    if usage.target != Usage().target:
        yield replace(program, usage=replace(usage, target=Usage().target))
    if usage.switch is not None and usage.switch not in text:
        yield replace(program, usage=replace(usage, switch=None))


def _configurations(configuration: Configuration) -> Iterator[Configuration]:
    """Simpler ways to partition."""
    if configuration.attention is not None:
        yield replace(configuration, attention=None)
    if configuration.precision is not None:
        yield replace(configuration, precision=None)
    if configuration.recompute is not None:
        yield replace(configuration, recompute=None)
    if isinstance(configuration.recompute, tuple) and len(configuration.recompute) > 1:
        yield from (replace(configuration, recompute=(each,)) for each in configuration.recompute)
    if configuration.schedule is not None:
        yield replace(configuration, schedule=None)
    if configuration.n_microbatches not in {None, 1}:
        yield replace(configuration, n_microbatches=1)
        yield replace(configuration, n_microbatches=2)
    mesh = dict(configuration.mesh)
    if len(mesh) > 1:
        for name, size in mesh.items():
            microbatches = configuration.n_microbatches if name == "pipeline" else None
            devices = math.prod(size) if isinstance(size, tuple) else size
            schedule = configuration.schedule if name == "pipeline" else None
            yield replace(configuration, devices=devices, mode=name, n_microbatches=microbatches, schedule=schedule, attention=None)
    elif configuration.devices > 2:
        yield replace(configuration, devices=2, mode=next(iter(mesh)))
