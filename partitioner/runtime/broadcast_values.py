"""Broadcast the model's values from rank 0 if processes built it with different seeds, as DistributedDataParallel does."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from passes.ir.errors import level_of_caller

_SAMPLED = 64
"""Number of elements of a tensor that its digest contains one by one; all others enter as the sum of their bits."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> integer dtype of that size; larger elements are viewed as several int64."""


def broadcast_values(model: nn.Module, state: State, runtime: Runtime) -> None:
    """Give every process the values of rank 0 if any process has others, and warn of it on rank 0.

    Nothing is compared if a value is on the meta device.

    Raises:
        ConfigError: processes have different constants in the model's code, which are not sent.
    """
    if len(runtime.local_ranks) == runtime.n_ranks:
        return
    is_first = 0 in runtime.local_ranks
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    values = {name: tensors[name] for name in (*state.graph.parameters.values(), *state.graph.buffers.values())}
    own = _digest(values.values())
    first = runtime.agree("values of the model", own if is_first else None)
    differs = own is not None and first not in (None, own)
    if runtime.agree("values of the model that differ from rank 0", "some" if differs else None) is not None:
        device = runtime.devices[runtime.local_ranks[0]]
        for name, tensor in values.items():  # one at a time: whole models need not fit
            whole = runtime.collect({name: tensor.detach().to(device)} if is_first else {})[name]
            assert whole is not None
            state.set(name, whole)
        if is_first:
            warnings.warn(
                "the processes have built models with different values: all take those of rank 0. The same seed before the model is built "
                "(torch.manual_seed), or the same checkpoint, saves sending them",
                stacklevel=level_of_caller(),
            )
    constants = state.graph.constants
    if constants:
        runtime.agree("constants in the model's code", _digest(constants[name] for name in sorted(constants)))


def _digest(tensors: Iterable[Tensor]) -> str | None:
    """Return a digest of tensors, for which few elements are copied to the CPU; None if one is on the meta device."""
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_meta:
            return None
        flat = tensor.detach().contiguous().reshape(-1)
        sampled = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED].contiguous().cpu()
        bits = flat.view(_BITS.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64)
        digest.update(repr((int(bits), sampled.view(torch.uint8).tolist())).encode())
    return digest.hexdigest()[:16]
