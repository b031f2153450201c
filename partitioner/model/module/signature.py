"""A class for each partitioned model, whose ``forward`` has the signature of the model's."""

from __future__ import annotations

import inspect
import types

from torch import nn

__all__ = ["with_signature"]


def with_signature(cls: type[nn.Module], model: nn.Module) -> type[nn.Module]:
    """Return a subclass whose ``forward`` does what that of ``cls`` does, with the signature of the model's ``forward``.

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
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__})
