"""Methods of ``Trainer`` that do something else for a partitioned model with one rank a process; for other models they do as before.

save_model                         all processes gather the weights that the first one writes, and wait until it has
_save_checkpoint                   the same for the optimizer; the first process's random state is that of all
_load_optimizer_and_scheduler      every process takes its part
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from partitioner.integrations.accelerate.checkpoints import gathered_state, loading_gathered_state, model_in_processes, optimizer_state
from partitioner.integrations.accelerate.methods import replacing
from partitioner.integrations.accelerate.processes import counts_replicas, wait_for_all

__all__ = ["replace_methods"]

Method = Callable[..., Any]
"""A method as it was."""


@functools.cache
def replace_methods() -> None:
    """Replace the methods, once."""
    from transformers import Trainer  # noqa: PLC0415  an optional package

    @replacing(Trainer, "save_model")
    def _save_model(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if model_in_processes(trainer.model) is None:
            return method(trainer, *args, **kwargs)
        with gathered_state(model=(trainer.model, trainer.model.state_dict())):
            method(trainer, *args, **kwargs)
        return wait_for_all()

    @replacing(Trainer, "_save_checkpoint")
    def _save_checkpoint(method: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        pm = model_in_processes(trainer.model)
        if pm is None or trainer.args.save_only_model:
            return method(trainer, *args, **kwargs)
        with gathered_state(optimizer=(trainer.optimizer, optimizer_state(pm, trainer.optimizer))):
            method(trainer, *args, **kwargs)
        return wait_for_all()

    @replacing(Trainer, "_save_rng_state")
    def _save_rng_state(method: Method, trainer: Any, output_dir: str) -> None:
        if not counts_replicas() or trainer.args.should_save:
            method(trainer, output_dir)

    @replacing(Trainer, "_load_optimizer_and_scheduler")
    def _load_optimizer_and_scheduler(method: Method, trainer: Any, checkpoint: Any) -> Any:
        pm = model_in_processes(trainer.model)
        if pm is None or trainer.optimizer is None:
            return method(trainer, checkpoint)
        with loading_gathered_state(pm, trainer.optimizer):
            return method(trainer, checkpoint)
