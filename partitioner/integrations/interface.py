"""The interface between a framework's integration and partitioned models.

A framework's loop prepares a model, gives each process batches, computes a loss and saves states. An integration is a subclass of the
framework's class: it overrides the methods that must differ for a partitioned model, by the functions of this module.

partitioned_models(module)        the partitioned models that a user's module is or contains
model_in_processes(module)        the one with ranks in several processes; None: the framework's own way is right
passes_own_rows(model)            whether loaders give each process rows of its own, or every process all rows
refuse_parameters_outside(...)    what no partitioned model has is not trained on each process's own rows
share_random_states()             all processes shuffle as the first one
losses_in_steps(models)           a pipeline trains by its schedule where the model returns its loss
preparing()                       the framework may read hf_device_map, by which models in several processes refuse its own classes
checked_options(options, ...)     arguments of ``partition`` that a class of the integration takes
import_optional(module)           the part of an integration that imports its framework
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from partitioner.api import partition
from partitioner.model.module.questions import preparing
from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.errors import ConfigError, did_you_mean

__all__ = [
    "checked_options",
    "import_optional",
    "losses_in_steps",
    "model_in_processes",
    "partitioned_models",
    "passes_own_rows",
    "preparing",
    "refuse_parameters_outside",
    "share_random_states",
]


def partitioned_models(module: Any) -> list[PartitionedModel]:
    """Return the partitioned models that a module is or contains; none if the argument is no module."""
    return [part for part in module.modules() if isinstance(part, PartitionedModel)] if isinstance(module, nn.Module) else []


def model_in_processes(module: Any) -> PartitionedModel | None:
    """Return the first partitioned model that a module is or contains, if its ranks are in several processes."""
    found = partitioned_models(module)
    return None if not found or found[0].has_all_ranks else found[0]


def passes_own_rows(model: PartitionedModel) -> bool:
    """Return whether each process passes its own rows: ``partition(..., inputs="local")``."""
    return model.traced.tracing.inputs == "local"


def refuse_parameters_outside(module: nn.Module) -> None:
    """Raise ConfigError for trainable parameters beside partitioned models of which each process passes its own rows."""
    models = partitioned_models(module)
    inside = {id(parameter) for model in models for parameter in model.parameters()}
    others = [name for name, each in module.named_parameters() if each.requires_grad and id(each) not in inside]
    if others and any(map(passes_own_rows, models)):
        raise ConfigError(
            f"{others[0]} is outside of the partitioned model, and would be trained on each process's own rows",
            remedy='partition the whole module; or pass the whole batch everywhere: partition(..., inputs="global")',
        )


def share_random_states() -> None:
    """Give all processes the random states of rank 0, of torch, Python and NumPy: loaders that shuffle then read the same rows."""
    numpy = sys.modules.get("numpy")
    states = [(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())]
    dist.broadcast_object_list(states, 0)
    torch_state, python_state, numpy_state = states[0]
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    if numpy is not None and numpy_state is not None:
        numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def losses_in_steps(models: Iterable[PartitionedModel], *, reads_loss_alone: bool = False) -> Iterator[None]:
    """Run steps inside of the calls of partitioned models; see ``partitioner.model.steps.loss_in_step``.

    Args:
        reads_loss_alone: whether the loop is known to read no result of them but the loss.
    """
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model.loss_in_step.on(reads_loss_alone=reads_loss_alone))
        yield


def checked_options(options: Mapping[str, Any], given: Mapping[str, str], taker: str) -> dict[str, Any]:
    """Return the options; raise ConfigError for those that ``partition`` does not take, or that do not apply.

    Args:
        given: argument of ``partition`` that is no option -> what takes its place.
        taker: of the options, for errors.
    """
    names = tuple(name for name in inspect.signature(partition).parameters if name not in given)
    for name in options:
        if name in given:
            raise ConfigError(f"{name} is no option of {taker}: {given[name]}", remedy="leave it out")
        if name not in names:
            remedy = f"{did_you_mean(str(name), names, str)}its options are {', '.join(names)}"
            raise ConfigError(f"{taker} has no option {name!r}", remedy=remedy)
    return dict(options)


def import_optional(module: str) -> Any:
    """Import a module; raise ConfigError, with the extra to install, if a library that it needs is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        extra = "lightning" if "lightning" in library else library
        raise ConfigError(f"{library} is not installed", remedy=f'pip install "torch-partitioner[{extra}]"') from error
