"""Templates that write in place: into values, fresh memory and buffers."""

from __future__ import annotations

from tests.fuzz.programs.writer import Draft, Template, Variable, Writer


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
