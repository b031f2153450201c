"""A random case from a seed: a program, and a way to partition it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.fuzz.configuration import Configuration, choose_configuration
from tests.fuzz.layers import IMAGE, SEQUENCE, VECTOR, used_again
from tests.fuzz.program import Input, Program, Statement, Structure, leaves
from tests.fuzz.values import INDEXED, POINTWISE, REDUCED, SHAPED, WRITTEN
from tests.fuzz.writer import Draft, Template, Variable, Writer

__all__ = ["Case", "generate"]

_TURNED = ".clone(memory_format=torch.contiguous_format)"
"""Dense memory: ``contiguous`` leaves a dimension of size one the stride that it has, which may be any."""

FAMILIES = ("image", "image", "sequence", "sequence", "tokens", "vector")


@dataclass(frozen=True)
class Case:
    """What is run: a model, and how it is partitioned."""

    program: Program
    configuration: Configuration


def generate(seed: int) -> Case:
    """The case of a seed: of this number and nothing else. Call it with float64 as the default dtype."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    rows = rng.choice((4, 4, 6, 8, 12))
    writer = Writer(rng, seed, rows, rng.choice((2 * rows, 3 * rows)), _inputs(rng, family), training=rng.random() < 0.75)
    length = rng.randint(5, 25)
    for _ in range(6 * length):
        if len(writer.statements) >= length:
            break
        _write_one(writer, rng, family)
    writer.drop_what_autograd_refuses()
    program = writer.program
    program = replace(program, returned=_returned(writer, rng)).without_unused()
    program = replace(program, features=program.features | _features(program, writer, family))
    program = _with_other_inputs(program, random.Random(f"inputs of {seed}"))
    return Case(program, choose_configuration(rng, program))


def _inputs(rng: random.Random, family: str) -> list[Input]:
    first, second = rng.randint(4, 13), rng.randint(4, 13)
    channels, size = rng.choice((1, 2, 3, 4, 6)), rng.choice((4, 6, 8, 12))
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
    return found


def _with_other_inputs(program: Program, rng: random.Random) -> Program:
    """Sometimes the batch of the first input lies behind its other dimensions, or is joined by an input without rows."""
    first, *others = program.inputs
    kind = rng.random()
    if not first.is_float or kind > 0.25:
        return program
    if kind < 0.15:
        turned = replace(first, code=f"{first.code}.transpose(0, 1){_TURNED}")
        opening = Statement(f"{first.name} = {first.name}.transpose(0, 1)", (first.name,))
        return replace(program, inputs=(turned, *others), statements=(opening, *program.statements))
    scale = Input("x9", "torch.randn(())", keyword=any(each.keyword for each in program.inputs))
    opening = Statement(f"{first.name} = {first.name} * x9.cos()", (first.name,))
    return replace(program, inputs=(first, *others, scale), statements=(opening, *program.statements))


def _floating(rng: random.Random, sizes: Sequence[int]) -> str:
    """A floating input, sometimes with strides of its own."""
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


def _write_one(writer: Writer, rng: random.Random, family: str) -> None:
    """Write one more line, or none where its template does not apply."""
    if family == "tokens" and not any(each.is_float for each in writer.variables()):
        embedded = writer.layer("embedding", f"nn.Embedding(11, {rng.choice((4, 6, 8))})")
        writer.write(Draft(f"{embedded}(x0)"))
        return
    if family == "tokens" and rng.random() < 0.03 and (name := _embedding(writer)):
        value = writer.pick(lambda each: each.is_float and each.dim == 3)
        if value is not None:
            writer.write(Draft(f"F.linear({value.name}, self.{name}.weight)"))
        return
    value = writer.pick()
    template = rng.choice(_templates(rng, value)) if value is not None else None
    if value is None or template is None:
        return
    draft = template(writer, value)
    if draft is None:
        writer.discard()
        return
    writer.write(Draft(draft) if isinstance(draft, str) else draft)


def _embedding(writer: Writer) -> str | None:
    return next((each.name for each in writer.layers if "Embedding(11" in each.code), None)


def _templates(rng: random.Random, value: Variable) -> Sequence[Template]:
    """Templates of one kind, the kinds weighted by what the value is."""
    layers: Sequence[Template] = VECTOR
    if value.is_batched and value.dim == 4:
        layers = IMAGE
    elif value.is_batched and value.dim == 3:
        layers = SEQUENCE
    kinds = ((layers, 38), (POINTWISE, 18), (SHAPED, 12), (REDUCED, 9), (INDEXED, 8), (WRITTEN, 9), ((used_again,), 6))
    return rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]


def _returned(writer: Writer, rng: random.Random) -> Structure:
    """The last value, or a structure of several: mostly such as have rows."""
    values = [each for each in writer.variables() if not each.name.startswith("x")]
    batched = [each.name for each in values if each.is_float and each.open and each.open[0] == 0]
    if not batched:
        return values[-1].name if values else "x0"
    last = max(batched, key=writer.depth)
    batched.remove(last)
    batched.append(last)
    kind = rng.random()
    if kind < 0.55 or len(batched) < 2:
        return last
    others = rng.sample(batched[:-1], min(len(batched) - 1, rng.randint(1, 2)))
    if rng.random() < 0.15:
        others.append(rng.choice(values).name)
    if kind < 0.7:
        return (last, *others)
    if kind < 0.8:
        return {"last": last, **{f"other{place}": name for place, name in enumerate(others)}}
    if kind < 0.9:
        return {"last": last, "nothing": None, "nested": (tuple(others), None)}
    return [last, (None, {"inner": others[0]})]


def _features(program: Program, writer: Writer, family: str) -> set[str]:
    """What decides which modes apply, of the statements that count."""
    found = {family}
    live = replace(program, statements=program.live()).without_unused()
    code = " ".join([each.code for each in live.layers] + [each.code for each in live.statements])
    if any(mark in code for mark in ("nn.Conv", "pool1d", "pool2d")):
        found.add("space")
    if any(mark in code for mark in ("scaled_dot_product", "MultiheadAttention", "TransformerEncoder")):
        found.add("attention")
    if any(mark in code for mark in ("nn.Linear", "nn.Conv", "nn.Embedding")):
        found.add("weights")
    if program.training and any("BatchNorm" in each.code for each in program.layers):
        found.add("batchnorm")
    if any(_TURNED in each.code for each in program.inputs):
        found.add("time_first")
    known = {each.name: each for each in writer.variables()}
    if any(known[name].open[:1] != (0,) for name in leaves(program.returned)):
        found.add("unbatched")
    return found
