"""Methods of ``Trainer`` that do something else for a partitioned model with one rank a process; for other models they do as before.

__init__                           asks all modules of the model, not only the outermost, for what prepares accelerate for them
save_model                         all processes gather the weights that the first one writes, and wait until it has
_save_checkpoint                   the same for the optimizer; the first process's random state is that of all
_load_optimizer_and_scheduler      every process takes its part
compute_loss                       with inputs="local": only a loss of the process's own rows is multiplied by the number of processes
_get_num_items_in_batch            with inputs="local": a loss that the model returns is divided by the items of all, in any case
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from partitioner.integrations.accelerate.checkpoints import gathered_state, loading_gathered_state, model_in_processes, optimizer_state
from partitioner.integrations.accelerate.methods import replacing
from partitioner.integrations.accelerate.processes import counts_replicas, passes_own_rows, wait_for_all
from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.torch_private import pytree

__all__ = ["replace_methods"]

Method = Callable[..., Any]
"""A method as it was."""


@functools.cache
def replace_methods() -> None:
    """Replace the methods, once."""
    from transformers import Trainer  # noqa: PLC0415  an optional package

    @replacing(Trainer, "__init__")
    def _init(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> None:
        method(trainer, *args, **kwargs)
        for part in trainer.model.modules():
            if isinstance(part, PartitionedModel):
                getattr(part, "hf_device_map", None)

    _replace_saving(Trainer)
    _replace_loss(Trainer)


def _replace_saving(trainer_class: Any) -> None:
    """Replace the methods that save and load checkpoints."""

    @replacing(trainer_class, "save_model")
    def _save_model(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if model_in_processes(trainer.model) is None:
            return method(trainer, *args, **kwargs)
        with gathered_state(model=(trainer.model, trainer.model.state_dict())):
            method(trainer, *args, **kwargs)
        return wait_for_all()

    @replacing(trainer_class, "_save_checkpoint")
    def _save_checkpoint(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        pm = model_in_processes(trainer.model)
        if pm is None or trainer.args.save_only_model:
            return method(trainer, *args, **kwargs)
        with gathered_state(optimizer=(trainer.optimizer, optimizer_state(pm, trainer.optimizer))):
            method(trainer, *args, **kwargs)
        return wait_for_all()

    @replacing(trainer_class, "_save_rng_state")
    def _save_rng_state(method: Method, trainer: Any, output_dir: str) -> None:
        if not counts_replicas() or trainer.args.should_save:
            method(trainer, output_dir)

    @replacing(trainer_class, "_load_optimizer_and_scheduler")
    def _load_optimizer_and_scheduler(method: Method, trainer: Any, checkpoint: Any) -> Any:
        pm = model_in_processes(trainer.model)
        if pm is None or trainer.optimizer is None:
            return method(trainer, checkpoint)
        with loading_gathered_state(pm, trainer.optimizer):
            return method(trainer, checkpoint)


def _replace_loss(trainer_class: Any) -> None:
    """Replace the methods by which a loss is computed. Trainer sums over processes what it takes for a loss of each one's own rows."""

    @replacing(trainer_class, "_get_num_items_in_batch")
    def _get_num_items_in_batch(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with _averaging(trainer, trainer.args.average_tokens_across_devices or _returns_loss(trainer)):
            return method(trainer, *args, **kwargs)

    @replacing(trainer_class, "compute_loss")
    def _compute_loss(
        method: Method, trainer: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if not _has_own_rows(trainer):
            return method(trainer, model, inputs, return_outputs, num_items_in_batch, **kwargs)
        with _averaging(trainer, False), _returned_numbers(trainer) as returned:
            loss, outputs = method(trainer, model, inputs, True, num_items_in_batch, **kwargs)
        is_averaged = trainer.args.average_tokens_across_devices and num_items_in_batch is not None
        if is_averaged and _divides_own_loss(trainer) and not any(loss is number for number in returned):
            loss = loss * trainer.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def _has_own_rows(trainer: Any) -> bool:
    """Whether each process passes its own rows to a partitioned model."""
    return passes_own_rows() and model_in_processes(trainer.model) is not None


def _is_partitioned(trainer: Any) -> bool:
    """Whether a Trainer's model is a partitioned one itself, and not a module around it."""
    return isinstance(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False), PartitionedModel)


def _returns_loss(trainer: Any) -> bool:
    """Whether the loss is the number that a partitioned model returns for the rows of all processes, not one computed of its outputs."""
    return _has_own_rows(trainer) and _is_partitioned(trainer) and trainer.compute_loss_func is None and trainer.label_smoother is None


def _divides_own_loss(trainer: Any) -> bool:
    """Whether a loss of this process's rows is divided by the items of all: by a function of the user's, or a module around the model."""
    if trainer.compute_loss_func is not None:
        return True
    return trainer.label_smoother is None and trainer.model_accepts_loss_kwargs and not _is_partitioned(trainer)


@contextlib.contextmanager
def _averaging(trainer: Any, is_across_processes: bool) -> Iterator[None]:
    """Let a Trainer average tokens over processes, or not."""
    before = trainer.args.average_tokens_across_devices
    trainer.args.average_tokens_across_devices = is_across_processes
    try:
        yield
    finally:
        trainer.args.average_tokens_across_devices = before


@contextlib.contextmanager
def _returned_numbers(trainer: Any) -> Iterator[list[Tensor]]:
    """Collect the tensors of one number that partitioned models return inside of a module around them."""
    returned: list[Tensor] = []

    def collect(_module: Any, _args: Any, result: Any) -> None:
        returned.extend(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dim() == 0)

    with contextlib.ExitStack() as stack:
        for part in () if _is_partitioned(trainer) else trainer.model.modules():
            if isinstance(part, PartitionedModel):
                stack.callback(part.register_forward_hook(collect).remove)
        yield returned
