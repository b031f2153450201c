"""Let ``state_dict()`` of an optimizer return the state of whole parameters, and ``load_state_dict()`` take it, where a process has parts.

    optimizer.state[weight]              exp_avg of rows 0 to 31, which this process holds
    optimizer.state_dict()               exp_avg of all 64 rows, gathered: what torch.save and get_optimizer_state_dict must find
    optimizer.load_state_dict(...)       takes rows 0 to 31 of it

An optimizer gets these hooks before its first step: ``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` run one, with zero
gradients. In a process that has the whole model they are not needed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.optimizers.state import gathered_entries, local_entries
from partitioner.runtime.state.optimizers.whole_states import WholeStateOptimizer
from partitioner.runtime.state.parameters import State
from passes.ir.errors import ConfigError

_models: WeakSet[OptimizerStates] = WeakSet()

_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""Optimizer -> number of its parameters when it was last seen."""

_hooked: WeakKeyDictionary[Optimizer, list[State]] = WeakKeyDictionary()
"""Optimizer -> the models whose hooks it has."""


_ELEMENTS_AT_ONCE = 2**24
"""Elements of parameters whose states are gathered in one call: 128 MiB for AdamW in 32 bits."""


class OptimizerStates:
    """Registers hooks on the optimizers of one model's parameters, if this process has a part of them."""

    def __init__(self, state: State, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime
        self._name_of = {id(stored.parameter): stored.name for stored in state.stored_parameters()}
        self._needs_hooks = not state.all_have_all
        _models.add(self)
        if self._needs_hooks:
            _watch_steps()

    @property
    def state(self) -> State:
        """The tensors of the model."""
        return self._state

    @property
    def runtime(self) -> Runtime:
        """Runs the model."""
        return self._runtime

    def attach(self, optimizer: Optimizer) -> None:
        """Register the hooks on an optimizer of this model, once, and take this process's parts of a state that it has loaded before."""
        hooked = _hooked.setdefault(optimizer, [])
        if not self._needs_hooks or any(state is self._state for state in hooked):
            return
        if not any(map(self.owns, _parameters(optimizer))):
            return
        hooked.append(self._state)
        for parameter in _parameters(optimizer):
            if id(parameter) in self._name_of and parameter in optimizer.state:
                optimizer.state[parameter] = self._local(optimizer, parameter, optimizer.state[parameter])
        optimizer.register_state_dict_post_hook(self._whole_state)
        optimizer.register_load_state_dict_pre_hook(self._local_state)

    def owns(self, parameter: Tensor) -> bool:
        """Return whether a parameter is one of this model."""
        return id(parameter) in self._name_of or self._is_stand_in(parameter)

    def _is_stand_in(self, parameter: Tensor) -> bool:
        """Return whether a parameter stands in for those that this process does not have."""
        return any(parameter is stand_in for stand_in in self._state.stand_in)

    def _whole_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state with that of whole parameters in place of that of parts. All ranks take part, also those without any."""
        parameters = list(_parameters(optimizer))
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        states = dict(state_dict["state"])
        for names in self._names_gathered_at_once():
            for name, gathered in gathered_entries(self._state, self._runtime, optimizer, names).items():
                for _, parameter in self._state.held(name):
                    entries = {what: _separate(value) for what, value in gathered.items()}
                    number = numbers.get(id(parameter), -1)
                    if number in states:
                        states[number] = {**states[number], **entries}
        groups = state_dict["param_groups"]
        stand_ins = [number for number, parameter in enumerate(parameters) if self._is_stand_in(parameter)]
        if stand_ins:
            states = {number: entries for number, entries in states.items() if number not in stand_ins}
            groups = [{**group, "params": [number for number in group["params"] if number not in stand_ins]} for group in groups]
        return {**state_dict, "state": states, "param_groups": groups}

    def _names_gathered_at_once(self) -> Iterator[list[str]]:
        """Yield the parameters that are cut, a number of elements at a time: a process keeps the states of its own parameters alone."""
        names: list[str] = []
        elements = 0
        for name in self._state.cut_parameters():
            names.append(name)
            elements += math.prod(next(iter(self._state.blocks_of_ranks(name).values())).shape)
            if elements > _ELEMENTS_AT_ONCE:
                yield names
                names, elements = [], 0
        if names:
            yield names

    def _local_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Return the state of this process's parts, by number: parts of one parameter have one name."""
        if len(state_dict["param_groups"]) != len(optimizer.param_groups):
            return None  # torch reports it
        keys: list[Any] = []
        groups: list[dict[str, Any]] = []
        for index, (saved, group) in enumerate(zip(state_dict["param_groups"], optimizer.param_groups, strict=True)):
            members = list(saved["params"]) or [None for parameter in group["params"] if self._is_stand_in(parameter)]
            if len(members) != len(group["params"]):
                return None  # torch reports it
            self._check_group(index, saved, members, group["params"])
            groups.append({**saved, "params": list(range(len(keys), len(keys) + len(members)))})
            keys += members
        states: dict[int, Any] = {}
        for number, (key, parameter) in enumerate(zip(keys, _parameters(optimizer), strict=True)):
            entries = state_dict["state"].get(key)
            if entries is not None:
                states[number] = self._local(optimizer, parameter, entries) if id(parameter) in self._name_of else entries
        return {**state_dict, "state": states, "param_groups": groups}

    def _check_group(self, index: int, saved: Mapping[str, Any], keys: Sequence[Any], parameters: Sequence[Tensor]) -> None:
        """Raise ConfigError if a saved group lacks its options, or names other parameters than the optimizer's group has."""
        pairs = [(key, self._name_of.get(id(parameter))) for key, parameter in zip(keys, parameters, strict=True)]
        named = [(key, name) for key, name in pairs if name is not None]
        others = [f"{key} in place of {name}" for key, name in named if isinstance(key, str) and not self._same(key, name)]
        if others or (named and saved.keys() <= {"params"}):
            problem = f"names {others[0]}" if others else "has no options of this process's parameters"
            raise ConfigError(
                f"group {index} of the optimizer's state {problem}: it is that of other parameters, of another pipeline stage",
                remedy="pass StateDictOptions(flatten_optimizer_state_dict=True) to get_optimizer_state_dict and set_optimizer_state_dict; "
                "or use pm.sharded_optimizer_state_dict(optimizer) and pm.load_optimizer_state_dict(optimizer, state)",
            )

    def _same(self, key: str, name: str) -> bool:
        return self._state.first_name(key) == self._state.first_name(name)

    def _local(self, optimizer: Optimizer, parameter: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of each entry that belongs to a parameter of this process; entries of parts stay as they are.

        Step counts are copied: parts of one parameter must not count on the same tensor.
        """
        name = self._name_of[id(parameter)]
        has_whole_state = isinstance(optimizer, WholeStateOptimizer) and optimizer.is_sharded(parameter)
        taken = {
            what: value
            for what, value in entries.items()
            if has_whole_state
            or (isinstance(value, Tensor) and (value.dim() == 0 or type(value) is not Tensor or value.shape != parameter.shape))
        }
        rest = {} if has_whole_state else dict(entries)
        return rest | local_entries(self._state, optimizer, name, parameter, taken)


def _separate(value: Any) -> Any:
    """Return a step count as a copy: parts of one parameter must not count on the same tensor."""
    return value.clone() if isinstance(value, Tensor) and not value.dim() else value


def model_of(parameters: Sequence[Tensor]) -> OptimizerStates | None:
    """Return the partitioned model that owns any of the parameters. Without parameters, return the only model of this process, or None."""
    if not parameters:
        distinct = {id(model.state.gradients): model for model in list(_models)}  # copies with other microbatches share their tensors
        return next(iter(distinct.values())) if len(distinct) == 1 else None
    return next((model for model in list(_models) if any(map(model.owns, parameters))), None)


def attach_hooks(optimizer: Optimizer) -> None:
    """Register the hooks of every model of which an optimizer has parameters."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _seen.get(optimizer) != count:
        for model in list(_models):
            model.attach(optimizer)
        _seen[optimizer] = count


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters in the order in which ``state_dict()`` numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


@functools.cache
def _watch_steps() -> None:
    """Register a hook, once, by which every optimizer gets its hooks before its first step."""
    register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: attach_hooks(optimizer))
