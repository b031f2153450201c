"""transformers' Trainer, whose loss is computed inside of a partitioned model's training step."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

from partitioner.integrations.losses_in_steps import losses_in_steps
from passes.ir.errors import ConfigError

__all__ = ["TrainerInSteps", "trainer_class"]


class TrainerInSteps:
    """Trainer for partitioned models: a pipeline trains by its schedule where the model returns the loss.

    A loss of other results (``compute_loss`` of a subclass, ``compute_loss_func``, label smoothing) runs all forwards first, and says so.
    """

    _base: Any
    """transformers' class."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step as Trainer does."""
        with losses_in_steps(model.modules(), reads_loss_alone=self._reads_loss_alone):
            return cast(Any, super()).training_step(model, *args, **kwargs)

    @property
    def _reads_loss_alone(self) -> bool:
        """Whether the loss is that which the model returns, and no other result is read."""
        trainer: Any = self
        is_own = cast(Any, type(self)).compute_loss is self._base.compute_loss and "compute_loss" not in vars(self)
        is_given = is_own and trainer.compute_loss_func is None and trainer.label_smoother is None
        return is_given and getattr(trainer.args, "past_index", -1) < 0


@functools.cache
def trainer_class() -> Any:
    """Return the class; raise ConfigError if transformers is not installed."""
    try:
        base = importlib.import_module("transformers").Trainer
    except ModuleNotFoundError as error:
        raise ConfigError(
            "transformers is not installed", remedy='pip install "partitioner[transformers]" "partitioner[accelerate]"'
        ) from error
    attributes = {"__module__": "partitioner.integrations.transformers", "__doc__": TrainerInSteps.__doc__, "_base": base}
    return type("Trainer", (TrainerInSteps, base), attributes)
