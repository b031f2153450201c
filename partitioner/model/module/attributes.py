"""Attributes of the model that a partitioned model shows: values that no parameter, buffer or layer is part of.

pm.config, pm.main_input_name, pm.encoder.hidden_size      passed through: what the model has now
pm.device                                                  of the partitioned model
pm.generate                                                AttributeError: a method computes with the model's own parameters
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partitioner.tracing.restore import own_attributes
from passes.ir.errors import ConfigError

_SIMPLE = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), type, slice, range, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.ModuleType, types.BuiltinFunctionType),
)


def read_attribute(module: nn.Module, name: str, path: str, device: torch.device | None) -> Any:
    """Return an attribute of a module of the model.

    Args:
        path: of the module, for errors.
        device: of the partitioned model, which stands for that of the model; None: it has no tensors here.

    Raises:
        AttributeError: the module has no such attribute, or it reads parameters, buffers or layers of the model.
    """
    owner = type(module)
    if name in vars(module):
        value = vars(module)[name]
    else:
        static = inspect.getattr_static(owner, name, None)
        if static is None and owner.__getattr__ is nn.Module.__getattr__:
            raise _absent(owner, name, path)
        if name in _PLANNED and isinstance(static, types.FunctionType):
            return _planned_instead(name)
        if isinstance(static, types.FunctionType):
            raise _refused(owner, name, path, _METHOD)
        try:
            with _NoValues():
                value = getattr(module, name)
        except _ReadsValuesError:
            raise _refused(owner, name, path, "is computed from values of the model's own parameters. Read it from the model") from None
        except AttributeError:
            if static is not None:
                raise
            raise _absent(owner, name, path) from None  # the class looks further, as wrappers do, and finds none either
    if isinstance(value, torch.device) and device is not None:
        return device
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        raise _refused(type(value.__self__), name, path, _METHOD)
    if not _is_plain(value, set()):
        raise _refused(owner, name, path, "holds parameters, buffers or layers of the model. Read it from the model")
    return value


_PLANNED = {
    "gradient_checkpointing_enable": 'call it on the model before partition(), or pass recompute="full" to it; in Trainer, leave '
    "gradient_checkpointing=True out",
    "resize_token_embeddings": "resize the model, and partition it again",
    "enable_input_require_grads": "leave it out: the gradient of an input that requires one is computed",
}
"""Methods of transformers' models that frameworks call -> what to do instead."""


def _planned_instead(name: str) -> Callable[..., NoReturn]:
    """Return a method that says what to do instead."""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise ConfigError(f"{name}() would change the model, and the programs of a partitioned model are planned", remedy=_PLANNED[name])

    return refuse


_METHOD = (
    "is a method, which would compute with the model's own parameters, or change them. Call it on the model: to read the present values, "
    "after model.load_state_dict(pm.full_state_dict()); to change the model, before partition(model, ...)"
)


def is_traced_attribute(module: nn.Module, name: str, value: object) -> bool:
    """Return whether a module of the model has an attribute of this name with another value than the traced one."""
    own = own_attributes(module)
    if name not in own:
        return False
    present = own[name]
    try:
        return present is not value and not bool(present == value)
    except (RuntimeError, TypeError, ValueError):  # of arrays
        return True


def _absent(owner: type, name: str, path: str) -> AttributeError:
    return AttributeError(f"neither a partitioned model nor the {owner.__name__} {path or 'itself'} has an attribute {name!r}")


def _refused(owner: type, name: str, path: str, why: str) -> AttributeError:
    where = f"{path}.{name}" if path else name
    return AttributeError(f"a partitioned model has no {where!r}: on the {owner.__name__} it {why}")


class _ReadsValuesError(Exception):
    """A property of the model reads values of its parameters."""


class _NoValues(TorchFunctionMode):
    """Raises ``_ReadsValuesError`` for every function of tensors but those that ask for shape, dtype, device and the like."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func in _METADATA:
            return func(*args, **(kwargs or {}))
        raise _ReadsValuesError


_METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad", "is_meta", "ndim", "is_leaf", "layout")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex),
        *(torch.is_floating_point, torch.is_complex, torch.numel, Tensor.__hash__),
    }
)


def _is_plain(value: object, seen: set[int]) -> bool:
    """Return whether a value reaches no tensor and no module: through containers, attributes of objects and closures of functions."""
    if isinstance(value, _SIMPLE) or id(value) in seen:
        return True
    if isinstance(value, Tensor | nn.Module):
        return False
    seen.add(id(value))
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | AbstractSet):
        parts += value
    elif isinstance(value, partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts += [value.__self__]
    elif isinstance(value, types.FunctionType):
        parts += [cell.cell_contents for cell in value.__closure__ or ()]
    parts += getattr(value, "__dict__", {}).values()
    return all(_is_plain(part, seen) for part in parts)
