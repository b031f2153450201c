"""Templates that change shapes, and that read elements by position."""

from __future__ import annotations

from tests.fuzz.programs.writer import Draft, Template, Variable, Writer


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
