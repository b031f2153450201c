"""A random case from a seed: a program, and a way to partition it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tests.fuzz.programs.callers import draw_usage
from tests.fuzz.programs.configuration import Configuration, choose_configuration
from tests.fuzz.programs.inputs import FIRST_BATCH_SECOND, draw_inputs, with_other_inputs
from tests.fuzz.programs.program import Program, Usage, is_effect
from tests.fuzz.programs.structures import Record, Structure, leaves
from tests.fuzz.programs.training import draw_training, with_checkpoints
from tests.fuzz.programs.writer import Draft, Template, Variable, Writer
from tests.fuzz.templates.complex_values import complex_value
from tests.fuzz.templates.effects import THEMES
from tests.fuzz.templates.layers import IMAGE, SEQUENCE, VECTOR, used_again
from tests.fuzz.templates.shapes import INDEXED, SHAPED
from tests.fuzz.templates.values import POINTWISE, REDUCED
from tests.fuzz.templates.writes import WRITTEN

FAMILIES = ("image", "image", "sequence", "sequence", "tokens", "vector")

SHARES = {
    "arguments": 0.13,
    "keeps": 0.13,
    "views": 0.12,
    "complex": 0.11,
    "dropouts": 0.12,
    "dataclass": 0.1,
    "taken dataclass": 0.06,
    "batch second": 0.16,
    "accident": 0.1,
    "switch": 0.12,
    "freezes": 0.12,
}
"""How many programs have each theme; themes are drawn one by one, so that they meet."""

STATEMENTS = {"complex": complex_value, **THEMES}
"""The themes that lines of ``forward`` realise."""


@dataclass(frozen=True)
class Case:
    """A case: a model, and its partition."""

    program: Program
    configuration: Configuration


def generate(seed: int, processes: int | None = None) -> Case:
    """Return the case of a seed: of this number and nothing else. Call it with float64 as the default dtype.

    Args:
        processes: how many ranks the plan has, where each is a process; None: any number, all in one process.
    """
    rng = random.Random(seed)
    themes = {name for name, share in SHARES.items() if rng.random() < share}
    family = rng.choice(("sequence", "tokens", "image") if themes & {"accident"} else FAMILIES)
    rows = rng.choice((4, 4, 6, 8, 12))
    inputs = draw_inputs(rng, family, rows, themes)
    training = "dropouts" in themes or rng.random() < 0.75
    writer = Writer(rng, seed, rows, rng.choice((2 * rows, 3 * rows)), inputs, training=training)
    length = rng.randint(4, 12)
    for _ in range(6 * length):
        if len(writer.statements) >= length:
            break
        _write_one(writer, rng, family, themes)
    for theme in sorted(themes & STATEMENTS.keys()):
        _realise(writer, theme)
    _end_complex(writer)
    program = _finished(writer, rng, themes)
    program = replace(program, features=program.features | _features(program, writer, family))
    program = with_other_inputs(program, rng, themes)
    program = replace(program, features=program.features | _features_of_callers(program, themes))
    configuration = choose_configuration(random.Random(f"configuration of {seed}"), program, processes)
    training_rng = random.Random(f"training of {seed}")
    program = with_checkpoints(program, training_rng)
    configuration = draw_training(configuration, program, training_rng)
    drawn = {"by module"} if isinstance(configuration.recompute, tuple) else {f"recompute={configuration.recompute}"}
    drawn.add(configuration.precision or "float64")
    return Case(replace(program, features=program.features | drawn), configuration)


def _realise(writer: Writer, theme: str) -> None:
    """Write a line of a theme that has none so far."""
    for _ in range(40):
        if theme in writer.features:
            return
        _write_by(writer, STATEMENTS[theme], writer.pick(lambda each: each.is_float and each.is_batched, recent=2))


def _end_complex(writer: Writer) -> None:
    """Let a real value depend on the last complex one."""
    value = writer.pick(lambda each: each.is_complex and each.is_batched, recent=1)
    if value is not None and writer.rng.random() < 0.8:
        writer.write(Draft(writer.rng.choice(("{0}.abs()", "{0}.real + {0}.imag", "{0}.real")).format(value.name), features=("complex",)))


def _finished(writer: Writer, rng: random.Random, themes: AbstractSet[str]) -> Program:
    """Return the program with its results, and its use by a caller."""
    writer.drop_what_autograd_refuses()
    returned, target = _returned(writer, rng, themes)
    program = replace(writer.program, returned=returned, usage=Usage(target=target)).without_unused()
    return draw_usage(program, writer.kept, rng, themes)


def _write_by(writer: Writer, template: Template, value: Variable | None) -> None:
    """Write the line of a template, or none where it does not apply."""
    draft = template(writer, value) if value is not None else None
    if draft is None:
        writer.discard()
        return
    writer.write(Draft(draft) if isinstance(draft, str) else draft)


def _write_one(writer: Writer, rng: random.Random, family: str, themes: AbstractSet[str]) -> None:
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
    if value is None:
        return
    templates = [STATEMENTS[theme] for theme in sorted(themes & STATEMENTS.keys())]
    if templates and rng.random() < min(0.4, 0.2 * len(templates)):
        _write_by(writer, rng.choice(templates), writer.pick(lambda each: each.is_float, recent=2))
        return
    _write_by(writer, rng.choice(_templates(rng, value)), value)


def _embedding(writer: Writer) -> str | None:
    return next((each.name for each in writer.layers if "Embedding(11" in each.code), None)


def _templates(rng: random.Random, value: Variable) -> Sequence[Template]:
    """Return templates of one kind, the kinds weighted by the kind of value."""
    layers: Sequence[Template] = VECTOR
    if value.is_batched and value.dim == 4:
        layers = IMAGE
    elif value.is_batched and value.dim == 3:
        layers = SEQUENCE
    kinds = ((layers, 38), (POINTWISE, 18), (SHAPED, 12), (REDUCED, 9), (INDEXED, 8), (WRITTEN, 9), ((used_again,), 6))
    return rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]


def _returned(writer: Writer, rng: random.Random, themes: AbstractSet[str]) -> tuple[Structure, str]:
    """Return the last value, or a structure of several, mostly such as have rows; and the target of their loss."""
    values = [each for each in writer.variables() if not each.name.startswith("x")]
    batched = [each.name for each in values if (each.is_float or each.is_complex) and each.open and each.open[0] == 0]
    if not batched:
        return (values[-1].name if values else "x0"), Usage().target
    last = max(batched, key=writer.depth)
    batched.remove(last)
    batched.append(last)
    target = Usage().target
    if "views" in themes:
        last = _view(writer, last)
    if "batch second" in themes:
        last, target = _batch_second(writer, last)
    structure = _structure(rng, last, batched[:-1], [each.name for each in values])
    if "dataclass" in themes:
        structure = _as_record(rng, last, structure)
    return structure, target


def _view(writer: Writer, name: str) -> str:
    """Return a view of a value that has rows, or the value where none is possible."""
    value = writer.variable(name)
    if value is None or value.open != (0,):
        return name
    forms = [f"{name}.unsqueeze(1)", f"{name}.unsqueeze(-1)", f"{name}[:]", f"{name}.view({name}.shape)", f"{name}.view_as({name})"]
    if value.dim > 1:
        forms += [
            f"{name}.transpose(1, -1)",
            f"{name}[:, :1]",
            f"{name}[:, 0]",
            f"{name}.flatten(1)",
            f"{name}[..., -1]",
            f"{name}.chunk(2, 1)[0]",
        ]
    return _added(writer, name, writer.rng.choice(forms))


def _batch_second(writer: Writer, name: str) -> tuple[str, str]:
    """Return the value with its batch in dimension 1, and a target that has it there."""
    value = writer.variable(name)
    if value is None or value.open != (0,) or value.dim < 2 or value.shape[1] == writer.rows:
        return name, Usage().target
    turned = _added(writer, name, writer.rng.choice(("{0}.transpose(0, 1)", "{0}.transpose(0, 1).contiguous()")).format(name))
    return turned, f"torch.randn({value.shape[1]}, rows)" if turned != name else Usage().target


def _added(writer: Writer, name: str, code: str) -> str:
    """Return the variable of one more line, or the given one where the line does not run."""
    return writer.statements[-1].defines[0] if writer.write(Draft(code)) else name


def _structure(rng: random.Random, last: str, others: list[str], anything: list[str]) -> Structure:
    """Return one value, or several in a structure."""
    kind = rng.random()
    if kind < 0.55 or not others:
        return last
    others = rng.sample(others, min(len(others), rng.randint(1, 2)))
    if rng.random() < 0.15:
        others.append(rng.choice(anything))
    if kind < 0.7:
        return (last, *others)
    if kind < 0.8:
        return {"last": last, **{f"other{place}": name for place, name in enumerate(others)}}
    if kind < 0.9:
        return {"last": last, "nothing": None, "nested": (tuple(others), None)}
    return [last, (None, {"inner": others[0]})]


def _as_record(rng: random.Random, last: str, structure: Structure) -> Structure:
    """Return a dataclass of the results, alone, nested or inside another structure."""
    other = None if isinstance(structure, str) else structure
    return rng.choice((Record(last=last, other=other), Record(last=last, other=Record(last=last)), (Record(last=last), other)))


def _features(program: Program, writer: Writer, family: str) -> set[str]:
    """Return the features that decide which modes apply, of the live statements."""
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
    known = {each.name: each for each in writer.variables()}
    second = program.usage.target != Usage().target
    if any(known[name].open[:1] != (0,) and not (second and known[name].open == (1,)) for name in leaves(program.returned)):
        found.add("unbatched")
    return found


def _features_of_callers(program: Program, themes: AbstractSet[str]) -> set[str]:
    """Return the features by which a campaign counts arguments, results and actions of callers."""
    usage, statements = program.usage, " ".join(each.code for each in program.statements)
    return {
        name
        for name, is_there in (
            ("time_first", any(FIRST_BATCH_SECOND in each.code for each in program.inputs)),
            ("batch second", FIRST_BATCH_SECOND in "".join(each.code for each in program.inputs) or usage.target != Usage().target),
            ("writes arguments", any(is_effect(each) and each.code.startswith("x") for each in program.statements)),
            ("kept in loss", bool(usage.in_loss)),
            ("changed outputs", bool(usage.changes)),
            ("dataclass", "dataclass" in themes),
            ("freezes", bool(usage.frozen or usage.frozen_later)),
            ("switch called", usage.switch is not None and "x8" in statements),
            ("batch_dims", bool(usage.batch_dims)),
        )
        if is_there
    }
