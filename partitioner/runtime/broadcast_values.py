"""Processes that built models with unlike values, from unlike seeds: all of them take those of rank 0, as DistributedDataParallel does."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State

__all__ = ["broadcast_values"]

_SAMPLED = 64
"""Elements of a tensor whose places count, too; of all others the sum of their bits."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> the integers that have its bits; more bytes are several integers of eight."""


def broadcast_values(model: nn.Module, state: State, runtime: Runtime) -> None:
    """Give every process the values of rank 0 where another one has other values, and warn of it on rank 0.

    Values on the meta device are none, and nothing is compared with them.

    Raises:
        ConfigError: processes have unlike constants in the model's code, which are not sent.
    """
    if len(runtime.local_ranks) == runtime.n_ranks:
        return
    is_first = 0 in runtime.local_ranks
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    known = {name: tensors[name] for name in (*state.graph.parameters.values(), *state.graph.buffers.values())}
    own = _digest(known.values())
    first = runtime.agree("values of the model", own if is_first else None)
    differs = own is not None and first not in (None, own)
    if runtime.agree("values of the model unlike those of rank 0", "some" if differs else None) is not None:
        device = runtime.devices[runtime.local_ranks[0]]
        for name, tensor in known.items():  # one at a time: whole models need not fit
            whole = runtime.collect({name: tensor.detach().to(device)} if is_first else {})[name]
            assert whole is not None
            state.set(name, whole)
        if is_first:
            warnings.warn(
                "the processes have built models with unlike values: all take those of rank 0. The same seed before the model is built "
                "(torch.manual_seed), or the same checkpoint, saves sending them",
                stacklevel=6,  # where partition() was called
            )
    constants = state.graph.constants
    if constants:
        runtime.agree("constants in the model's code", _digest(constants[name] for name in sorted(constants)))


def _digest(tensors: Iterable[Tensor]) -> str | None:
    """A fingerprint of the bits of tensors, for which few elements are copied to the CPU; None where one is on the meta device."""
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_meta:
            return None
        plain = tensor.detach().contiguous().reshape(-1)
        sampled = plain[:: max(1, plain.numel() // _SAMPLED)][:_SAMPLED].contiguous().cpu()
        bits = plain.view(_BITS.get(plain.element_size(), torch.int64)).sum(dtype=torch.int64)
        found.update(repr((int(bits), sampled.view(torch.uint8).tolist())).encode())
    return found.hexdigest()[:16]
