"""Inputs of a random program: images, sequences, tokens or vectors, and what its themes ask for besides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import torch

from tests.fuzz.programs.program import Input, Program, Statement

FIRST_BATCH_SECOND = ".clone(memory_format=torch.contiguous_format)"
"""Dense memory: ``contiguous`` leaves a dimension of size one the stride that it has, which may be any."""

WRITTEN = (
    "torch.randn(rows, 5)",
    "torch.zeros(rows, 6, 5)",
    "torch.zeros(rows, 6, 5)",
    "[torch.zeros(rows, 5), torch.randn(rows, 6, 5)]",
    '{"k": torch.zeros(rows, 6, 5), "v": torch.zeros(rows, 6, 5)}',
    "Pair(torch.zeros(rows, 5), [torch.zeros(rows, 6, 5)])",
    "(torch.zeros(rows, 3), (torch.zeros(rows, 6, 5),))",
    "torch.zeros(())",
)
"""Arguments that programs write into: states, caches of six positions, nested ones, a counter without rows."""


def draw_inputs(rng: random.Random, family: str, rows: int, themes: AbstractSet[str]) -> list[Input]:
    """Return the inputs of a program of a family: positional ones first."""
    first, second = rng.randint(4, 9), rng.randint(4, 9)
    if "accident" in themes:
        first = rows
    channels, size = rng.choice((1, 2, 3, 4, 6)), rng.choice((4, 6, 8))
    sizes = {"image": (channels, first, second), "sequence": (first, size), "tokens": (first,), "vector": (size,)}[family]
    shape = ", ".join(map(str, ("rows", *sizes)))
    if family == "tokens":
        found = [Input("x0", f"torch.randint(0, 11, ({shape}))", is_float=False)]
    else:
        found = [Input("x0", _floating(rng, sizes))]
    kind = rng.random()
    if kind < 0.15 and family != "tokens":
        found.append(Input("x1", _floating(rng, sizes), keyword=rng.random() < 0.5))
    elif kind < 0.25:
        found.append(Input("x1", "torch.randn(rows, 4)", keyword=rng.random() < 0.5))
    elif kind < 0.32 and family in {"sequence", "tokens"}:
        found.append(Input("x1", f"torch.rand(rows, {first}) > 0.3", keyword=rng.random() < 0.7, is_float=False))
    found += _of_themes(rng, rows, themes)
    if "arguments" in themes and rng.random() < 0.25 and found[0].is_float:
        found[0] = replace(found[0], is_written=True)
    return sorted(found, key=lambda each: each.keyword)


def _of_themes(rng: random.Random, rows: int, themes: AbstractSet[str]) -> list[Input]:
    """Return the inputs that themes add."""
    found = []
    if "complex" in themes and rng.random() < 0.3:
        found.append(Input("x2", "torch.randn(rows, 4, dtype=torch.complex128)", keyword=rng.random() < 0.3))
    if "accident" in themes:
        code = rng.choice((f"torch.linspace(0.1, 1.0, {rows})", f"torch.linspace(0.1, 1.0, {rows})", f"torch.arange({rows})"))
        found.append(Input("x4", code, keyword=rng.random() < 0.4, is_float="linspace" in code, is_apart=True))
    if "arguments" in themes:
        found.append(Input("x5", rng.choice(WRITTEN), keyword=rng.random() < 0.3, is_float=False, is_written=True))
        if rng.random() < 0.6:
            found.append(Input("x6", f"torch.tensor([{rng.randint(0, 5)}])", keyword=found[-1].keyword, is_float=False, is_apart=True))
    if "taken dataclass" in themes:
        right = rng.choice(("torch.rand(rows, 3)", "[torch.rand(rows, 3)]"))
        code = f"{rng.choice(('Pair', 'Pair', 'Loose'))}(torch.randn(rows, 4), {right})"
        found.append(Input("x7", code, keyword=rng.random() < 0.3))
    if "switch" in themes:
        is_tensor = rng.random() < 0.6
        found.append(Input("x8", "torch.randn(rows, 4)" if is_tensor else "True", keyword=True, is_float=is_tensor, is_apart=True))
    return found


def with_other_inputs(program: Program, rng: random.Random, themes: AbstractSet[str]) -> Program:
    """Move the batch of the first input to its second dimension at times, or scale it by an input without rows."""
    first = next((each for each in program.inputs if each.name == "x0"), program.inputs[0])
    kind = rng.random()
    turns = "batch second" in themes and rng.random() < 0.8
    if first.is_written or first.name != "x0":
        return program
    if turns and _has_two_dimensions(first):
        turned = replace(first, code=f"{first.code}.transpose(0, 1){FIRST_BATCH_SECOND}")
        opening = Statement(f"{first.name} = {first.name}.transpose(0, 1)", (first.name,))
        inputs = tuple(turned if each is first else each for each in program.inputs)
        said = ((first.name, 1),) if rng.random() < 0.3 else ()
        usage = replace(program.usage, batch_dims=(*program.usage.batch_dims, *said))
        return replace(program, inputs=inputs, statements=(opening, *program.statements), usage=usage)
    if kind < 0.9 or not first.is_float:
        return program
    scale = Input("x9", "torch.randn(())", keyword=any(each.keyword for each in program.inputs))
    opening = Statement(f"{first.name} = {first.name} * x9.cos()", (first.name,))
    return replace(program, inputs=(*program.inputs, scale), statements=(opening, *program.statements))


def _has_two_dimensions(given: Input) -> bool:
    """Return whether an input has a dimension beside its rows."""
    return bool(eval(given.code, {"torch": torch, "rows": 2}).dim() > 1)  # noqa: S307  text of our own


def _floating(rng: random.Random, sizes: Sequence[int]) -> str:
    """Return a floating input, sometimes with strides of its own."""
    shape = ", ".join(map(str, ("rows", *sizes)))
    kind = rng.random()
    if kind < 0.75:
        return f"torch.randn({shape})"
    if kind < 0.85 and len(sizes) == 3:
        return f"torch.randn({shape}).to(memory_format=torch.channels_last)"
    if kind < 0.92 or len(sizes) == 1:
        return f"torch.randn({shape}, 2)[..., 0]"
    turned = ", ".join(map(str, ("rows", *sizes[:-2], sizes[-1], sizes[-2])))
    return f"torch.randn({turned}).transpose(-1, -2)"
