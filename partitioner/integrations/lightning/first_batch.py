"""The first batch of a Trainer's loader, as its step gets it; nothing is taken from the loader that training would miss.

It is read from a copy of the loader, since a data set may draw from a generator of its own, or count what it is asked for. Large arrays
are not copied; of a data set that is read by index, neither is what cannot be copied: files and connections.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from partitioner.integrations.lightning.called_modules import random_state_kept

LOOPS = {"fit": "fit_loop", "validate": "validate_loop", "test": "test_loop", "predict": "predict_loop"}
"""Function of the Trainer -> its attribute that runs it."""

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""Function of the Trainer -> the method of a LightningModule that it calls."""


def first_batch(trainer: Any, function: str) -> Any:
    """Return the first batch of a function, such as ``fit``, on its device and in its precision; None if training would miss it."""
    source = getattr(trainer, LOOPS[function])._data_source  # noqa: SLF001  Lightning has no public way to the loader before it is set up
    with random_state_kept():
        loader = source.dataloader()
        loaders = loader if function == "fit" or not isinstance(loader, list | tuple) else loader[0]
        batch = _first_of(loaders, trainer)
        if batch is None:
            return None
        batch = trainer.precision_plugin.convert_input(batch)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _first_of(loader: Any, trainer: Any) -> Any:
    """Return the first item of a loader, or of each of several; None if taking it would be seen."""
    iterables = getattr(loader, "iterables", None)  # of a CombinedLoader
    if iterables is not None:
        return _first_of(iterables, trainer)
    if isinstance(loader, Mapping):
        items = {key: _first_of(each, trainer) for key, each in loader.items()}
        return None if any(item is None for item in items.values()) else items
    if isinstance(loader, list | tuple):
        batches = [_first_of(each, trainer) for each in loader]
        return None if any(batch is None for batch in batches) else batches
    twin, is_whole = _copied(_idle(loader), _large_arrays(loader, trainer))
    dataset: Any = getattr(twin, "dataset", None)
    collate = getattr(twin, "collate_fn", None)
    rows = getattr(twin, "batch_size", None) or getattr(getattr(twin, "batch_sampler", None), "batch_size", None)
    if collate is not None and rows and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        return collate([dataset[index] for index in range(min(rows, len(dataset)))])
    if not is_whole or not isinstance(twin, Iterable) or isinstance(twin, Iterator) or isinstance(dataset, Iterator):
        return None  # what is left could be read only once
    return next(iter(twin), None)


_LARGE = 2**20
"""Bytes of an array that is not copied: it holds data, and not what a data set remembers."""


_NOT_COPIED = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, copy.Error, pickle.PicklingError)
"""Errors of objects that cannot be copied: files, sockets, generators, locks, tensors of a graph."""


def _idle(loader: Any) -> Any:
    """Return a ``DataLoader`` without its worker processes, which read ahead; anything else unchanged."""
    if getattr(loader, "_iterator", None) is None:
        return loader
    idle = copy.copy(loader)
    vars(idle)["_iterator"] = None
    return idle


def _copied(value: Any, shared: Mapping[int, Any]) -> tuple[Any, bool]:
    """Return a deep copy, and whether all of it is a copy; attributes that cannot be copied are those of the original.

    Args:
        shared: identity -> an object that the copy has, too.
    """
    try:
        return copy.deepcopy(value, dict(shared)), True
    except _NOT_COPIED:
        if not hasattr(value, "__dict__") or isinstance(value, type):
            return value, False
    try:
        twin = copy.copy(value)
    except _NOT_COPIED:
        return value, False
    vars(twin).update({name: _copied(each, shared)[0] for name, each in vars(value).items()})
    return twin, False


def _large_arrays(value: Any, apart: Any) -> dict[int, Any]:
    """Return identity -> each large array that an object reaches by its attributes and containers, and ``apart``, which is not copied."""
    found: dict[int, Any] = {id(apart): apart}
    seen = {id(apart)}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, str | bytes | int | float | type | ModuleType):
            continue
        seen.add(id(each))
        if _bytes(each) > _LARGE:
            found[id(each)] = each
        else:
            waiting.extend(_parts(each))
    return found


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor or array; 0 for anything else."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return int(value.nbytes) if hasattr(type(value), "nbytes") else 0


def _parts(value: Any) -> Iterator[Any]:
    """Yield the items of a container, else the attributes of an object."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()
