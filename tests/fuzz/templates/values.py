"""Templates of lines that are no layers: elementwise, reductions, shapes, indexing, writes in place."""

from __future__ import annotations

from tests.fuzz.programs.writer import Draft, Template, Variable, Writer

__all__ = ["INDEXED", "POINTWISE", "REDUCED", "SHAPED", "WRITTEN"]

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


def permuted(writer: Writer, value: Variable) -> str | None:
    if value.dim < 3:
        return None
    first, second = writer.rng.sample(range(1 if writer.rng.random() < 0.85 else 0, value.dim), 2)
    order = list(range(1, value.dim))
    writer.rng.shuffle(order)
    return writer.rng.choice(
        (
            f"{value.name}.transpose({first}, {second})",
            f"{value.name}.permute(0, {', '.join(map(str, order))})",
            f"{value.name}.movedim({first}, {second})",
            f"{value.name}.transpose({first}, {second}).contiguous()",
        )
    )


def split_dimension(writer: Writer, value: Variable) -> str | None:
    choices = [dim for dim in value.closed if value.shape[dim] in {4, 6, 8, 9, 10, 12, 16} and dim > 0]
    if not choices or value.dim > 4:
        return None
    dim = writer.rng.choice(choices)
    factor = writer.rng.choice([each for each in (2, 3, 4) if value.shape[dim] % each == 0] or [1])
    parts = writer.rng.choice(((factor, value.shape[dim] // factor), (value.shape[dim] // factor, factor)))
    sizes = [f"{value.name}.shape[{place}]" if place in value.open else str(size) for place, size in enumerate(value.shape)]
    sizes[dim : dim + 1] = [writer.rng.choice((str(parts[0]), "-1")), str(parts[1])]
    return writer.rng.choice((f"{value.name}.reshape({', '.join(sizes)})", f"{value.name}.unflatten({dim}, ({parts[0]}, {parts[1]}))"))


def merged(writer: Writer, value: Variable) -> str | None:
    if value.dim < 3:
        return None
    first = writer.rng.randint(1 if writer.rng.random() < 0.75 else 0, value.dim - 2)
    return writer.rng.choice(
        (
            f"{value.name}.flatten({first}, {first + 1})",
            f"{value.name}.flatten(1)",
            f"{value.name}.reshape({value.name}.shape[0], -1)",
            f"{value.name}.flatten({first})",
        )
    )


def resized(writer: Writer, value: Variable) -> str | None:
    if not value.dim:
        return None
    dim = writer.rng.randint(1, value.dim)
    times = writer.rng.randint(2, 3)
    ones = ", ".join("1" if place != min(dim, value.dim - 1) else str(times) for place in range(value.dim))
    minus = ", ".join("-1" if place != dim else str(times) for place in range(value.dim + 1))
    return writer.rng.choice(
        (
            f"{value.name}.unsqueeze({dim})",
            f"{value.name}.squeeze({min(dim, value.dim - 1)})",
            f"{value.name}.unsqueeze({dim}).expand({minus})",
            f"{value.name}.repeat({ones})",
            f"{value.name}.repeat_interleave({times}, {min(dim, value.dim - 1)})",
            f"{value.name}[:, None]",
            f"{value.name}[..., None]",
        )
    )


def joined(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.closed or value.dim < 2:
        return None
    dim = writer.rng.choice(value.closed)

    def fits(other: Variable) -> bool:
        return (
            other.is_float
            and other.dim == value.dim
            and all(place == dim or other.shape[place] == value.shape[place] for place in range(value.dim))
        )

    other = writer.pick(fits, recent=8) or value
    same = other.shape == value.shape
    form = writer.rng.choice(
        (
            "torch.cat(({0}, {1}), {2})",
            "torch.cat([{1}, {0}, {0}], dim={2})",
            "torch.stack(({0}, {1}), {2})" if same else "torch.cat(({1}, {0}), {2})",
        )
    )
    return form.format(value.name, other.name, dim)


def divided(writer: Writer, value: Variable) -> Draft | str | None:
    choices = [dim for dim in value.closed if 2 <= value.shape[dim] <= 12]
    if not choices:
        return None
    dim = writer.rng.choice(choices)
    size = value.shape[dim]
    first = writer.rng.randint(1, size - 1)
    count = len(range(0, size, -(-size // 2)))
    if size <= 4 and writer.rng.random() < 0.3:
        return Draft(f"{value.name}.unbind({dim})", outputs=size)
    if writer.rng.random() < 0.3:
        return f"torch.cat({value.name}.chunk(2, {dim})[::-1], {dim})"
    return writer.rng.choice(
        (
            Draft(f"*{value.name}.chunk(2, dim={dim})", outputs=count),
            Draft(f"torch.split({value.name}, [{first}, {size - first}], {dim})", outputs=2),
            Draft(f"{value.name}.tensor_split([{first}], dim={dim})", outputs=2),
        )
    )


def contracted(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim not in {3, 4}:
        return None
    other = writer.pick(lambda each: each.is_float and each.shape == value.shape and each.open == value.open, recent=8) or value
    if value.dim == 3:
        weight = writer.parameter(value.shape[2], writer.rng.randint(2, 5))
        return writer.rng.choice(
            (
                f"torch.einsum('bsc,btc->bst', {value.name}, {other.name}) * 0.3",
                f"torch.einsum('bsc,cd->bsd', {value.name}, {weight})",
                f"torch.einsum('bsc,bsd->bcd', {value.name}, {other.name}) * 0.3",
                f"torch.bmm({value.name}, {other.name}.transpose(1, 2)) * 0.3",
                f"{value.name} @ {weight}",
                f"torch.matmul({value.name}.transpose(1, 2), {other.name}) * 0.2",
            )
        )
    weight = writer.parameter(value.shape[1], writer.rng.randint(2, 5))
    return writer.rng.choice(
        (
            f"torch.einsum('bchw,cd->bdhw', {value.name}, {weight})",
            f"torch.einsum('bchw,bcvw->bchv', {value.name}, {other.name}) * 0.3",
            f"({value.name} @ {other.name}.transpose(-1, -2)) * 0.2",
        )
    )


SHAPED: tuple[Template, ...] = (permuted, split_dimension, merged, resized, joined, joined, divided, divided, contracted)


def sliced(writer: Writer, value: Variable) -> str | None:
    choices = [dim for dim in value.closed if value.shape[dim] > 1]
    if not choices:
        return None
    dim = writer.rng.choice(choices)
    size = value.shape[dim]
    start = writer.rng.randint(0, size - 2)
    length = writer.rng.randint(1, size - start)
    front = ":, " * dim
    return writer.rng.choice(
        (
            f"{value.name}[{front}{start}:{start + length}]",
            f"{value.name}[{front}::2]",
            f"{value.name}[{front}{start}]",
            f"{value.name}[{front}-1:]",
            f"{value.name}.narrow({dim}, {start}, {length})",
            f"{value.name}.select({dim}, {start})",
            f"{value.name}[{front}{start + 1}:] - {value.name}[{front}:{size - start - 1}]",
            f"{value.name}.index_select({dim}, torch.tensor([{start}, {size - 1}, {start}]))",
            f"{value.name}[{front}[{start}, {size - 1}]]",
            f"{value.name}.unfold({dim}, {min(2, size)}, 1)",
            f"{value.name}.diff(dim={dim})",
        )
    )


def gathered(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.closed or value.dim < 2:
        return None
    dim = writer.rng.choice(value.closed)
    size = value.shape[dim]
    return writer.rng.choice(
        (
            "torch.gather({0}, {1}, {0}.argsort({1}))",
            "{0}.take_along_dim({0}.argmax({1}, keepdim=True), {1})",
            "torch.zeros_like({0}).scatter({1}, {0}.argmin({1}, keepdim=True), 1.0) * {0}",
            "torch.zeros_like({0}).scatter_add({1}, {0}.argsort({1}), {0})",
            "{0}.index_add({1}, torch.tensor([0, {3}]), {0}.narrow({1}, 0, 1).repeat_interleave(2, {1}))",
            "F.one_hot({0}.argmax({1}), {2}).double()",
            "{0}.masked_fill(torch.eye({2}, dtype=torch.bool)[0].view([-1] + [1] * ({0}.dim() - {1} - 1)), 0.0)",
        )
    ).format(value.name, dim, size, size - 1)


def padded(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or value.dim < 3:
        return None
    mode = writer.rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    amounts = [writer.rng.randint(0, 2) for _ in range(4 if value.dim == 4 else 2)]
    return f'F.pad({value.name}, {tuple(amounts)}, mode="{mode}")'


def triangular(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or value.dim < 3:
        return None
    return writer.rng.choice(("{0}.tril()", "{0}.triu(1)", "{0}.diagonal(dim1=-2, dim2=-1)", "{0}.tril(-1) + {0}")).format(value.name)


INDEXED: tuple[Template, ...] = (sliced, sliced, sliced, gathered, padded, triangular)


def write_in_place(writer: Writer, value: Variable) -> Draft | None:
    """Write into a value or into a view of one."""
    if not value.is_float or value.name.startswith("x"):
        return None
    choices = [dim for dim in value.closed if value.shape[dim] > 1]
    dim = writer.rng.choice(choices) if choices else 0
    size = value.shape[dim] if choices else 1
    start = writer.rng.randint(0, max(0, size - 2))
    front = ":, " * dim
    views = ["{0}"]
    if choices:
        views += [
            f"{{0}}[{front}{start}:{start + 1}]",
            f"{{0}}[{front}::2]",
            f"{{0}}.narrow({dim}, {start}, 1)",
            f"{{0}}.select({dim}, {start})",
            f"{{0}}.transpose({dim}, -1)",
            f"{{0}}.chunk(2, {dim})[0]",
            f"{{0}}[{front}{start}]",
        ]
    view = writer.rng.choice(views).format(value.name)
    action = writer.rng.choice(
        (
            ".mul_(2.0)",
            ".add_(1.0)",
            ".relu_()",
            ".sub_(0.3)",
            ".clamp_(-1.0, 1.0)",
            ".tanh_()",
            ".zero_()",
            ".fill_(0.5)",
            ".div_(1.5)",
            ".neg_()",
            ".lerp_(torch.tensor(1.0), 0.3)",
            ".addcmul_(torch.tensor(1.0), torch.tensor(0.5))",
        )
    )
    if choices and writer.rng.random() < 0.25:
        return Draft(
            f"{value.name}[{front}{start}] = {writer.rng.choice(('0.0', f'{value.name}[{front}-1].clone() * 0.5', '1.0'))}", outputs=0
        )
    return Draft(view + action, outputs=0)


def write_result(writer: Writer, value: Variable) -> Draft | str | None:
    """Write a value into another of its shape, or into fresh memory."""
    if not value.is_float or not value.closed:
        return None
    other = writer.pick(lambda each: each.is_float and each.shape == value.shape and not each.name.startswith("x"), recent=8)
    form = writer.rng.random()
    if other is not None and other.name != value.name and form < 0.5:
        return Draft(
            f"{other.name}{writer.rng.choice(('.add_({0})', '.mul_({0}.sigmoid())', '.copy_({0})', '[:] = {0}', ' += {0}'))}".format(
                value.name
            ),
            outputs=0,
        )
    dim = writer.rng.choice(value.closed)
    return writer.rng.choice(
        (
            "torch.zeros_like({0}).copy_({0})",
            "torch.empty_like({0}).fill_(0.3).add_({0})",
            "{0}.clone().mul_(0.5)",
            "F.relu({0} * 1.0, inplace=True)",
            "F.dropout({0}, 0.0)",
            "torch.zeros_like({0}).index_add_({1}, torch.tensor([0]), {0}.narrow({1}, 0, 1))",
            "{0}.clone().masked_fill_({0} > 0.5, 0.1)",
            "{0}.clone().index_fill_({1}, torch.tensor([0]), 0.2)",
            "{0}.new_full({0}.shape, 0.1).add_({0}, alpha=0.7)",
            "torch.zeros_like({0}).scatter_({1}, {0}.argmax({1}, keepdim=True), 1.0) + {0}",
        )
    ).format(value.name, dim)


def write_buffer(writer: Writer, value: Variable) -> Draft | None:
    """Return a buffer that the model writes."""
    if not value.is_float or not value.is_batched or value.dim < 2 or writer.rng.random() < 0.4:
        return None
    size = value.shape[-1]
    if value.dim - 1 in value.open:
        return None
    dims = tuple(range(value.dim - 1))
    buffer = writer.buffer(f"torch.zeros({size})")
    kind = writer.rng.random()
    if kind < 0.35:
        return Draft(f"{writer.buffer('torch.zeros((), dtype=torch.long)')}.add_(1)", outputs=0, features=("buffer",))
    if kind < 0.7:
        code = f"{buffer}.mul_(0.9).add_(0.1 * {value.name}.detach().mean({dims}))"
    else:
        code = f"{buffer}.copy_({value.name}.detach().amax({dims}))"
    return Draft(code, outputs=0, features=("buffer", "mixes"))


WRITTEN: tuple[Template, ...] = (write_in_place, write_in_place, write_in_place, write_result, write_result, write_buffer)
