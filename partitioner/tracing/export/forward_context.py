"""Enter a context while a model runs, and leave it for the code of PyTorch around the model.

``torch.export`` reads attributes of every parameter before and after it runs the model. Modes of torch functions would see most of their
calls from there, and none of them is the model's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from passes.ir.torch_private import with_records


@contextlib.contextmanager
def entered_in_forward(
    model: nn.Module,
    context: Callable[[], AbstractContextManager[object]],
    as_called: Callable[[Any, Any], tuple[Any, Any]] = lambda args, kwargs: (args, kwargs),
) -> Iterator[None]:
    """While active, every call of a model runs in a new context, and dataclasses in the result of its ``forward`` are pytrees.

    The model is of a subclass meanwhile: ``torch.export`` passes ``forward`` a stand-in for the model, by which it tells the paths of a
    shared module apart. A function that is set on the model does not get it, and hooks of modules see no exceptions in an export.
    """
    original, own = type(model), vars(model).get("forward")

    @functools.wraps(own or original.forward)
    def forward(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_called(args, kwargs)
        return with_records(own(*args, **kwargs) if own is not None else original.forward(self, *args, **kwargs))

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        with context():
            return original.__call__(self, *args, **kwargs)

    names: dict[str, Any] = {"__call__": call, "__module__": original.__module__, "__qualname__": original.__qualname__}
    if own is not None:  # other code has replaced it
        vars(model)["forward"] = functools.wraps(own)(functools.partial(forward, model))
    else:
        names["forward"] = forward
    model.__class__ = type(original.__name__, (original,), names)
    try:
        yield
    finally:
        model.__class__ = original
        if own is not None:
            vars(model)["forward"] = own
