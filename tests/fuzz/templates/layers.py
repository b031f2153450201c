"""Templates of layers: linear, convolution, pooling, normalisation, attention, recurrence."""

from __future__ import annotations

from tests.fuzz.programs.writer import Draft, Template, Variable, Writer

REUSED = ("conv", "linear", "norm", "block", "encoder", "prelu", "keeps", "collects", "routes")
"""How the names of layers begin that a program may call again."""

PADDINGS = ("zeros", "zeros", "zeros", "circular", "reflect", "replicate")


def linear(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or value.dim < 2 or value.dim - 1 in value.open:
        return None
    size, out = value.shape[-1], writer.rng.choice((3, 4, 5, 6, 8, 12, value.shape[-1], value.shape[-1]))
    bias = writer.rng.choice(("", "", ", bias=False"))
    if writer.rng.random() < 0.25:
        block = (
            f"nn.Sequential(nn.Linear({size}, {out}{bias}), nn.{writer.rng.choice(('ReLU', 'GELU', 'Tanh'))}(), nn.Linear({out}, {size}))"
        )
        return f"{writer.layer('block', block)}({value.name})"
    return f"{writer.layer('linear', f'nn.Linear({size}, {out}{bias})')}({value.name})"


def tied_linear(writer: Writer, value: Variable) -> str | None:
    """Return a linear layer and its weight transposed, or a second layer that shares it."""
    if not value.is_float or value.dim < 2 or value.dim - 1 in value.open:
        return None
    size, out = value.shape[-1], writer.rng.choice((4, 5, 6, 8))
    first = writer.layer("linear", f"nn.Linear({size}, {out})")
    if writer.rng.random() < 0.5:
        return f"F.linear({first}({value.name}).tanh(), {first}.weight.t())"
    second = writer.layer("linear", f"nn.Linear({size}, {out}, bias=False)")
    name = second.removeprefix("self.")
    writer.amend(name, f"{second}.weight = {first}.weight")
    return f"{first}({value.name}) * 0.5 + {second}({value.name}.tanh())"


def layer_norm(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or value.dim < 2 or value.dim - 1 in value.open or value.shape[-1] < 2:
        return None
    size = value.shape[-1]
    kind = writer.rng.choice((f"nn.LayerNorm({size})", f"nn.RMSNorm({size})", f"nn.LayerNorm({size}, bias=False)"))
    if value.dim >= 3 and writer.rng.random() < 0.2 and value.dim - 2 in value.closed:
        kind = f"nn.LayerNorm(({value.shape[-2]}, {size}))"
    return f"{writer.layer('norm', kind)}({value.name})"


def channel_norm(writer: Writer, value: Variable) -> Draft | str | None:
    if not value.is_float or not value.is_batched or value.dim not in {2, 3, 4}:
        return None
    channels, dims = value.shape[1], {2: "1d", 3: "1d", 4: "2d"}[value.dim]
    kind = writer.rng.random()
    if kind < 0.4:
        options = writer.rng.choice(("", "", ", momentum=0.3", ", momentum=None", ", affine=False", ", track_running_stats=False"))
        return Draft(f"{writer.layer('norm', f'nn.BatchNorm{dims}({channels}{options})')}({value.name})", features=("batchnorm",))
    if kind < 0.55 and value.dim > 2:
        return f"{writer.layer('norm', f'nn.InstanceNorm{dims}({channels}, affine=True)')}({value.name})"
    groups = writer.rng.choice([each for each in (1, 2, 3, 4) if channels % each == 0])
    return f"{writer.layer('norm', f'nn.GroupNorm({groups}, {channels})')}({value.name})"


def prelu(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim < 2:
        return None
    return f"{writer.layer('prelu', f'nn.PReLU({writer.rng.choice((1, value.shape[1]))})')}({value.name})"


def bilinear(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 2:
        return None
    size = value.shape[-1]
    return f"{writer.layer('bilinear', f'nn.Bilinear({size}, {size}, 3)')}({value.name}, {value.name}.tanh())"


VECTOR: tuple[Template, ...] = (linear, linear, linear, tied_linear, layer_norm, channel_norm, prelu, bilinear)


def conv1d(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 3:
        return None
    return convolution(writer, value, "1d")


def convolution(writer: Writer, value: Variable, dims: str) -> str:
    channels = value.shape[1]
    groups = writer.rng.choice([1, 1, 1] + [each for each in (2, 3, channels) if channels % each == 0])
    out = groups * writer.rng.randint(1, max(1, 8 // groups))
    kernel = writer.rng.choice((1, 2, 3, 3, 3, 4, 5))
    options = [f"stride={writer.rng.choice((1, 1, 1, 2, 3))}", f"dilation={writer.rng.choice((1, 1, 1, 2))}", f"groups={groups}"]
    options.append(f"padding={writer.rng.randint(0, kernel // 2 + 1)}")
    if (mode := writer.rng.choice(PADDINGS)) != "zeros":
        options.append(f'padding_mode="{mode}"')
    elif writer.rng.random() < 0.15:
        options[0], options[3] = "stride=1", 'padding="same"'
    if writer.rng.random() < 0.2:
        options.append("bias=False")
    options = [each for each in options if each not in {"stride=1", "dilation=1", "groups=1", "padding=0"}]
    size = f"({kernel}, {writer.rng.choice((1, 3))})" if dims == "2d" and writer.rng.random() < 0.15 else str(kernel)
    constructor = f"nn.Conv{dims}({', '.join([str(channels), str(out), size, *options])})"
    return f"{writer.layer('conv', constructor)}({value.name})"


def conv2d(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 4:
        return None
    return convolution(writer, value, "2d")


def residual(writer: Writer, value: Variable) -> str | None:
    """Return a convolution that keeps sizes, plus its input."""
    if not value.is_float or not value.is_batched or value.dim != 4:
        return None
    channels = value.shape[1]
    conv = writer.layer("conv", f"nn.Conv2d({channels}, {channels}, 3, padding=1)")
    return writer.rng.choice(("{0} + {1}(F.relu({0}))", "F.relu({1}({0}) + {0})", "{1}({1}({0}).tanh())")).format(value.name, conv)


def transposed(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim not in {3, 4} or max(value.shape[2:]) > 9:
        return None
    channels, stride = value.shape[1], writer.rng.choice((1, 2, 2, 3))
    kernel = writer.rng.randint(max(2, stride), stride + 2)
    options = f"stride={stride}, padding={writer.rng.randint(0, 1)}"
    if stride > 1 and writer.rng.random() < 0.4:
        options += ", output_padding=1"
    if channels % 2 == 0 and writer.rng.random() < 0.3:
        options += ", groups=2"
    constructor = f"nn.ConvTranspose{value.dim - 2}d({channels}, {writer.rng.choice((2, 4))}, {kernel}, {options})"
    return f"{writer.layer('deconv', constructor)}({value.name})"


def pooled(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim not in {3, 4}:
        return None
    dims = value.dim - 2
    return writer.rng.choice(
        (
            f"F.max_pool{dims}d({value.name}, 2)",
            f"F.max_pool{dims}d({value.name}, 3, stride=2, padding=1)",
            f"F.max_pool{dims}d({value.name}, 2, stride=1, ceil_mode=True)",
            f"F.max_pool{dims}d({value.name}, 2, dilation=2)",
            f"F.avg_pool{dims}d({value.name}, 3, stride=1, padding=1)",
            f"F.avg_pool{dims}d({value.name}, 2)",
            f"F.avg_pool{dims}d({value.name}, 3, stride=2, padding=1, count_include_pad=False)",
            f"F.avg_pool{dims}d({value.name}, 2, ceil_mode=True)",
            f"F.adaptive_avg_pool{dims}d({value.name}, {writer.rng.choice((1, 2, 3, 5))})",
            f"F.adaptive_max_pool{dims}d({value.name}, {writer.rng.choice((1, 2, 3))})",
            f"F.lp_pool{dims}d({value.name} + 2.5, 2, 2)",
        )
    )


def interpolated(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 4:
        return None
    height, width = writer.rng.randint(3, 11), writer.rng.randint(3, 11)
    return writer.rng.choice(
        (
            f"F.interpolate({value.name}, scale_factor=2)",
            f'F.interpolate({value.name}, scale_factor=2, mode="bilinear")',
            f'F.interpolate({value.name}, scale_factor=2, mode="bilinear", align_corners=True)',
            f"F.interpolate({value.name}, size=({height}, {width}))",
            f'F.interpolate({value.name}, size=({height}, {width}), mode="bilinear")',
            f'F.interpolate({value.name}, size=({height}, {width}), mode="bicubic")',
            f'F.interpolate({value.name}, size={value.name}.shape[2:], mode="area")',
            f'F.interpolate({value.name}, size=({height}, {width}), mode="nearest-exact")',
        )
    )


def shuffled(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 4:
        return None
    channels = value.shape[1]
    forms = [f"F.unfold({value.name}, 3, padding=1)", f"F.unfold({value.name}, 2, stride=2)", f"F.local_response_norm({value.name}, 3)"]
    if channels % 4 == 0:
        forms.append(f"F.pixel_shuffle({value.name}, 2)")
    if value.shape[2] % 2 == 0 and value.shape[3] % 2 == 0:
        forms.append(f"F.pixel_unshuffle({value.name}, 2)")
    if channels % 2 == 0:
        forms.append(f"F.channel_shuffle({value.name}, 2)")
    return writer.rng.choice(forms)


def as_sequence(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 4 or writer.rng.random() < 0.5:
        return None
    return f"{value.name}.flatten(2).transpose(1, 2)"


IMAGE: tuple[Template, ...] = (
    conv2d,
    conv2d,
    conv2d,
    residual,
    residual,
    transposed,
    pooled,
    pooled,
    interpolated,
    shuffled,
    channel_norm,
    channel_norm,
    as_sequence,
    prelu,
)


def attention(writer: Writer, value: Variable) -> str | Draft | None:
    """Attention over dimension 1, decomposed or as a module."""
    if not value.is_float or not value.is_batched or value.dim != 3 or not 4 <= value.shape[1] <= 16:
        return None
    size, dropout = value.shape[2], dropped_share(writer)
    heads = writer.rng.choice([each for each in (1, 2, 3, 4) if size % each == 0])
    form = writer.rng.random()
    if form < 0.25:
        module = writer.layer("attention", f"nn.MultiheadAttention({size}, {heads}, dropout={dropout}, batch_first=True)")
        called = f"{module}({value.name}, {value.name}, {value.name}, need_weights={writer.rng.choice((True, False))})[0]"
        return Draft(called, features=("dropout",) if dropout else ())
    if form < 0.4:
        first = writer.rng.random() < 0.5
        feed = f"nn.TransformerEncoderLayer({size}, {heads}, {2 * size}, dropout={dropout}, batch_first=True, norm_first={first})"
        return Draft(f"{writer.layer('encoder', feed)}({value.name})", features=("dropout",) if dropout else ())
    split = f".unflatten(-1, ({heads}, {size // heads})).transpose(1, 2)"
    mask = writer.rng.choice(
        (
            "",
            ", is_causal=True",
            f", attn_mask=torch.ones({value.shape[1]}, {value.shape[1]}, dtype=torch.bool).tril()",
            f", attn_mask={writer.buffer(f'torch.randn({value.shape[1]}, {value.shape[1]})')}",
        )
    )
    if form < 0.7:
        fused = writer.layer("qkv", f"nn.Linear({size}, {3 * size})")
        call = f"F.scaled_dot_product_attention(*(part{split} for part in {fused}({value.name}).chunk(3, -1)){mask})"
    else:
        query, key = (writer.layer("project", f"nn.Linear({size}, {size})") for _ in range(2))
        call = f"F.scaled_dot_product_attention({query}({value.name}){split}, {key}({value.name}){split}, {value.name}{split}{mask})"
    is_causal = "is_causal" in mask or "tril" in mask
    return Draft(f"{call}.transpose(1, 2).flatten(2)", features=(f"attends {value.shape[1]} {heads} {is_causal}",))


def dropped_share(writer: Writer) -> float:
    """Return the dropout probability of a layer: mostly zero, since dropout is not cut into microbatches."""
    return 0.3 if writer.training and writer.rng.random() < 0.2 else 0.0


def recurrent(writer: Writer, value: Variable) -> str | Draft | None:
    if not value.is_float or not value.is_batched or value.dim != 3 or value.shape[1] > 9 or writer.rng.random() < 0.6:
        return None
    size, hidden = value.shape[2], writer.rng.choice((3, 4, 6))
    kind = writer.rng.choice(("nn.GRU", "nn.LSTM", "nn.RNN"))
    if writer.rng.random() < 0.6:
        return f"{writer.layer('recurrent', f'{kind}({size}, {hidden}, batch_first=True)')}({value.name})[0]"
    dropout = dropped_share(writer)
    options = f"2, dropout={dropout}, bidirectional={writer.rng.random() < 0.5}, batch_first=True"
    called = f"{writer.layer('recurrent', f'{kind}({size}, {hidden}, {options})')}({value.name})[0]"
    return Draft(called, features=("dropout",) if dropout else ())


def pooled_sequence(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 3 or writer.rng.random() < 0.5:
        return None
    return writer.rng.choice(("{0}.mean(1)", "{0}[:, 0]", "{0}[:, -1]", "{0}.amax(1)", "{0}.transpose(1, 2)")).format(value.name)


def position(writer: Writer, value: Variable) -> str | None:
    if not value.is_float or not value.is_batched or value.dim != 3:
        return None
    length, size = value.shape[1:]
    if writer.rng.random() < 0.5:
        return f"{value.name} + {writer.parameter(length, size)}"
    table = writer.layer("positions", f"nn.Embedding({length}, {size})")
    return f"{value.name} + {table}(torch.arange({value.name}.shape[1]))"


SEQUENCE: tuple[Template, ...] = (
    attention,
    attention,
    attention,
    linear,
    linear,
    layer_norm,
    layer_norm,
    conv1d,
    recurrent,
    pooled_sequence,
    position,
)


def used_again(writer: Writer, value: Variable) -> Draft | None:
    """Return a layer of the program once more; it is dropped where the sizes do not fit."""
    callable_layers = [each.name for each in writer.layers if each.name.startswith(REUSED)]
    if not callable_layers or not value.is_float:
        return None
    name = writer.rng.choice(callable_layers)
    norm = ("batchnorm",) if "BatchNorm" in next(each.code for each in writer.layers if each.name == name) else ()
    return Draft(f"self.{name}({value.name})", features=norm)
