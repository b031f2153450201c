"""Batch normalisation and microbatches: report differences from the unpartitioned model, and refuse batches without statistics."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from partitioner.options.batch_rows import RowParts
from passes.analysis.row_statistics import values_per_channel
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.errors import ConfigError, PartitionWarning, Place, first_few, level_of_caller
from passes.ir.graph import ModelGraph, RowMixing
from passes.ir.plan import Plan

_REMEDY = (
    "n_microbatches=1 gives the unpartitioned model's numbers; the planner chooses it when n_microbatches and "
    'batchnorm="local" are left out'
)


def microbatch_effects(mixing: RowMixing, n_microbatches: int) -> tuple[str, ...]:
    """Describe how the numbers of so many microbatches differ from the unpartitioned model's, a sentence each; empty for one."""
    if n_microbatches == 1 or not mixing:
        return ()
    effect = (
        f"batch normalisation in training ({first_names(mixing.normalizations)}) takes its statistics over each of {n_microbatches} "
        "microbatches, not over the batch: outputs and gradients differ from the unpartitioned model's, and running statistics are "
        f"updated {n_microbatches} times a step"
    )
    return (effect,)


def warn_of_microbatches(graph: ModelGraph, plan: Plan) -> None:
    """Emit one PartitionWarning, at the line that called ``partition``, where microbatches change the model's numbers."""
    effects = microbatch_effects(graph.mixing, plan.n_microbatches)
    if effects:
        warnings.warn("BatchNorm under microbatches: " + "; ".join(effects) + f"\n  remedy: {_REMEDY}", PartitionWarning, level_of_caller())


def check_values_per_channel(graph: ModelGraph, plan: Plan, parts: RowParts, batch: int, count: int) -> None:
    """Raise ConfigError if microbatches leave batch normalisation in training a single value per channel: its variance would be nan.

    Args:
        parts: how the mesh cuts the batch.
        batch: rows of the whole batch.
        count: number of microbatches.
    """
    is_cut = parts.divides(batch)
    rows = min(microbatch_sizes(batch // parts.count if is_cut else batch, count))
    rows_of_statistics = rows * parts.count if is_cut and plan.batchnorm == "sync" else rows
    refused = [module for module, values in values_per_channel(graph, rows_of_statistics) if values < 2]
    if refused:
        cut = f" in {count} microbatches" if count > 1 else ""
        ranks = f" over {parts.count} ranks" if is_cut and parts.count > 1 and plan.batchnorm == "local" else ""
        raise ConfigError(
            f"batch normalisation in training needs more than one value per channel: a batch of {batch}{cut}{ranks} leaves one",
            place=Place(module=first_names(refused)),
            remedy="pass more rows or fewer microbatches, or partition(..., training=False)",
        )


def why_uncut(mixing: RowMixing) -> str:
    """Say why the planner does not cut the batch into microbatches, and which option allows it."""
    names = f"batch normalisation in training ({first_names(mixing.normalizations)})"
    allow = 'n_microbatches= or batchnorm="local" allows it'
    return f"The batch is not cut into microbatches, which would change the numbers of {names}; {allow}."


def first_names(names: Sequence[str]) -> str:
    """Join the first names and count the others.

    >>> first_names(["bn1", "bn2", "bn3", "bn4", "bn5"])
    'bn1, bn2, bn3 and 2 more'
    """
    return first_few(list(dict.fromkeys(name or "the model itself" for name in names)))
