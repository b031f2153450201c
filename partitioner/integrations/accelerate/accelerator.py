"""accelerate's Accelerator, whose loops compute the loss inside of a partitioned model's training step."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.errors import ConfigError

__all__ = ["AcceleratorInSteps", "accelerator_class"]


class AcceleratorInSteps:
    """Accelerator for partitioned models: a pipeline trains by its schedule where the model returns the loss.

    Results besides the loss are computed when the loop reads them; from then on calls run all forwards first, which is said once.
    """

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerator does."""
        prepared = cast(Any, super()).prepare_model(model, *args, **kwargs)
        for module in model.modules():
            if isinstance(module, PartitionedModel):
                module.loss_in_step.switch_on()
        return prepared


@functools.cache
def accelerator_class() -> Any:
    """Return the class; raise ConfigError if accelerate is not installed."""
    try:
        base = importlib.import_module("accelerate").Accelerator
    except ModuleNotFoundError as error:
        raise ConfigError("accelerate is not installed", remedy='pip install "partitioner[accelerate]"') from error
    attributes = {"__module__": "partitioner.integrations.accelerate", "__doc__": AcceleratorInSteps.__doc__}
    return type("Accelerator", (AcceleratorInSteps, base), attributes)
