"""The first batch of a Trainer's loader, as its step gets it; nothing is taken from the loader that training would miss.

The data set of a ``DataLoader`` is read by index, so samplers, workers and random states are as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from partitioner.integrations.lightning.called_modules import random_state_kept

__all__ = ["LOOPS", "STEPS", "first_batch"]

LOOPS = {"fit": "fit_loop", "validate": "validate_loop", "test": "test_loop", "predict": "predict_loop"}
"""Function of the Trainer -> its attribute that runs it."""

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""Function of the Trainer -> the method of a LightningModule that it calls."""


def first_batch(trainer: Any, function: str) -> Any:
    """Return the first batch of a function of the Trainer, on its device and in its precision; None if it cannot be looked at."""
    source = getattr(trainer, LOOPS[function])._data_source  # noqa: SLF001  Lightning has no public way to the loader before it is set up
    with random_state_kept():
        loader = source.dataloader()
        loaders = loader if function == "fit" or not isinstance(loader, list | tuple) else loader[0]
        batch = _first_of(loaders)
        if batch is None:
            return None
        batch = trainer.precision_plugin.convert_input(batch)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _first_of(loader: Any) -> Any:
    """Return the first item of a loader, or of each of several; None if taking it would be seen."""
    iterables = getattr(loader, "iterables", None)  # of a CombinedLoader
    if iterables is not None:
        return _first_of(iterables)
    if isinstance(loader, Mapping):
        items = {key: _first_of(each) for key, each in loader.items()}
        return None if any(item is None for item in items.values()) else items
    if isinstance(loader, list | tuple):
        batches = [_first_of(each) for each in loader]
        return None if any(batch is None for batch in batches) else batches
    dataset: Any = getattr(loader, "dataset", None)
    collate = getattr(loader, "collate_fn", None)
    rows = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if collate is not None and rows and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        return collate([dataset[index] for index in range(min(rows, len(dataset)))])
    if not isinstance(loader, Iterable) or iter(loader) is loader or (dataset is not None and _is_iterator(dataset)):
        return None
    return next(iter(loader), None)


def _is_iterator(dataset: Any) -> bool:
    """Whether an iterable data set can be read only once."""
    return hasattr(dataset, "__iter__") and iter(dataset) is dataset
