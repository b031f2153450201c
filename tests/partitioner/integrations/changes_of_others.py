"""Print what changes in modules and classes that are not ours while our modules are imported and a model is partitioned.

python changes_of_others.py accelerate transformers ...        frameworks that are imported first
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

OURS = ("passes", "cost_models", "partitioner")
CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(type, classmethod, staticmethod, property),
)
REGISTRIES = {"lightning.pytorch.strategies": "StrategyRegistry", "lightning.fabric.strategies": "STRATEGY_REGISTRY"}

CHANGING = ("torch._dynamo.package", "torch._functorch._aot_autograd.autograd_cache", "torch._inductor.codecache")
"""Modules of torch that add attributes to others when they are imported."""

State = dict[tuple[Any, str], tuple[object, ...]]
"""Module name or class, and attribute -> the objects that it consists of."""


def is_ours(name: object) -> bool:
    return str(name).partition(".")[0] in (*OURS, "__main__", "__mp_main__")


def parts(value: Any) -> tuple[object, ...]:
    """Return the objects of which another value consists: also the code and the defaults of functions."""
    if isinstance(value, classmethod | staticmethod):
        return (type(value), *parts(value.__func__))
    if isinstance(value, property):
        return (property, *(part for function in (value.fget, value.fset, value.fdel) for part in parts(function)))
    if isinstance(value, types.FunctionType):
        return (value, value.__code__, value.__defaults__, value.__kwdefaults__)
    return (value,)


def classes_of(modules: Mapping[str, types.ModuleType]) -> Iterator[type]:
    """Yield all classes that modules, or classes in them, have."""
    seen = set[type]()
    todo = [value for module in modules.values() for value in list(vars(module).values()) if isinstance(value, type)]
    while todo:
        found = todo.pop()
        if found not in seen and not is_ours(found.__module__):
            seen.add(found)
            yield found
            todo += [value for value in vars(found).values() if isinstance(value, type)]


def state() -> State:
    """Return all functions and classes of foreign modules, the finders of modules, and Lightning's strategies."""
    modules = {name: each for name, each in sys.modules.items() if not is_ours(name)}
    owners: list[tuple[Any, Mapping[str, Any]]] = [*((name, vars(module)) for name, module in modules.items())]
    owners += [(owner, vars(owner)) for owner in classes_of(modules)]
    found = {(owner, name): parts(value) for owner, each in owners for name, value in list(each.items()) if isinstance(value, CODE)}
    found["sys", "meta_path"] = tuple(sys.meta_path)
    for module, name in REGISTRIES.items():
        for strategy, entry in getattr(sys.modules.get(module), name, {}).items():
            found[module, f"{name}[{strategy!r}]"] = tuple(entry.values())
    return found


def changes(before: State, after: State) -> list[str]:
    """Return the names that have another value, are new in an old class, or are ours."""
    classes = {owner for owner, _ in before if isinstance(owner, type)}
    new = [key for key in after.keys() - before.keys() if key[0] in classes or is_ours(getattr(after[key][0], "__module__", ""))]
    other = [key for key, value in before.items() if len(value) != len(after[key]) or any(map(is_not, value, after[key]))]
    return [f"{owner}.{name}" for owner, name in (*new, *other)]


def is_not(one: object, other: object) -> bool:
    return one is not other


def import_all(*, with_frameworks: bool) -> None:
    """Import all modules of ours; those of integrations if their frameworks are imported, which themselves change others."""
    for root in OURS:
        for found in pkgutil.walk_packages(importlib.import_module(root).__path__, root + "."):
            is_of_framework = found.name.startswith("partitioner.integrations.") and found.name.count(".") > 2
            if not found.name.endswith("__main__") and (with_frameworks or not is_of_framework):
                importlib.import_module(found.name)


def partition_models() -> None:
    """Partition a model in several modes; train it, and answer what frameworks read of it."""
    partition = importlib.import_module("partitioner").partition
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 4))
    x, target = torch.randn(8, 8), torch.randn(8, 4)
    for mode in ("pipeline", "fsdp", "tensor"):
        pm = partition(model, 2, mode, example_inputs=(x,), progress=False)
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        pm(x).sum().backward()
        hasattr(pm, "hf_device_map")


def main() -> None:
    for name in (*CHANGING, *sys.argv[1:]):
        importlib.import_module(name)
    before = state()
    import_all(with_frameworks=len(sys.argv) > 1)
    partition_models()
    sys.stdout.write("\n".join(changes(before, state())) or "nothing changed\n")


if __name__ == "__main__":
    main()
