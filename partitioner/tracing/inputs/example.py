"""Example inputs of a model that comes without any.

Taken, in this order, from what libraries leave on their models, and from the first layer:

    Lightning        model.example_input_array
    transformers     model.dummy_inputs, of any model whose forward takes them; images of config.image_size for models that take pixels
    timm             model.pretrained_cfg["input_size"]
    first layer      Linear(in_features, ...): (2, in_features); Embedding: (2, 16) indices; ConvNd(channels, ...): (2, channels, 64*)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.errors import ConfigError

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""``args`` and ``kwargs`` of one call."""

_BATCH = 2
_LENGTHS = (16, 8, 4, 2, 1)
_IMAGE_SIZES = (64, 224, 32, 28, 16)


def find_example_inputs(model: nn.Module) -> _Inputs:
    """Return the args and kwargs that a library left on a model, or that its first layer implies.

    Raises:
        ConfigError: there are none, or the model does not take them; says what to pass.
    """
    for find in (_inputs_of_lightning, _dummy_inputs, _inputs_of_transformers, _inputs_of_timm):
        inputs = find(model)
        if inputs is not None:
            return inputs
    refusal: Exception | None = None
    for inputs in _inputs_of_first_layer(model):
        refusal = _refusal(model, *inputs)
        if refusal is None:
            return inputs
    raise ConfigError(
        f"no example inputs are known for {type(model).__name__}, and its first layer does not determine them",
        remedy=f"pass one batch (only sizes and types matter): {_how_to_pass(model)}",
    ) from refusal


def _inputs_of_lightning(model: nn.Module) -> _Inputs | None:
    return _as_call(getattr(model, "example_input_array", None))


def _as_call(example: object) -> _Inputs | None:
    """Return keyword inputs of a mapping, positional inputs of a tuple or list, and one input of a tensor."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return ((example,), {}) if isinstance(example, Tensor) else None


def _dummy_inputs(model: nn.Module) -> _Inputs | None:
    """Return ``dummy_inputs`` on the model's device if ``forward`` takes them, with the main input where the model names one.

    Models of transformers that take pixels have token ids there too, which they do not take.
    """
    inputs, main = _as_call(getattr(model, "dummy_inputs", None)), getattr(model, "main_input_name", None)
    if inputs is None or (isinstance(main, str) and main not in inputs[1]):
        return None
    args, kwargs = inputs
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return None
    device = _tensor_of(model).device
    return tuple(_moved(value, device) for value in args), {name: _moved(value, device) for name, value in kwargs.items()}


def _moved(value: Any, device: torch.device) -> Any:
    """Return a tensor on a device, and any other value unchanged."""
    return value.to(device) if isinstance(value, Tensor) else value


def _inputs_of_transformers(model: nn.Module) -> _Inputs | None:
    """Return images of the model's size, if its main input are pixels."""
    config = getattr(model, "config", None)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if getattr(model, "main_input_name", None) != "pixel_values" or size is None or channels is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)  # a number, or (height, width)
    like = _tensor_of(model)
    return (), {"pixel_values": torch.zeros((_BATCH, channels, *sides), dtype=like.dtype, device=like.device)}


def _inputs_of_timm(model: nn.Module) -> _Inputs | None:
    config = getattr(model, "pretrained_cfg", None)
    size = config.get("input_size") if isinstance(config, Mapping) else None
    if size is None:
        return None
    parameter = _tensor_of(model)
    return (torch.zeros((_BATCH, *size), dtype=parameter.dtype, device=parameter.device),), {}


def _inputs_of_first_layer(model: nn.Module) -> Iterator[_Inputs]:
    """Yield inputs to try, for a model of one batch-first input: shapes that the first layer with parameters may take."""
    names = _required_inputs(model)
    first = next((module for module in model.modules() if next(module.parameters(recurse=False), None) is not None), None)
    if len(names) != 1 or first is None or any(getattr(module, "batch_first", None) is False for module in model.modules()):
        return
    for shape, dtype in _input_shapes(model, first):
        value = torch.zeros(shape, dtype=dtype, device=next(first.parameters()).device)
        yield ((value,), {}) if names[0] in _inputs_without_default(model) else ((), {names[0]: value})


def _input_shapes(model: nn.Module, first: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Yield shapes and types of inputs that a model's first layer may take."""
    if isinstance(first, nn.Linear) and not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield (_BATCH, first.in_features), first.weight.dtype
    elif isinstance(first, nn.Embedding):
        longest = min(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
        for length in _LENGTHS:
            if length <= longest:
                yield (_BATCH, length), torch.int64
    elif isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        for size in _IMAGE_SIZES:
            yield (_BATCH, first.in_channels, *(size for _ in first.kernel_size)), first.weight.dtype


def _refusal(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return the error of a model that does not take these inputs, on the meta device, where nothing is computed."""
    tensors = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        with torch.no_grad():
            moved = {name: value.to("meta") for name, value in kwargs.items()}
            torch.func.functional_call(model, tensors, tuple(value.to("meta") for value in args), moved)
    except Exception as error:  # noqa: BLE001  whatever the model raises is the cause of the caller's error
        return error
    return None


def _tensor_of(model: nn.Module) -> Tensor:
    """Return a floating-point tensor of the model, whose type and device its inputs should have."""
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))


def _inputs_without_default(model: nn.Module) -> list[str]:
    """Return the names of the parameters of ``forward`` that have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds and parameter.default is inspect.Parameter.empty]


def _required_inputs(model: nn.Module) -> list[str]:
    """Return the inputs without a default; else the main input that a model of transformers, with defaults for all, names."""
    main = getattr(model, "main_input_name", None)
    return _inputs_without_default(model) or ([main] if isinstance(main, str) else [])


def _how_to_pass(model: nn.Module) -> str:
    """Return the call of ``partition`` to write, as text: ``partition(model, ..., example_inputs=(x,))``."""
    positional = _inputs_without_default(model)
    if positional or not _required_inputs(model):
        return f"partition(model, ..., example_inputs=({', '.join(positional or ['x'])},))"
    return f"partition(model, ..., example_kwargs={{{', '.join(f'{name!r}: {name}' for name in _required_inputs(model))}}})"
