"""Results that are computed when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ir.torch_private import DisableTorchFunctionSubclass, pytree


class UnreadOutput(Tensor):
    """Stands for a result: it has its shape, dtype and device, and is computed by the first operation that reads anything else of it."""

    compute: Callable[[], Tensor]
    is_current: Callable[[], bool]
    """Whether what it is computed from is as it was."""
    found: Tensor | None

    @classmethod
    def of(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device, compute: Callable[[], Tensor], is_current: Callable[[], bool]
    ) -> UnreadOutput:
        """Return a stand-in without memory of its own."""
        output = torch.zeros((), dtype=dtype, device=device).expand(list(shape)).as_subclass(cls)
        output.compute, output.is_current, output.found = compute, is_current, None
        return output

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:  # mixed precision of accelerate converts all results
            (output,) = args
            return cls.of(output.shape, torch.float32, output.device, lambda: read(output).float(), output.is_current)
        if func not in _KNOWN:
            args, kwargs = pytree.tree_map_only(UnreadOutput, read, (args, kwargs))
            return func(*args, **kwargs)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def read(output: UnreadOutput) -> Tensor:
    """Return the result, computed when it is first read."""
    with DisableTorchFunctionSubclass():
        if output.found is None:
            output.found = output.compute()
        return output.found


_KNOWN = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    }
)
"""Facts of a result that is not computed."""
