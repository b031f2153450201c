"""An optimizer that updates each sharded parameter whole, on the rank that owns it.

    optimizer = OwnerOptimizer(pm.parameters(), torch.optim.Muon, lr=0.02)
    optimizer.step()
        1. ranks send their parts of gradients and values to the owners                  OwnerPlan.gathered
        2. each owner runs a step of torch.optim.Muon on its whole parameters
        3. owners send the parts of the new values to the ranks that hold them           OwnerPlan.scattered

Values are gathered in every step, too, since a checkpoint, an average of weights, or anything else may have written to parameters. A
parameter that is whole where it is used is updated there, by the same optimizer, without messages.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.optimizers.named_groups import as_bytes, from_bytes, options_of
from partitioner.runtime.state.optimizers.owner_plan import OwnedParameter, OwnerPlan, Sharded, choose_owners, update_cost
from partitioner.runtime.state.optimizers.state_hooks import OptimizerStates, model_of
from partitioner.runtime.state.optimizers.update_check import reads_of, register_optimizer
from partitioner.runtime.state.optimizers.whole_states import WholeStateOptimizer
from partitioner.runtime.state.parameters import State, check_values
from partitioner.runtime.state.part_gradient import plain
from passes.ir.errors import ConfigError
from passes.spmd.shards import Block


@dataclass(frozen=True)
class OwnerTraffic:
    """Communication of a step, counted by this process.

    Attributes:
        parameters: the sharded parameters that had a gradient: ``optimizer.plan.restricted_to(parameters)`` is the plan of the step.
        sent: (source, destination) -> bytes, for the ranks of this process.
        flag_bytes: of the vector of flags that was reduced over all ranks.
    """

    parameters: tuple[str, ...]
    sent: Mapping[tuple[int, int], int]
    flag_bytes: int


_Sent: TypeAlias = Counter[tuple[int, int]]
"""(source, destination) -> bytes."""


@dataclass(eq=False)
class _Shards:
    """The shards of one parameter in this process, and the whole parameter if it is owned here."""

    by_rank: dict[int, nn.Parameter] = field(default_factory=dict)
    whole: nn.Parameter | None = None


@dataclass(frozen=True)
class _Listed:
    """A parameter that a process has listed."""

    group: int
    dtype: str


class OwnerOptimizer(WholeStateOptimizer):
    """Updates the parameters of a partitioned model with an optimizer that reads whole parameters, in every mode and both runtimes.

    All ranks must make it, and call its methods, together.

    Args:
        params: parameters of a partitioned model, or groups of them, as for ``optimizer_class``; a pipeline's process lists its own.
        optimizer_class: an optimizer whose update of a parameter reads that parameter alone: ``torch.optim.Muon``,
            ``torch.optim.Adafactor``, or a class for which ``register_optimizer(cls, "parameters")`` says so.
        model: the partitioned model, for a process that lists no parameter while there are several partitioned models.
        defaults: the arguments of ``optimizer_class``.

    Raises:
        ConfigError: the class reads several parameters at once, or ranks list different parameters.
    """

    def __init__(self, params: Any, optimizer_class: type[Optimizer], *, model: Any = None, **defaults: Any) -> None:
        self.optimizer_class = _checked_class(optimizer_class)
        groups = _groups(params)
        listed = [parameter for group in groups for parameter in _tensors(group["params"])]
        self._model = _model(listed, model)
        self._state_of_model: State = self._model.state
        self._runtime: Runtime = self._model.runtime
        check_values(self._state_of_model)
        if not listed:
            groups[0]["params"] = list(self._state_of_model.stand_in)
        self._arguments = defaults
        self._names = {id(stored.parameter): stored.name for stored in self._state_of_model.stored_parameters()}
        self._shards: dict[str, _Shards] = {}
        self._whole_of: dict[int, nn.Parameter | None] = {}
        self._inner: Optimizer | None = None
        self._has_state = False
        self.last_step: OwnerTraffic | None = None
        """Communication of the last step."""
        self._plan = OwnerPlan((), self._runtime.n_ranks, 0)
        self._plan_of_processes = self._plan
        super().__init__(groups, _probe(optimizer_class, self._whole_shaped(groups), defaults).defaults)
        self._model.attach(self)
        self._add(range(len(self.param_groups)))

    # -- the plan ------------------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> OwnerPlan:
        """The owners, and the messages of a step in which every parameter has a gradient; see ``OwnerPlan.restricted_to`` for others."""
        return self._plan

    @property
    def plan_of_processes(self) -> OwnerPlan:
        """The plan for one rank a process: ``plan`` itself under torchrun, the plan for torchrun if all ranks are in one process."""
        return self._plan_of_processes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; the owners of other parameters stay. All ranks must add it."""
        if not hasattr(self, "param_groups") or self._inner is None:
            super().add_param_group(param_group)
            return
        group = _groups([param_group])[0]
        _probe(self.optimizer_class, self._whole_shaped([group]), self._arguments)
        super().add_param_group(group)
        self._add(range(len(self.param_groups) - 1, len(self.param_groups)))

    def _add(self, numbers: range) -> None:
        """Choose owners for the sharded parameters of groups, and give the groups to the optimizer of whole parameters."""
        listed = self._listed(numbers)
        self._plan = self._with_owners(self._plan, listed, self._state_of_model.blocks_of_ranks)
        self._plan_of_processes = self._with_owners(self._plan_of_processes, listed, self._state_of_model.blocks_in_processes)
        added = self._plan.restricted_to(listed)
        for number in numbers:
            for parameter in self.param_groups[number]["params"]:
                name = self._names.get(id(parameter), "")
                if name in added.owners:
                    shards = self._shards.setdefault(name, _Shards())
                    shards.by_rank[self._rank_of(name, parameter)] = parameter
                    self._whole_of[id(parameter)] = None
        for planned in added.parameters:
            here = [rank for rank in planned.holders if rank in self._runtime.local_ranks]
            if here and sorted(self._shards[planned.name].by_rank) != sorted(here):
                raise ConfigError(
                    f"{planned.name} is in {len(here)} parts on several devices, and the optimizer has some of them",
                    remedy="put all into one group: [p for name, p in pm.named_parameters() if ...] has every part under the one name",
                )
            if planned.owner in self._runtime.local_ranks:
                shards = self._shards[planned.name]
                shard = shards.by_rank[planned.owner]
                shards.whole = nn.Parameter(torch.empty(planned.shape, dtype=shard.dtype, device=shard.device), shard.requires_grad)
                self._whole_of[id(shard)] = shards.whole
        with torch.no_grad():
            self._gather("value", added)
        groups = [self._inner_group(number) for number in numbers]
        if self._inner is None:
            self._inner = self.optimizer_class(groups, **self._arguments)
        else:
            for group in groups:
                self._inner.add_param_group(group)
        self._link_state()

    def _listed(self, numbers: range) -> dict[str, _Listed]:
        """Return the parameters of groups that any process lists, by name; all processes must list a sharded one of theirs alike.

        Raises:
            ConfigError: naming a parameter and a rank.
        """
        own: dict[str, tuple[int, str]] = {}
        for number in numbers:
            for parameter in self.param_groups[number]["params"]:
                if id(parameter) in self._names:
                    own[self._names[id(parameter)]] = (number, str(parameter.dtype).removeprefix("torch."))
        answers = self._runtime.collect({str(self._runtime.local_ranks[0]): as_bytes(own)})
        of_rank = {int(rank): from_bytes(answer) for rank, answer in answers.items() if answer is not None}
        merged = {name: _Listed(*entry) for entries in of_rank.values() for name, entry in entries.items()}
        for name, entry in merged.items():
            if self._state_of_model.is_cut(name) and len(of_rank) > 1:
                for holder in self._state_of_model.blocks_of_ranks(name):
                    found = of_rank[holder].get(name)
                    if found is None or found[0] != entry.group:
                        where = "does not list it" if found is None else f"has it in group {found[0]}"
                        raise ConfigError(
                            f"{name} is in group {entry.group} of the optimizer of one rank, and rank {holder} {where}",
                            remedy="make the groups by the names of pm.named_parameters(), the same way on every rank",
                        )
        return {name: merged[name] for name in self._state_of_model.parameter_names if name in merged}

    def _with_owners(self, plan: OwnerPlan, listed: Mapping[str, _Listed], blocks_of: Callable[[str], Mapping[int, Block]]) -> OwnerPlan:
        """Return a plan with owners for the sharded ones of the listed parameters."""
        is_linear = reads_of(self.optimizer_class) == "elements" or self.optimizer_class is torch.optim.Adafactor
        added = []
        for name, entry in listed.items():
            holders = blocks_of(name)
            if not all(block.is_whole for block in holders.values()):
                cost = update_cost(next(iter(holders.values())).shape, linear=is_linear)
                added.append(Sharded(name, getattr(torch, entry.dtype), holders, cost))
        return choose_owners(added, plan, self._runtime.n_ranks)

    def _rank_of(self, name: str, parameter: Tensor) -> int:
        """Return the rank that holds a shard of this process."""
        if len(self._runtime.local_ranks) == 1:
            return self._runtime.local_ranks[0]
        return self._state_of_model.rank_of(name, parameter)

    def _whole_shaped(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return groups with parameters of the shapes of whole ones, without memory."""
        shape_of = {name: next(iter(self._state_of_model.blocks_of_ranks(name).values())).shape for name in set(self._names.values())}
        empty = {id(parameter) for parameter in self._state_of_model.stand_in}
        return [
            {
                **group,
                "params": [
                    nn.Parameter(torch.empty(shape_of.get(self._names.get(id(each), ""), each.shape), dtype=each.dtype, device="meta"))
                    for each in _tensors(group["params"])
                    if id(each) not in empty
                ],
            }
            for group in groups
        ]

    def _inner_group(self, number: int) -> dict[str, Any]:
        """Return a group with the parameters that this process updates: whole ones of its own, and those that it owns."""
        group = self.param_groups[number]
        empty = {id(parameter) for parameter in self._state_of_model.stand_in}
        chosen = [self._whole_of.get(id(each), each) for each in group["params"] if id(each) not in empty]
        return {**options_of(group), "params": [each for each in chosen if each is not None]}

    # -- a step --------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; all ranks must call it. A parameter without a gradient is left alone.

        Raises:
            ConfigError: some ranks have a gradient of a parameter, and others do not.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._inner is not None
        _copy_options(self, self._inner)
        present, flag_bytes = self._with_gradients()
        with self._runtime.failing_together():
            plan = self._plan.restricted_to(present)
            sent = self._gather("gradient", plan) + self._gather("value", plan)
            self._inner.step()
            sent += self._scatter(plan)
        _copy_options(self._inner, self)
        self._has_state = True
        self._link_state()
        self.last_step = OwnerTraffic(present, dict(sent), flag_bytes)
        return loss

    def _with_gradients(self) -> tuple[tuple[str, ...], int]:
        """Return the sharded parameters of all ranks that have a gradient, and the bytes of the flags that were reduced."""
        planned = self._plan.parameters
        if not planned:
            return (), 0
        flags = torch.zeros(2, len(planned), dtype=torch.uint8)
        for number, parameter in enumerate(planned):
            for shard in self._shards[parameter.name].by_rank.values() if parameter.name in self._shards else ():
                flags[int(shard.grad is None), number] = 1
        has, lacks = self._runtime.reduce(flags.to(self._runtime.devices[self._runtime.local_ranks[0]]), "max").cpu().bool()
        torn = [parameter.name for parameter, both in zip(planned, (has & lacks).tolist(), strict=True) if both]
        if torn:
            raise ConfigError(
                f"some ranks have a gradient of {torn[0]}, and others have none",
                remedy="clear or keep gradients on all ranks alike: optimizer.zero_grad(), or pm.zero_grad()",
            )
        return tuple(parameter.name for parameter, found in zip(planned, has.tolist(), strict=True) if found), flags.nbytes

    def _gather(self, what: Literal["gradient", "value"], plan: OwnerPlan) -> _Sent:
        """Send the parts of gradients, or of values, to the owners, and put them together there."""
        if not self._plan.parameters:
            return Counter()

        def part(name: str, rank: int) -> Tensor:
            shard = self._shards[name].by_rank[rank]
            return shard.detach() if what == "value" or shard.grad is None else plain(shard.grad)

        messages = plan.gathered(what)
        outgoing = {
            number: part(each.name, each.source) for number, each in enumerate(messages) if each.source in self._runtime.local_ranks
        }
        exchanged = self._runtime.exchange(messages, outgoing)
        targets: dict[str, Tensor] = {}
        for parameter, _, whole in self._owned(plan):
            targets[parameter.name] = whole.detach()
            if what == "gradient":
                targets[parameter.name] = whole.grad = torch.empty_like(whole)
            parameter.holders[parameter.owner].put(targets[parameter.name], part(parameter.name, parameter.owner))
        for number, value in exchanged.received.items():
            messages[number].block.put(targets[messages[number].name], value)
        return Counter(exchanged.sent)

    def _owned(self, plan: OwnerPlan) -> Iterator[tuple[OwnedParameter, _Shards, nn.Parameter]]:
        """Yield each parameter of a plan that this process owns, with its shards here and the whole."""
        for parameter in plan.parameters:
            shards = self._shards.get(parameter.name)
            if shards is not None and shards.whole is not None:
                yield parameter, shards, shards.whole

    def _scatter(self, plan: OwnerPlan) -> _Sent:
        """Send the new values from the owners to all ranks that hold a part."""
        if not self._plan.parameters:
            return Counter()
        messages = plan.scattered()
        wholes: dict[str, Tensor] = {}
        for parameter, shards, whole in self._owned(plan):
            wholes[parameter.name] = whole.detach()
            whole.grad = None
            shards.by_rank[parameter.owner].copy_(parameter.holders[parameter.owner].take(whole.detach()))
        local = self._runtime.local_ranks
        outgoing = {number: each.block.take(wholes[each.name]) for number, each in enumerate(messages) if each.source in local}
        exchanged = self._runtime.exchange(messages, outgoing)
        for number, value in exchanged.received.items():
            self._shards[messages[number].name].by_rank[messages[number].destination].copy_(value)
        return Counter(exchanged.sent)

    # -- the state -----------------------------------------------------------------------------------------------------------------

    def is_sharded(self, parameter: Tensor) -> bool:
        """See ``WholeStateOptimizer``."""
        return id(parameter) in self._whole_of

    def keeps(self, parameter: Tensor) -> bool:
        """See ``WholeStateOptimizer``."""
        return self._whole_of.get(id(parameter)) is not None

    @property
    def has_state(self) -> bool:
        """See ``WholeStateOptimizer``."""
        return self._has_state if self._plan.parameters else bool(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class from any plan, or of the optimizer of the model."""
        super().load_state_dict(state_dict)
        assert self._inner is not None
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            shard_of = {id(self._whole_of.get(id(each), each)): each for each in own["params"]}
            count = len(inner["params"])
            groups.append({**options_of(own), "params": list(range(number, number + count))})
            for whole in inner["params"]:
                entries = self.state.get(shard_of[id(whole)])
                if entries:
                    states[number] = entries
                number += 1
        self._inner.load_state_dict({"state": states, "param_groups": groups})
        found = torch.tensor(float(bool(self.state)), device=self._runtime.devices[self._runtime.local_ranks[0]])
        self._has_state = bool(self._runtime.reduce(found, "max"))
        self._link_state()

    def _link_state(self) -> None:
        """Let ``state`` have the entries of the optimizer of whole parameters, and an empty entry for a shard whose state another rank has.

        Callers tell from an empty ``state`` that there was no step, and all ranks must find the same.
        """
        assert self._inner is not None
        for group in self.param_groups:
            for parameter in group["params"]:
                whole = self._whole_of.get(id(parameter), parameter)
                if whole is not None and whole in self._inner.state:
                    self.state[parameter] = self._inner.state[whole]
        if self._plan.parameters and self._has_state:
            for shard in (shard for shards in self._shards.values() for shard in shards.by_rank.values()):
                self.state.setdefault(shard, {})
            if not self.state:
                self.state[next(parameter for group in self.param_groups for parameter in group["params"])] = {}

    def __getstate__(self) -> NoReturn:
        raise ConfigError(
            "an OwnerOptimizer cannot be copied or pickled: it is connected to the parameters of all ranks",
            remedy="save optimizer.state_dict(), or pm.full_optimizer_state_dict(optimizer), and load it into a new one",
        )


register_optimizer(OwnerOptimizer, "elements")


def _checked_class(kind: Any) -> type[Optimizer]:
    """Return a class that may update whole parameters one by one; raise ConfigError for any other."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or issubclass(kind, WholeStateOptimizer):
        raise ConfigError(
            f"{kind!r} is no class of optimizers of whole parameters",
            remedy="pass the class and its arguments: OwnerOptimizer(pm.parameters(), torch.optim.Muon, lr=0.02)",
        )
    reads = reads_of(kind)
    if reads == "model":
        raise ConfigError(
            f"{kind.__name__} reads all parameters at once, and an owner has some of them: its update would not be that of the model",
            remedy="run all ranks in one process (without torchrun), where parameters are whole, and use the class itself",
        )
    if reads is None:
        raise ConfigError(
            f"{kind.__name__} may read several parameters at once, and an owner has some of them",
            remedy=f'if it updates each parameter by itself, say so: partitioner.register_optimizer({kind.__name__}, "parameters")',
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind.__name__}.step needs a closure, and an owner cannot run the model within a step", remedy="use an optimizer without one"
        )
    return kind


def _probe(kind: type[Optimizer], groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer of the class without memory, so that arguments and shapes that it refuses are refused on all ranks."""
    return kind(groups, **defaults)


def _groups(params: Any) -> list[dict[str, Any]]:
    """Return the groups of ``params`` of an optimizer, with lists of parameters."""
    if isinstance(params, Tensor | Mapping):
        raise ConfigError(f"params is a {type(params).__name__}", remedy="pass parameters or groups of them in a list")
    given = list(params)
    if given and isinstance(given[0], Mapping):
        return [{**group, "params": [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])} for group in given]
    return [{"params": given}]


def _tensors(params: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters of a group, which may be pairs of name and parameter."""
    for each in params:
        yield each[1] if isinstance(each, tuple) else each


def _model(listed: Sequence[Tensor], model: Any) -> OptimizerStates:
    """Return the optimizer states of the partitioned model that has these parameters.

    Raises:
        ConfigError: no partitioned model has them, or several have.
    """
    if model is not None:
        states = getattr(model, "_optimizer_states", None)
        if not isinstance(states, OptimizerStates):
            raise ConfigError(f"model is a {type(model).__name__}", remedy="pass the partitioned model whose parameters these are")
        return states
    found = model_of(listed)
    if found is None:
        problem = "these are no parameters of a partitioned model" if listed else "this process lists no parameters"
        raise ConfigError(
            problem, remedy="pass parameters of pm.parameters(); in a process that has none of them, model=pm says whose optimizer it is"
        )
    return found


def _copy_options(source: Optimizer, target: Optimizer) -> None:
    """Copy the options of all groups: schedulers set those of one optimizer, and a step may set those of the other."""
    for given, taken in zip(source.param_groups, target.param_groups, strict=True):
        taken.update(options_of(given))
