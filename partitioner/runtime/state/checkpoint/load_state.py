"""Load a state dict with original names; all entries are checked before any is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.runtime.state.checkpoint.from_dtensor import check_source, without_dtensor
from partitioner.runtime.state.parameters import State
from passes.ir.errors import ConfigError, first_few


def load_state(state: State, tensors: Mapping[str, Any], *, strict: bool, prefix: str = "") -> Any:
    """Copy tensors, by original name, into the shards and copies of this process.

    DTensors that are not sharded as the plan has it are gathered: all processes of their mesh must load them.

    Args:
        state: of this process.
        tensors: a full state dict, or this process's part.
        strict: whether ``tensors`` must have everything that this process holds, and nothing that the model does not have.
        prefix: what the names of the tensors to load begin with.

    Returns:
        What ``nn.Module.load_state_dict`` returns: ``missing_keys`` and ``unexpected_keys``.

    Raises:
        ConfigError: a name is unknown or missing, or an entry is no tensor of the right shape and kind of dtype.
    """
    state.check_names()
    unexpected = [name for name in tensors if name not in state.names]
    missing = [name for name in state.names if name.startswith(prefix) and name not in tensors and state.held(name)]
    if strict and (missing or unexpected):
        problems = [f"the state lacks {first_few(missing, 5)}"] if missing else []
        problems += [f"unknown names in the state: {first_few(unexpected, 5)}"] if unexpected else []
        raise ConfigError(
            "; ".join(problems),
            remedy="use the names of the original model's state_dict(); strict=False keeps values that are missing and skips unknown names",
        )
    known = {name: value for name, value in tensors.items() if name in state.names}
    # set_model_state_dict with full_state_dict=True puts the model's own tensors in place of missing ones.
    own = [name for name, value in known.items() if any(value is held for _, held in state.held(name))]
    if strict and 0 < len(own) < len(known):
        raise ConfigError(
            f"the state lacks {first_few(own, 5)}: it has this model's own tensors there",
            remedy="load the state of the whole model; strict=False keeps values that are missing",
        )
    for name, value in known.items():
        for block, held in state.held(name):
            check_entry(name, value, block.shape, held)
            if value.is_meta:
                raise ConfigError(f"{name} is on the meta device in the state: it has no values", remedy="load values first")
            check_source(name, value)
    for name in (name for name in state.names if name in known):  # in the same order on all ranks
        state.set(name, without_dtensor(known[name], state.blocks_of_ranks(name), tuple(state.copies)))
    state.complete()
    result: Any = nn.Module().load_state_dict({})  # torch does not export the class
    return type(result)(missing, unexpected)


def check_entry(name: str, value: Any, shape: Sequence[int], held: Tensor, *, source: str = "state") -> None:
    """Raise ConfigError if a value cannot be copied into a tensor of the model of this shape, of which ``held`` is a block.

    Args:
        source: has the value: the word of errors.
    """
    if not isinstance(value, Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__} in the {source}, and a tensor in the model", remedy="pass a tensor")
    if tuple(value.shape) != tuple(shape):
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)} in the {source} and {tuple(shape)} in the model",
            remedy=f"load the {source} of a model of the same sizes; or leave {name} out, with strict=False",
        )
    if not torch.can_cast(value.dtype, held.dtype):
        raise ConfigError(
            f"{name} has dtype {value.dtype} in the {source} and {held.dtype} in the model, which cannot hold its values",
            remedy="convert it yourself if that is what you mean: state[name] = state[name].real, .round(), ...",
        )
