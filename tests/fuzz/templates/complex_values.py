"""Templates of complex tensors: transforms, products with complex parameters, writes into parts, conjugates."""

from __future__ import annotations

from tests.fuzz.programs.writer import Draft, Variable, Writer

FEATURE = ("complex",)

TO_COMPLEX = (
    "torch.fft.rfft({0}, norm='ortho')",
    "torch.fft.fft({0}, dim={1}, norm='ortho')",
    "torch.fft.rfft({0}, dim={1}) * 0.3",
    "torch.complex({0}, {0}.tanh())",
    "torch.polar({0}.abs(), {0})",
    "{0} * torch.exp(1j * {0})",
    "{0} * (1 + 2j)",
    "{0}.to(torch.complex128)",
)

TO_REAL = (
    "{0}.abs()",
    "{0}.real",
    "{0}.imag",
    "{0}.real + {0}.imag",
    "torch.view_as_real({0}.resolve_conj())",
    "torch.view_as_real({0} * 1.0).flatten(-2)",
    "({0} * {0}.conj()).real * 0.3",
    "torch.fft.irfft({0}, n=6, norm='ortho')",
    "torch.fft.ifft({0}, norm='ortho').real",
    "torch.fft.irfft({0}, dim={1}) * 0.5",
)

COMPLEX = (
    "{0}.conj()",
    "{0}.conj() * 0.5 + {0}",
    "{0}.conj().resolve_conj()",
    "{0} * (0.3 - 0.4j)",
    "{0} * {0}.conj() * 0.3",
    "{0} / (1 + {0}.abs())",
    "{0}.clone()",
    "-{0}",
    "torch.complex({0}.imag, {0}.real)",
    "torch.cat(({0}, {0}.conj()), {1})",
    "{0}.transpose({1}, -1)",
    "{0}[..., :1] + {0}",
    "{0}.flip({1})",
    "{0}.sum({1}, keepdim=True) * 0.2",
    "{0}.mean({1}, keepdim=True)",
    "torch.view_as_complex(torch.view_as_real({0} * 1.0).tanh())",
)


def complex_value(writer: Writer, value: Variable) -> Draft | None:
    """Return a step towards complex numbers, among them, or back; mostly of a complex value where there is one."""
    rng = writer.rng
    late = writer.pick(lambda each: each.is_complex and each.dim >= 2 and each.open[:1] == (0,), recent=2)
    if late is None or rng.random() < 0.25:
        if not value.is_float or not value.is_batched or value.dim < 2:
            return None
        return Draft(rng.choice(TO_COMPLEX).format(value.name, rng.choice(value.closed)), features=FEATURE)
    form = rng.random()
    if form < 0.2 and late.is_batched:
        return _with_parameter(writer, late)
    if form < 0.5 and late.is_batched:
        return _written_in_parts(writer, late)
    dims = late.closed or [0]
    forms = TO_REAL if form < 0.8 else COMPLEX
    return Draft(rng.choice(forms).format(late.name, rng.choice(dims)), features=FEATURE)


def _parameter(writer: Writer, *shape: int) -> str:
    return writer.layer("weight", f"nn.Parameter(torch.randn({', '.join(map(str, shape))}, dtype=torch.complex128) * 0.5)")


def _with_parameter(writer: Writer, value: Variable) -> Draft:
    size = value.shape[-1]
    if writer.rng.random() < 0.4 and value.dim - 1 in value.closed:
        return Draft(f"{value.name} @ {_parameter(writer, size, writer.rng.choice((2, 3, size)))}", features=FEATURE)
    if writer.rng.random() < 0.4 and value.dim == 3:
        return Draft(f"torch.einsum('bsc,cd->bsd', {value.name}, {_parameter(writer, size, 3)})", features=FEATURE)
    return Draft(f"{value.name} * {_parameter(writer, size)}", features=FEATURE)


def _written_in_parts(writer: Writer, value: Variable) -> Draft:
    """Return kept modes written into a tensor of zeros, as Fourier operators do."""
    rng, size, name = writer.rng, value.shape[-1], value.name
    few = rng.randint(1, max(1, size - 1))
    fresh = rng.choice((f"torch.zeros_like({name})", f"{name}.new_zeros({name}.shape)", f"{name}.clone()"))
    weight = _parameter(writer, few) if rng.random() < 0.5 else "(0.5 + 0.2j)"
    write = rng.choice(
        (
            f"{{0}}[..., :{few}] = {name}[..., :{few}] * {weight}",
            f"{{0}}[..., :{few}] = {name}[..., -{few}:].conj() * {weight}",
            f"{{0}}[..., :{few}].add_({name}[..., :{few}] * {weight})",
            f"{{0}}[..., -{few}:].copy_({name}[..., :{few}] * {weight})",
            f"{{0}}[..., 0] = {name}[..., -1].conj()",
            "{0}[..., 0] = 1.0",
            f"{{0}}.real.copy_({name}.imag)",
            f"{{0}}[:, :1] = {name}[:, -1:] * 0.5",
        )
    )
    return Draft(fresh, features=FEATURE, then=(Draft(write, outputs=0),))
