"""accelerate's Accelerator, whose loops compute the loss inside of a partitioned model's training step."""

from __future__ import annotations

from typing import Any

from partitioner.integrations.accelerate.replicas import AcceleratorOfReplicas
from partitioner.integrations.interface import partitioned_models


class Accelerator(AcceleratorOfReplicas):
    """Accelerator for partitioned models: a pipeline trains by its schedule where the model returns the loss.

    Results besides the loss are computed when the loop reads them; from then on calls run all forwards first, which is said once.
    """

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a model as Accelerator does."""
        prepared = super().prepare_model(model, *args, **kwargs)
        for each in partitioned_models(model):
            each.loss_in_step.switch_on()
        return prepared
