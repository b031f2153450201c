"""Name and number the groups of an optimizer alike in all processes: one of a pipeline has groups of its own stages' parameters alone.

    rank 0   0: in.weight, lr 0.1    1: in.bias, lr 0.2   ─┐
                                                           ├─>   0: in.weight, lr 0.1    1: in.bias, lr 0.2    2: out.weight, lr 0.3
    rank 1   0: out.weight, lr 0.3                        ─┘

``torch.distributed.checkpoint`` saves an entry under its number, so that of two groups of one number only one would be kept.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from passes.ir.arguments.describe import described
from passes.ir.errors import ConfigError

Group = dict[str, Any]
"""The options of a group, and under ``"params"`` the names of its parameters."""


def named_groups(state: State, runtime: Runtime, optimizer: Optimizer) -> list[Group]:
    """Return the parameter groups of all processes, with names in place of parameters; the same on all ranks.

    Collective if some rank holds nothing of some parameter.

    Raises:
        ConfigError: a parameter has other options in another process; or an option is no plain value.
    """
    name_of = {id(parameter): name for name in parameter_names(state) for _, parameter in state.held(name)}
    own: list[Group] = []
    for group in optimizer.param_groups:
        names = dict.fromkeys(name_of[id(parameter)] for parameter in group["params"] if id(parameter) in name_of)
        own.append({**options_of(group), "params": list(names)})
    is_everywhere = all(len(state.blocks_in_processes(name)) == len(state.devices) for name in parameter_names(state))
    if is_everywhere or len(state.copies) == len(state.devices):
        return own
    with runtime.failing_together():
        check_sendable(own)
    lists = runtime.collect({str(min(state.copies)): as_bytes(own)})
    of_processes = [from_bytes(encoded) for _, encoded in sorted(lists.items(), key=lambda item: int(item[0])) if encoded is not None]
    return groups_of_all(of_processes, parameter_names(state))


def check_sendable(groups: Sequence[Group]) -> None:
    """Raise ConfigError for an option that other processes could not read."""
    for number, group in enumerate(groups):
        for name, value in options_of(group).items():
            try:
                from_bytes(as_bytes(value))
            except Exception as error:  # pickling and unpickling raise whatever an object's class does
                raise ConfigError(
                    f"option {name} of group {number} of the optimizer is {described(value)}, which processes cannot send each other",
                    remedy="keep numbers, texts, tuples and tensors in the groups of an optimizer of a pipeline",
                ) from error


def groups_of_all(of_processes: Sequence[Sequence[Group]], order: Sequence[str]) -> list[Group]:
    """Return the groups of all processes as one list, with names in the order of the model.

    Groups of one number are one group if all processes have as many groups, of equal options, and some group has several parameters: the
    usual split by kind. Else groups of no common parameter, of single layers for instance, are groups of their own.
    """
    place = {name: number for number, name in enumerate(order)}
    groups = _joined_by_number(of_processes) if _are_numbered_alike(of_processes) else _joined_by_name(of_processes, order)
    return [{**group, "params": sorted(group["params"], key=place.__getitem__)} for group in groups]


def _are_numbered_alike(of_processes: Sequence[Sequence[Group]]) -> bool:
    """Return whether groups of equal number have equal options."""
    first = of_processes[0]
    if any(len(groups) != len(first) or not all(map(_equal_options, groups, first)) for groups in of_processes):
        return False
    return len(first) == 1 or any(len(group["params"]) > 1 for groups in of_processes for group in groups)


def _joined_by_number(of_processes: Sequence[Sequence[Group]]) -> list[Group]:
    numbered = zip(*of_processes, strict=True)
    return [{**groups[0], "params": {name for group in groups for name in group["params"]}} for groups in numbered]


def _joined_by_name(of_processes: Sequence[Sequence[Group]], order: Sequence[str]) -> list[Group]:
    """Join the groups that have a common parameter; in the order of their first parameters."""
    group_of: dict[str, Group] = {}
    for group in (group for groups in of_processes for group in groups):
        joined = {**group, "params": set(group["params"])}
        for other in {id(group_of[name]): group_of[name] for name in group["params"] if name in group_of}.values():
            if not _equal_options(group, other):
                raise ConfigError(
                    f"{min(joined['params'] & other['params'])} is in groups of different options of the optimizers of several processes",
                    remedy="make the optimizer of the same groups, with the same options and schedules, in every process",
                )
            joined["params"] |= other["params"]
        group_of |= dict.fromkeys(joined["params"], joined)
    return list({id(group_of[name]): group_of[name] for name in order if name in group_of}.values())


def _equal_options(group: Group, other: Group) -> bool:
    """Return whether two groups have the same options, whatever their parameters."""
    options, others = options_of(group), options_of(other)
    return options.keys() == others.keys() and all(_equal(value, others[name]) for name, value in options.items())


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)


def options_of(group: Mapping[str, Any]) -> Group:
    """Return the options of a group."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def parameter_names(state: State) -> list[str]:
    """Return the names of the parameters; tied ones once."""
    return [name for name in dict.fromkeys(map(state.first_name, state.parameter_names)) if state.knows(name)]


def as_bytes(value: Any) -> Tensor:
    """Encode a value that is no tensor, for ``Runtime.collect``."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def from_bytes(encoded: Tensor) -> Any:
    """Decode what ``as_bytes`` encoded."""
    return torch.load(io.BytesIO(encoded.cpu().numpy().tobytes()), weights_only=True)
