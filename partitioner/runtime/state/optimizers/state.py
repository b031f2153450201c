"""Save and load the state of an optimizer under the names of the model's parameters, so that it fits any other plan.

    rank 0   exp_avg of rows 0 to 31 of up.weight  ─┐
                                                    ├─>   {"state": {"up.weight": {"exp_avg": all 64 rows, ...}}, "param_groups": [...]}
    rank 1   exp_avg of rows 32 to 63              ─┘

The form is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` of the unpartitioned model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.checkpoint.from_dtensor import check_source, without_dtensor
from partitioner.runtime.state.optimizers.named_groups import as_bytes, from_bytes, named_groups, options_of, parameter_names
from partitioner.runtime.state.optimizers.saved_kind import check_entries, check_options
from partitioner.runtime.state.optimizers.whole_states import WholeStateOptimizer
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.sharded_tensor import BlockTensor
from partitioner.runtime.state.stored_parameters import membership
from passes.ir.errors import ConfigError
from passes.spmd.shards import whole_block


def full_optimizer_state_dict(state: State, runtime: Runtime, optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole state of an optimizer, on every rank; see ``PartitionedModel.full_optimizer_state_dict``."""
    _check_parameters(state, optimizer)
    entries = gathered_entries(state, runtime, optimizer, parameter_names(state))
    return {"state": entries, "param_groups": named_groups(state, runtime, optimizer)}


def gathered_entries(state: State, runtime: Runtime, optimizer: Optimizer, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return parameter -> the whole state of it, for the named ones that have a state; collective, with the same names on all ranks."""
    owned: dict[str, Tensor | None] = {}
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name in names:
        for key, parameter in _parts_with_state(state, optimizer, name):
            entries = {f"{key}{_SEPARATOR}{what}": value for what, value in _state_entries(optimizer, name, parameter)}
            owned.update({key: value if isinstance(value, Tensor) else as_bytes(value) for key, value in entries.items()})
            owned.update({f"{key}{_SEPARATOR}": None for key, value in entries.items() if not isinstance(value, Tensor)})
            if not entries and id(parameter) in optimized:
                owned[f"{key}{_SEPARATOR}"] = None  # marks an empty state
    blocks_of: dict[str, dict[str, Tensor | None]] = {}  # entry -> key of a block -> tensor
    for block_and_entry, tensor in runtime.collect(owned).items():
        key, _, what = block_and_entry.partition(_SEPARATOR)
        blocks_of.setdefault(what, {})[key] = tensor
    empty = blocks_of.pop("", {})
    encoded = {what: blocks_of.pop(f"{what}{_SEPARATOR}", {}) for what in list(blocks_of) if not what.endswith(_SEPARATOR)}
    whole: dict[str, dict[str, Any]] = {name: {} for name in names if blocks_of and name in empty}
    for what, blocks in blocks_of.items():
        for name in names:
            first = blocks.get(name)
            if first is None:
                continue
            is_in_blocks = first.dim() and not _has_whole_states(state, optimizer, name)
            value = from_bytes(first) if name in encoded[what] else state.whole(name, blocks) if is_in_blocks else first
            if value is not None:
                whole.setdefault(name, {})[what] = value
    return whole


def _parts_with_state(state: State, optimizer: Optimizer, name: str) -> list[tuple[str, Tensor]]:
    """Return the parameters of this process whose states are gathered for a parameter, with a key for each."""
    if not _has_whole_states(state, optimizer, name):
        return state.owned(name)
    held = [parameter for _, parameter in state.held(name)]
    return [(name, next((parameter for parameter in held if optimizer.state.get(parameter)), held[0]))] if held else []


def _has_whole_states(state: State, optimizer: Optimizer, name: str) -> bool:
    """Return whether the owner of a sharded parameter has the state of the whole; the same on all ranks."""
    return isinstance(optimizer, WholeStateOptimizer) and state.is_cut(name)


def sharded_optimizer_state_dict(state: State, runtime: Runtime, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer in blocks; see ``PartitionedModel.sharded_optimizer_state_dict``."""
    _check_parameters(state, optimizer)
    if not (optimizer.has_state if isinstance(optimizer, WholeStateOptimizer) else optimizer.state):
        _initialize_state(optimizer)
    entries_of: dict[str, dict[str, Any]] = {}
    for name in parameter_names(state):
        blocks: dict[str, list[Any]] = {}
        for held, parameter in reversed(state.held(name)):
            block = whole_block(held.shape) if _has_whole_states(state, optimizer, name) else held
            for what, value in _state_entries(optimizer, name, parameter):
                blocks.setdefault(what, []).append((block, value))
        for what, pairs in blocks.items():
            is_by_element = all(isinstance(value, Tensor) and value.dim() > 0 and value.shape == block.part for block, value in pairs)
            entries_of.setdefault(name, {})[what] = BlockTensor(list(dict(pairs).items())) if is_by_element else pairs[-1][1]
    return {"state": entries_of, "param_groups": named_groups(state, runtime, optimizer)}


def load_optimizer_state_dict(state: State, runtime: Runtime, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the state of another optimizer; see ``PartitionedModel.load_optimizer_state_dict``."""
    # Ranks with states of different parameters communicate, so that an error on one must end the waiting of the others.
    with runtime.failing_together() if isinstance(optimizer, WholeStateOptimizer) else contextlib.nullcontext():
        _load(state, optimizer, state_dict)


def _load(state: State, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Take this process's part of a state."""
    given, saved_groups = _check_state_dict(state, state_dict)
    _check_parameters(state, optimizer)
    name_of = {id(parameter): name for name in parameter_names(state) for _, parameter in state.held(name)}
    saved = [(frozenset(group["params"]), group) for group in saved_groups]
    entries: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(optimizer.param_groups):
        names = [name_of.get(id(parameter)) for parameter in group["params"]]
        same_index = [saved[index][1]] if len(saved) == len(optimizer.param_groups) else []
        # A group may name none of these parameters, if another process has saved it with its own.
        sources = [saved_group for members, saved_group in saved if not members.isdisjoint(names)] or same_index
        known = [name for name in names if name is not None]
        if saved and known and not sources:
            raise ConfigError(
                f"no group of the optimizer's state names {known[0]}, of group {index} of the optimizer",
                remedy="make the groups of the optimizer those that it had when the state was saved",
            )
        if any(options_of(source) != options_of(sources[0]) for source in sources[1:]):
            raise ConfigError(
                "parameters of one group had different options when the state was saved",
                remedy="make the groups of the optimizer those that it had",
            )
        options = options_of(sources[0] if sources else group)
        if sources:
            check_options(optimizer, index, options)
        first = sum(len(numbered["params"]) for numbered in groups)
        numbers = list(range(first, first + len(names)))
        groups.append({**options, "params": numbers})
        for number, name, parameter in zip(numbers, names, group["params"], strict=True):
            is_elsewhere = isinstance(optimizer, WholeStateOptimizer) and optimizer.is_sharded(parameter) and not optimizer.keeps(parameter)
            if given and name is not None and name not in given and parameter.requires_grad and not is_elsewhere:
                raise ConfigError(
                    f"the optimizer's state lacks {name}",
                    remedy=f'a parameter that has had no gradient has an empty state: state_dict["state"]["{name}"] = {{}}',
                )
            if name is not None and name in given:
                block = next(block for block, held in state.held(name) if held is parameter)
                for value in given[name].values():
                    check_source(name, value)
                check_entries(optimizer, name, given[name], groups[-1], block.shape, parameter.dtype)
                entries[number] = local_entries(state, optimizer, name, parameter, given[name])
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _check_parameters(state: State, optimizer: Optimizer) -> None:
    """Raise ConfigError if an optimizer has a parameter that is not of the partitioned model."""
    known = {id(stored.parameter) for stored in state.stored_parameters()} | {id(parameter) for parameter in state.stand_in}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ConfigError(
                    f"parameter {place} of group {number} of the optimizer, of shape {tuple(parameter.shape)}, is none of this model's",
                    remedy="make the optimizer of pm.parameters(), not of those of the original model, and another one for other modules",
                )


def _check_state_dict(state: State, state_dict: Any) -> tuple[Mapping[str, Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return ``"state"`` and ``"param_groups"`` of a state dict under the names of the model.

    Raises:
        ConfigError: names the entry that is wrong.
    """
    remedy = "pass what pm.full_optimizer_state_dict(optimizer) returns, or torch's get_optimizer_state_dict(model, optimizer)"
    lacking = [key for key in ("state", "param_groups") if not isinstance(state_dict, Mapping) or key not in state_dict]
    if lacking:
        raise ConfigError(f"the optimizer's state has no {lacking[0]!r}", remedy=remedy)
    given, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(given, Mapping) or not all(isinstance(entries, Mapping) for entries in given.values()):
        raise ConfigError("'state' of the optimizer's state is no dict of dicts", remedy=remedy)
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) and "params" in group for group in groups):
        raise ConfigError("'param_groups' of the optimizer's state is no list of dicts with 'params'", remedy=remedy)
    if any(isinstance(name, int) for name in given):
        raise ConfigError("the optimizer's state is by number, and the model's parameters have names", remedy=remedy)
    unknown = sorted(str(name) for name in given if name not in state.parameter_names)
    if unknown:
        raise ConfigError(
            f"unknown names in the optimizer's state: {', '.join(unknown[:5])}", remedy="use the names of the original model's parameters"
        )
    return given, list(groups)


_SEPARATOR = "\0"
"""Separates the key of a block (``State.owned``) from the name of an entry of its state."""


def _state_entries(optimizer: Optimizer, name: str, parameter: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each entry of the state of a parameter; raise ConfigError for one that cannot be split into shards.

    Numbers are yielded as tensors. Values of other kinds are those of a whole parameter.
    """
    member = membership(parameter)
    has_whole_state = isinstance(optimizer, WholeStateOptimizer) and optimizer.is_sharded(parameter)
    is_part = (member is None or member.is_part) and not has_whole_state
    for what, value in optimizer.state.get(parameter, {}).items():
        if value is None:
            continue
        if not isinstance(value, Tensor | Number) and not is_part:
            yield what, value
            continue
        if not isinstance(value, Tensor | Number):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps a {type(value).__name__} for {name}, {what}: it belongs to no elements of the parameter",
                remedy="use an optimizer whose state is element by element, as AdamW's is, or keep its state out of the checkpoint",
            )
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        if tensor.dim() and tensor.shape != parameter.shape and is_part:
            raise ConfigError(
                f"{what} of {name} has shape {tuple(tensor.shape)}, and the part of the parameter {tuple(parameter.shape)}: "
                "its elements belong to no elements of the parameter",
                remedy="use an optimizer whose state is element by element, as AdamW's is",
            )
        yield what, tensor


def local_entries(state: State, optimizer: Optimizer, name: str, parameter: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return this process's part of the entries of a whole parameter's state."""
    if not (isinstance(optimizer, WholeStateOptimizer) and optimizer.is_sharded(parameter)):
        return {what: _local_part(state, name, what, parameter, value) for what, value in entries.items()}
    whole = {what: _whole_value(state, name, what, value) for what, value in entries.items()}  # all ranks gather DTensors
    return copy.deepcopy(whole) if optimizer.keeps(parameter) else {}


def _whole_value(state: State, name: str, what: str, value: Any) -> Any:
    """Return an entry of the state of a whole parameter, put together if it is a DTensor."""
    block = whole_block(next(iter(state.blocks_of_ranks(name).values())).shape)
    value = without_dtensor(value, dict.fromkeys(state.copies, block), tuple(state.copies))
    if isinstance(value, BlockTensor):
        blocks = dict(value.blocks)
        if block not in blocks:
            raise ConfigError(
                f"{what} of {name} is in parts, and the optimizer keeps it whole",
                remedy="load into pm.sharded_optimizer_state_dict(optimizer) of this model",
            )
        return blocks[block]
    return value


def _local_part(state: State, name: str, what: str, parameter: Tensor, value: Any) -> Any:
    """Return the part of a state entry of the whole parameter that belongs to this process's shard of it."""
    if not isinstance(value, Tensor) or not value.dim():
        return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    value = without_dtensor(value, state.blocks_of_ranks(name), tuple(state.copies))
    block = next(block for block, held in state.held(name) if held is parameter)
    if tuple(value.shape) != block.shape:
        if block.is_whole and not isinstance(value, BlockTensor):
            return value.clone()
        raise ConfigError(f"{what} of {name} has shape {tuple(value.shape)}, and the parameter {block.shape}")
    if not isinstance(value, BlockTensor):
        return block.take(value).clone()
    blocks = dict(value.blocks)
    if block not in blocks:
        raise ConfigError(
            f"the blocks of the state of {name} are those of another plan",
            remedy="load into pm.sharded_optimizer_state_dict(optimizer) of this model",
        )
    return blocks[block].clone()


def _initialize_state(optimizer: Optimizer) -> None:
    """Create the state by a step that changes no parameter: with zero gradients and a zero learning rate."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    gradients, rates = [parameter.grad for parameter in parameters], [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
