"""Templates of lines that are no layers: elementwise functions and reductions."""

from __future__ import annotations

from tests.fuzz.programs.writer import Draft, Template, Variable, Writer

FUNCTIONS = (
    "F.relu({0})",
    "F.gelu({0})",
    'F.gelu({0}, approximate="tanh")',
    "F.silu({0})",
    "torch.tanh({0})",
    "{0}.sigmoid()",
    "F.softplus({0})",
    "F.elu({0})",
    "F.leaky_relu({0}, 0.2)",
    "F.hardswish({0})",
    "F.mish({0})",
    "F.softsign({0})",
    "F.logsigmoid({0})",
    "F.hardtanh({0}, -0.7, 0.9)",
    "{0}.abs()",
    "-{0}",
    "{0}.sin() * 0.8",
    "{0} * 0.7 + 0.1",
    "1.5 - {0}",
    "{0} ** 2 * 0.3",
    "torch.exp(-{0}.abs())",
    "torch.log1p({0}.abs())",
    "{0} / (1 + {0}.abs())",
    "torch.sqrt({0} * {0} + 1)",
    "torch.rsqrt({0} * {0} + 1)",
    "{0}.clamp(-1.0, 1.0)",
    "{0}.clamp(min=-0.5)",
    "{0}.erf()",
    "torch.atan({0})",
    "torch.where({0} > 0, {0}, 0.1 * {0})",
    "{0}.masked_fill({0} > 1, 0.5)",
    "{0}.masked_fill({0} < -1, -0.25) + {0}.detach()",
    "{0}.detach() * 0.3 + {0}",
    "{0}.clone()",
    "torch.zeros_like({0}) + {0}",
    "torch.ones_like({0}) * 0.5 + {0}",
    "({0} > 0).to({0}.dtype) * {0}",
    "torch.lerp({0}, {0}.tanh(), 0.3)",
    "torch.addcmul({0}, {0}, {0}, value=0.1)",
    "{0}.contiguous()",
    "torch.nan_to_num({0})",
    "{0}.sign() * 0.5 + {0}",
    "{0}.relu() - {0}.neg().relu() * 0.1",
    "{0}.new_zeros({0}.shape) + {0}",
    "torch.stack(({0}, {0} * 0.5)).sum(0)",
)

BINARY = (
    "{0} + {1}",
    "{0} - {1}",
    "{0} * {1}",
    "{0} + 0.5 * {1}",
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
    "torch.where({0} > {1}, {0}, {1})",
    "{0} * {1}.sigmoid()",
    "{0} / ({1} ** 2 + 1)",
    "torch.add({0}, {1}, alpha=0.3)",
    "torch.sub({1}, {0})",
    "torch.hypot({0}, {1} + 2)",
)


def one_operand(writer: Writer, value: Variable) -> str | None:
    return writer.rng.choice(FUNCTIONS).format(value.name) if value.is_float else None


def two_operands(writer: Writer, value: Variable) -> str | None:
    if not value.is_float:
        return None
    other = writer.pick(lambda each: each.is_float and each.shape == value.shape and each.open == value.open, recent=8)
    if other is None or (other.name == value.name and writer.rng.random() < 0.8):
        other = writer.pick(lambda each: each.is_float and each.dim <= value.dim, recent=8)
    return writer.rng.choice(BINARY).format(value.name, other.name) if other else None


def with_parameter(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.closed:
        return None
    dim = writer.rng.choice(value.closed)
    shape = [value.shape[dim]] + [1] * (value.dim - dim - 1)
    weight = writer.parameter(*shape)
    return writer.rng.choice(("{0} * {1}", "{0} + {1}", "{0} - {1}.tanh()", "torch.addcmul({0}, {1}, {1})")).format(value.name, weight)


def with_buffer(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.closed:
        return None
    dim = writer.rng.choice(value.closed)
    shape = ", ".join(map(str, [value.shape[dim]] + [1] * (value.dim - dim - 1)))
    return writer.rng.choice(("{0} * {1}", "{0} + {1}", "{0} - {1}.cos()")).format(value.name, writer.buffer(f"torch.randn({shape})"))


def with_constant(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or value.dim < 2 or value.dim - 1 in value.open:
        return None
    size, dim = value.shape[-1], writer.rng.choice(value.closed)
    return writer.rng.choice(
        (
            f"{value.name} + torch.arange({size}) * 0.1",
            f"{value.name} * torch.linspace(0.5, 1.5, {size})",
            f"{value.name} + torch.arange({value.name}.shape[-1], dtype={value.name}.dtype).cos()",
            f"{value.name} * torch.tensor({[round(0.3 * step, 2) for step in range(size)]})",
            f"{value.name} / {value.name}.shape[{dim}]",
            f"{value.name} + torch.ones({value.name}.shape[0], *[1] * {value.dim - 1})",
        )
    )


def cast(writer: Writer, value: Variable) -> str | None:
    if value.is_float:
        return writer.rng.choice(
            ("({0} > 0.1).double() + {0}", "{0} * ({0} > 0)", "{0}.round().long().clamp(-3, 3) * 0.2 + {0}", "({0} > 0).long().to({0})")
        ).format(value.name)
    return f"{value.name}.double() * 0.1"


def dropped(writer: Writer, value: Variable) -> Draft | None:
    """Dropout, also of values whose memory has another order than their dimensions."""
    if not value.is_float or not writer.training or value.dim < 2:
        return None
    form = writer.rng.choice(
        (
            "F.dropout({0}, 0.3)",
            "F.dropout({0}.transpose(-1, -2), 0.4)",
            "F.alpha_dropout({0}, 0.2, True)",
            "{0} + 0.1 * torch.rand_like({0})",
        )
    )
    return Draft(form.format(value.name), features=("dropout",))


POINTWISE: tuple[Template, ...] = (
    one_operand,
    one_operand,
    two_operands,
    two_operands,
    with_parameter,
    with_buffer,
    with_constant,
    cast,
    dropped,
)


def reduced(writer: Writer, value: Variable) -> str | Draft | None:
    if not value.is_float or not value.closed or value.dim < 2:
        return None
    dim, keep = writer.rng.choice(value.closed), writer.rng.random() < 0.4
    if writer.rng.random() < 0.3:
        dim -= value.dim
    form = writer.rng.choice(
        (
            "{0}.mean({1}{2})",
            "{0}.sum({1}{2}) * 0.3",
            "{0}.amax({1}{2})",
            "{0}.amin({1}{2})",
            "{0}.var({1}{2}, unbiased=False)",
            "({0} ** 2 + 0.1).mean({1}{2}).sqrt()",
            "torch.logsumexp({0}, {1}{2})",
            "torch.linalg.vector_norm({0} + 0.3, dim={1}{2})",
            "{0}.max({1}{2}).values",
            "{0}.median({1}{2})[0]",
            "({0} > 0).sum({1}{2}).double()",
            "{0}.argmax({1}{2}).double() * 0.1",
            "({0} > 0.2).any({1}{2}).double()",
            "{0}.tanh().prod({1}{2})",
        )
    )
    return form.format(value.name, dim, ", keepdim=True" if keep else "")


def reduced_over_several(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or len(value.closed) < 2:
        return None
    dims = tuple(sorted(writer.rng.sample(value.closed, 2)))
    form = writer.rng.choice(("{0}.mean({1}{2})", "{0}.sum({1}{2}) * 0.1", "{0}.amax({1}{2})", "torch.var({0}, {1}, correction=0{2})"))
    return form.format(value.name, dims, writer.rng.choice(("", ", keepdim=True")))


def normalized(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.closed:
        return None
    dim = writer.rng.choice(value.closed)
    return writer.rng.choice(
        (
            "F.softmax({0}, {1})",
            "F.log_softmax({0}, dim={1}) * 0.2",
            "F.normalize({0} + 0.2, dim={1})",
            "{0} - {0}.mean({1}, keepdim=True)",
            "{0} / (1 + {0}.abs().amax({1}, keepdim=True))",
            "{0}.cumsum({1}) * 0.4",
            "{0}.tanh().cumprod({1})",
            "{0}.flip({1})",
            "{0}.roll(1, {1})",
            "{0}.roll(-2, dims={1}) + {0}",
            "F.glu(torch.cat(({0}, {0} * 0.5), {1}), {1})",
            "{0}.cummax({1}).values",
            "{0}.logcumsumexp({1}) * 0.3",
        )
    ).format(value.name, dim)


def sorted_values(writer: Writer, value: Variable) -> str | Draft | None:
    if not value.is_float or not value.closed:
        return None
    dim = writer.rng.choice(value.closed)
    few = writer.rng.randint(1, max(1, value.shape[dim] - 1))
    return writer.rng.choice(
        (
            f"{value.name}.sort({dim}).values",
            f"{value.name}.sort({dim}, descending=True)[0]",
            f"{value.name}.topk({few}, dim={dim}).values",
            f"{value.name}.gather({dim}, {value.name}.detach().argsort({dim}))",
            Draft(f"{value.name}.topk({few}, dim={dim})", outputs=2),
            Draft(f"torch.max({value.name}, {dim})", outputs=2),
        )
    )


def over_the_batch(writer: Writer, value: Variable) -> Draft | None:
    """Mix rows of the batch: rare, and with few ways to be cut."""
    if not value.is_float or not value.is_batched or value.dim < 2 or writer.rng.random() < 0.8:
        return None
    form = writer.rng.choice(
        ("{0} - {0}.mean(0)", "{0}.mean(0)", "{0} + {0}.sum() * 0.01", "F.softmax({0}, 0)", "{0} * {0}.amax(0)", "{0}.flip(0)")
    )
    return Draft(form.format(value.name), features=("mixes",))


REDUCED: tuple[Template, ...] = (reduced, reduced, normalized, normalized, reduced_over_several, sorted_values, over_the_batch)
