"""Templates of what a forward does besides its results, and of what only some calls do: writes into arguments, tensors kept on modules."""

from __future__ import annotations

from tests.fuzz.programs.writer import Draft, Template, Variable, Writer
from tests.fuzz.templates.modules import KEPT


def by_row(value: Variable, code: str) -> str:
    """Return an expression with rows as a number for each row, of a shape that is broadcast to the value's."""
    return f"{code}.flatten(1).mean(1).reshape({', '.join(['-1'] + ['1'] * (value.dim - 1))})"


def write_argument(writer: Writer, value: Variable) -> Draft | None:
    """Write into an argument, or into a part of it; what is computed from then on mostly reads it."""
    places = [each for each in writer.written_tensors() if each[1].is_batched or not each[1].dim]
    if not value.is_float or not value.is_batched or not places:
        return None
    rng = writer.rng
    place, target = rng.choice(places)
    source = value.name if rng.random() < 0.15 else f"{value.name}.detach()"
    if not target.dim:
        code = rng.choice((f"{place}.add_(1)", f"{place} += 0.5", f"{place}.copy_({source}.mean())"))
        features: tuple[str, ...] = ("arguments", "mixes") if "mean" in code else ("arguments",)
        return Draft(code, outputs=0, features=features)
    row = by_row(target, source)
    forms = [
        f"{place}.add_({row})",
        f"{place} += {row}",
        f"{place}.mul_(0.5)",
        f"{place}.copy_({row}.expand_as({place}))",
        f"{place}[:] = {row}",
        f"{place}[..., 0] = {source}.flatten(1).mean(1){'[:, None]' * (target.dim - 2)}",
    ]
    if target.dim == 3 and target.shape[1] == 6:
        start = rng.randint(0, 3)
        forms = [
            f"{place}[:, {start}:{start + 2}] = {row}",
            f"{place}[:, {start}].copy_({row}[:, 0])",
            f"{place}[:, :, 1] += {row}[:, 0]",
            *forms[:3],
        ]
        if "x6" in writer.inputs:
            forms += [f"{place}[:, x6] = {row}", f"{place}.index_copy_(1, x6, {row}.expand(-1, 1, {target.shape[2]}))"] * 3
    code = rng.choice(forms)
    if rng.random() < 0.25:
        return Draft(code, outputs=0, features=("arguments",))
    return Draft(code, outputs=0, features=("arguments",), then=(Draft(f"{value.name} + {by_row(value, place)}"),))


def keep_on_module(writer: Writer, value: Variable) -> Draft | None:
    """Keep a tensor on the model or on a submodule of it."""
    if not value.is_float or not value.is_batched or value.dim < 2 or value.dim - 1 in value.open:
        return None
    rng, size = writer.rng, value.shape[-1]
    form = rng.random()
    if form < 0.3:
        return _keep_by_statement(writer, value)
    if form < 0.45:
        name = writer.layer("routes", f"Routes({size}, {rng.choice((2, 3, 4))})").removeprefix("self.")
        writer.keep(*(f"{name}.{each}" for each in KEPT["Routes"]))
        return Draft(f"self.{name}({value.name})", features=("keeps", "mixes"))
    kind = rng.choice(("Keeps", "Keeps", "Collects", "Remembers"))
    out = rng.choice((size, size, 3, 5))
    name = writer.layer(kind.lower(), f"{kind}(nn.Linear({size}, {out}))").removeprefix("self.")
    writer.keep(*(f"{name}.{each}" for each in KEPT[kind]))
    return Draft(f"self.{name}({value.name})", features=("keeps",))


def _keep_by_statement(writer: Writer, value: Variable) -> Draft:
    """Return an assignment in the model's own forward, to itself or to a layer."""
    rng = writer.rng
    what = rng.choice(("({0} ** 2).mean()", "{0}.mean()", "{0}", "{0}.detach()", "{0}.tanh()", "{0}.flatten(1).mean(1)", "{0}.sum()"))
    layers = [each.name for each in writer.layers if each.name.startswith(("linear", "conv", "norm", "block"))]
    form = rng.random()
    if layers and form < 0.35:
        place = f"{rng.choice(layers)}.l_aux"
    elif form < 0.5:
        place = f"{writer.layer('kept', '{}').removeprefix('self.')}['{rng.choice('ab')}']"
    elif form < 0.75:
        place = writer.layer("kept", "None").removeprefix("self.")
    else:
        place = f"kept{rng.randint(100, 199)}"
    writer.keep(place)
    mixes = ("mixes",) if "sum()" in what else ()
    return Draft(f"self.{place} = {what.format(value.name)}", outputs=0, features=("keeps", *mixes))


def call_sometimes(writer: Writer, value: Variable) -> Draft | None:
    """Return a layer that only the calls with the optional input use, or one layer instead of another."""
    if "x8" not in writer.inputs or not value.is_float or not value.is_batched or value.dim < 2 or value.dim - 1 in value.open:
        return None
    size, name = value.shape[-1], value.name
    is_tensor = writer.inputs["x8"].is_float
    condition = "x8 is not None" if is_tensor else "x8"
    form = writer.rng.random()
    if is_tensor and form < 0.7:
        encoder = writer.layer("encoder", f"nn.Linear(4, {size})")
        ones = ", ".join(["-1"] + ["1"] * (value.dim - 2) + [str(size)])
        return Draft(f"({name} + {encoder}(x8).reshape({ones})) if {condition} else {name}", features=("switch",))
    if form < 0.4 or is_tensor:
        layer = writer.layer("linear", f"nn.Linear({size}, {size})")
        return Draft(f"{name} + {layer}({name}) if {condition} else {name}", features=("switch",))
    out = writer.rng.choice((3, 4, size))
    first, second = (writer.layer("linear", f"nn.Linear({size}, {out})") for _ in range(2))
    return Draft(f"{first}({name}) if {condition} else {second}({name}).tanh()", features=("switch",))


def read_dataclass(writer: Writer, value: Variable) -> Draft | None:
    """Read the fields of a dataclass."""
    if "x7" not in writer.inputs or not value.is_float or not value.is_batched:
        return None
    right = "x7.right[0]" if "[" in writer.inputs["x7"].code else "x7.right"
    form = writer.rng.choice(("{0} + {1}", "{0} * {2}", "{0} * {1}.tanh() + {2}"))
    return Draft(form.format(value.name, by_row(value, "x7.left"), by_row(value, right)), features=("taken dataclass",))


def add_positions(writer: Writer, value: Variable) -> Draft | None:
    """Add numbers along a dimension that is as long as the batch by accident."""
    dims = [dim for dim in value.closed if "x4" in writer.inputs and value.shape[dim] == writer.rows]
    if not dims or not value.is_float or not value.is_batched:
        return None
    dim = writer.rng.choice(dims)
    shape = ", ".join(["-1"] + ["1"] * (value.dim - dim - 1))
    if writer.inputs["x4"].is_float:
        return Draft(f"{value.name} + x4.reshape({shape})", features=("accident",))
    table = writer.layer("positions", f"nn.Embedding({writer.rows}, 1)")
    return Draft(f"{value.name} + {table}(x4).reshape({shape})", features=("accident",))


def drop_again(writer: Writer, value: Variable) -> Draft | None:
    """Dropout of a late value, so that every stage has some."""
    if not value.is_float or not writer.training or value.dim < 2:
        return None
    if writer.rng.random() < 0.5:
        return Draft(f"{writer.layer('dropout', 'nn.Dropout(0.3)')}({value.name})", features=("dropout", "dropouts"))
    form = writer.rng.choice(("F.dropout({0}, 0.25)", "F.dropout({0}, 0.5)", "{0} + torch.bernoulli(torch.full_like({0}, 0.5))"))
    return Draft(form.format(value.name), features=("dropout", "dropouts"))


THEMES: dict[str, Template] = {
    "arguments": write_argument,
    "keeps": keep_on_module,
    "switch": call_sometimes,
    "taken dataclass": read_dataclass,
    "accident": add_positions,
    "dropouts": drop_again,
}
"""The template of each theme that statements realise."""
