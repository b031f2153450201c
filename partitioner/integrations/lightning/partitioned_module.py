"""Replace a module of a LightningModule, or its ``forward``, by a partitioned model, and restore it.

lightning_module.net  = pm of net                               self.net(x), self.parameters(), self.state_dict() are those of pm
lightning_module      + parameters and modules of its pm        self(x) calls pm, whose trace is that of self.forward
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from partitioner.integrations.lightning.called_modules import ModuleCall
from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.errors import ConfigError

_TABLES = ("_parameters", "_buffers", "_modules")


class Replacement:
    """A partitioned model that replaces a module called by a step.

    Args:
        root: the LightningModule.
        call: the module that the step calls; the LightningModule itself for its ``forward``.
        model: the partitioned one.
    """

    def __init__(self, root: nn.Module, call: ModuleCall, model: PartitionedModel) -> None:
        self.root = root
        self.call = call
        self.module = call.module
        self.path = call.path
        self.model = model
        self._tables: list[tuple[dict[str, Any], str, nn.Module]] = []
        self._own: dict[str, Any] | None = None

    def put_in(self) -> None:
        """Let the LightningModule compute with the partitioned model, in the modes that its own modules have."""
        for part, module in zip(self.model.modules(), self.module.modules(), strict=True):
            part.training = module.training
        if self.module is self.root:
            attributes = vars(self.root)
            self._own = {name: attributes[name] for name in (*_TABLES, *_METHODS) if name in attributes}
            attributes.update(_attributes(self.root, self.model))
            return
        parts = {module: self.model.get_submodule(path) if path else self.model for path, module in self.module.named_modules()}
        for owner in list(_outside(self.root, self.module)):
            table = vars(owner)["_modules"]
            for key, child in list(table.items()):
                if child in parts:
                    self._tables.append((table, key, child))
                    table[key] = parts[child]

    def take_out(self) -> None:
        """Give the LightningModule its own modules again, in the modes that it has now."""
        flags = [part.training for part in self.model.modules()]
        if self._own is not None:
            attributes = vars(self.root)
            flags[0] = self.root.training
            for name in (*_TABLES, *_METHODS):
                attributes.pop(name, None)
            attributes.update(self._own)
            self._own = None
        for table, key, child in self._tables:
            table[key] = child
        self._tables.clear()
        for module, is_training in zip(self.module.modules(), flags, strict=True):
            module.training = is_training

    def copy_back(self) -> None:
        """Copy the values to the LightningModule's own modules, which it has again. All ranks must call it."""
        self.module.load_state_dict(self.model.full_state_dict(), strict=False)

    def copy_values(self) -> None:
        """Copy the values of the LightningModule's own modules to the partitioned model."""
        self.model.load_state_dict(self.module.state_dict())


def traceable(root: nn.Module, call: ModuleCall) -> nn.Module:
    """Return the module to partition: what is called; for the LightningModule, one with the same tensors and without a Trainer.

    The LightningModule gets other parameters later, and programs must not compute with what its Trainer says while it is traced.
    """
    if call.module is not root:
        return call.module
    twin = copy.copy(root)
    for name in _TABLES:
        vars(twin)[name] = dict(vars(root)[name])
    twin.__class__ = type(type(root).__name__, (type(root),), {name: _refused(name) for name in _OF_THE_TRAINER})
    return twin


_OF_THE_TRAINER = ("current_epoch", "global_step", "global_rank", "local_rank", "trainer")
"""Attributes that change while a model trains, which ``forward`` may not read: programs would keep what they were."""


def _refused(name: str) -> property:
    """Return a property that refuses to be read."""

    def refuse(_model: nn.Module) -> Any:
        raise ConfigError(
            f"forward reads self.{name}, which would be a constant of the programs: read it in training_step, and pass forward a tensor",
            remedy=f"take self.{name} out of forward",
        )

    return property(refuse)


_METHODS = ("forward", "_save_to_state_dict", "_load_from_state_dict", "__deepcopy__")
"""Attributes of a LightningModule that a partitioned ``forward`` replaces."""


def _attributes(root: nn.Module, model: PartitionedModel) -> dict[str, Any]:
    """Return the attributes of a LightningModule whose ``forward`` is a partitioned model."""
    own = [name for table in ("_parameters", "_buffers") for name, tensor in vars(model)[table].items() if tensor is not None]

    def forward(*args: Any, **kwargs: Any) -> Any:
        model.training = root.training
        return model(*args, **kwargs)

    def save(destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if own:
            whole = model.state_dict(keep_vars=keep_vars)
            destination.update({f"{prefix}{name}": whole[name] for name in own if name in whole})

    def copied(memo: dict[int, Any]) -> nn.Module:
        other = copy.copy(root)
        memo[id(root)] = other
        own_attributes = {name: value for name, value in vars(root).items() if name not in (*_TABLES, *_METHODS, "_trainer", "_fabric")}
        vars(other).update(copy.deepcopy(own_attributes, memo))
        vars(other).update(_attributes(other, copy.deepcopy(model, memo)))
        return other

    load = model._load_from_state_dict  # noqa: SLF001  torch's load_state_dict reaches a module by it
    methods = {"forward": forward, "_save_to_state_dict": save, "_load_from_state_dict": load, "__deepcopy__": copied}
    return {**{name: vars(model)[name] for name in _TABLES}, **methods}


def _outside(root: nn.Module, module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model that are not in one of its modules."""
    inside = set(module.modules())
    return (each for each in root.modules() if each not in inside)


def refuse_shared(root: nn.Module, calls: Mapping[str, ModuleCall]) -> None:
    """Raise ConfigError if modules that are partitioned separately share a parameter with each other or with the rest of the model."""
    owner: dict[int, str] = {}
    inside = {id(module) for call in calls.values() for module in call.module.modules()}
    places = [(path, parameter) for path, call in calls.items() for parameter in set(call.module.parameters())]
    outside = [module for module in root.modules() if id(module) not in inside]
    places += [("", parameter) for module in outside for parameter in module.parameters(recurse=False)]
    for path, parameter in places:
        other = owner.setdefault(id(parameter), path)
        if other != path:
            names = {id(each): name for name, each in root.named_parameters()}
            owners = f"{other or 'the LightningModule'} and {path or 'the LightningModule'}"
            raise ConfigError(
                f"{names[id(parameter)]} is a parameter of {owners}, which are not partitioned as one: each would have a copy of its own",
                remedy="call both in forward of the LightningModule, and call self(...) in the step",
            )
