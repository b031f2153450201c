"""A class for each partitioned model: its ``forward`` has the signature of the model's, and it has the items of a container."""

from __future__ import annotations

import inspect
import types

from torch import nn

from partitioner.model.module.structure import container_methods

__all__ = ["with_signature"]


def with_signature(cls: type[nn.Module], model: nn.Module) -> type[nn.Module]:
    """Return a subclass whose ``forward`` does what that of ``cls`` does, with the signature of the model's ``forward``.

    Python looks up ``pm[0]`` and ``len(pm)``, too, in the class: it has these methods if the model is a container of torch.

    Readers of signatures (``transformers.Trainer`` removes columns of a data set by it) ask the instance or its class.
    """
    signature = inspect.signature(model.forward)
    bound_to = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    # A copy of the function, not a call of it: another frame would move the line that warnings name.
    original = cls.forward
    forward = types.FunctionType(original.__code__, original.__globals__, "forward", original.__defaults__, original.__closure__)
    forward.__doc__ = original.__doc__
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[bound_to, *(each for each in signature.parameters.values() if each.name != "self")]
    )
    methods = {"forward": forward, **container_methods(model)}
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__doc__": cls.__doc__})
