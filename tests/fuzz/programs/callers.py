"""How the caller of a random program uses it: kept tensors, outputs changed in place, optional inputs, frozen parameters."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from torch import Tensor

from tests.fuzz.programs.losses import check_changes, kept_value, loss_function
from tests.fuzz.programs.program import Program, build, make_inputs
from tests.fuzz.programs.structures import leaves_of

CHANGES = (
    "leaf += 1",
    "leaf.mul_(0.5)",
    "leaf.add_(0.3).tanh_()",
    "leaf[:1] = 0",
    "leaf[..., 0] *= 2",
    "leaf.clamp_(min=-1.0)",
)


def draw_usage(program: Program, kept: Sequence[str], rng: random.Random, themes: AbstractSet[str]) -> Program:
    """Return the program with a caller's use of it: each part has been tried on the model."""
    text = " ".join(each.code for each in program.statements)
    places = tuple(dict.fromkeys(each for each in kept if f"self.{re.split(r'[.[]', each)[0]}" in text))
    positions = [each.name for each in program.inputs if each.name == "x4"]
    usage = replace(program.usage, kept=places, batch_dims=tuple((name, None) for name in positions if rng.random() < 0.7))
    if any(each.name == "x8" for each in program.inputs):
        usage = replace(usage, switch="x8", starts_switched=rng.random() < 0.5)
    program = replace(program, usage=usage)
    if places and rng.random() < 0.6:
        program = replace(program, usage=replace(usage, in_loss=_scalars(program, places)))
    if "views" in themes:
        program = _with_changes(program, rng)
    if "freezes" in themes:
        program = _with_frozen(program, rng)
    return program


def _scalars(program: Program, places: Sequence[str]) -> tuple[str, ...]:
    """Return the kept tensors that a loss can add."""
    model = build(program)
    args, kwargs, _ = make_inputs(program, program.rows)
    model(*args, **kwargs)
    values = {place: kept_value(model, place) for place in places}
    return tuple(place for place, value in values.items() if value.dim() == 0 and value.requires_grad)[:2]


def _with_changes(program: Program, rng: random.Random) -> Program:
    """Change leaves of the output in place, where the unpartitioned model lets its caller."""
    args, kwargs, _ = make_inputs(program, program.rows)
    n_leaves = len(leaves_of(build(program)(*args, **kwargs)))
    for _ in range(8):
        changes = tuple((rng.randrange(n_leaves) if rng.random() < 0.3 else 0, rng.choice(CHANGES)) for _ in range(rng.choice((1, 1, 2))))
        found = replace(program, usage=replace(program.usage, changes=changes))
        if _runs(found):
            return found
    return program


def _runs(program: Program) -> bool:
    """Return whether a loss and its backward run on the unpartitioned model."""
    model = build(program)
    args, kwargs, target = make_inputs(program, program.rows)
    try:
        for each in leaves_of([args, kwargs]):
            if isinstance(each, Tensor) and each.is_floating_point():
                each.requires_grad_()
        output = model(*args, **kwargs)
        check_changes(program, output)
        loss = loss_function(program, model)(output, target)
        loss.backward()
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
        return False
    return bool(loss.isfinite())


def _with_frozen(program: Program, rng: random.Random) -> Program:
    """Freeze some parameters at first, and sometimes others later."""
    names = [name for name, _ in build(program).named_parameters()]
    if len(names) < 2:
        return program
    frozen = tuple(sorted(rng.sample(names, rng.randint(1, len(names) - 1)))) if rng.random() < 0.8 else ()
    others = [name for name in names if name not in frozen]
    later = tuple(sorted(rng.sample(others, rng.randint(1, len(others))))) if not frozen or rng.random() < 0.3 else ()
    if not frozen and len(later) == len(names):
        later = later[1:]
    return replace(program, usage=replace(program.usage, frozen=frozen, frozen_later=later))
