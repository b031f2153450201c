"""transformers' Trainer for partitioned models, whose checkpoints have the states of all ranks.

training_step                  a pipeline trains by its schedule where the model returns the loss
save_model, _save_checkpoint   all processes gather the states that the first one writes, and wait until it has
_load_optimizer_and_scheduler  every process takes its part
compute_loss                   with inputs="local": only a loss of the process's own rows is multiplied by the number of processes
_get_num_items_in_batch        with inputs="local": a loss that the model returns is divided by the items of all, in any case
"""

# transformers' class is Any.
# mypy: allow-subclassing-any

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import transformers
from torch import Tensor

from partitioner.integrations.accelerate.checkpoints import gathered_state, loading_gathered_state, optimizer_state
from partitioner.integrations.accelerate.replicas import AcceleratorOfReplicas
from partitioner.integrations.interface import losses_in_steps, model_in_processes, partitioned_models, passes_own_rows, preparing
from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.torch_private import pytree


class Trainer(transformers.Trainer):
    """Trainer for partitioned models: a pipeline trains by its schedule where the model returns the loss.

    A loss of other results (``compute_loss`` of a subclass, ``compute_loss_func``, label smoothing) runs all forwards first, and says so.
    """

    accelerator: Any
    args: Any
    gather_function: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with preparing():
            super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make an Accelerator that counts the replicas of the model."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = AcceleratorOfReplicas
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, **getattr(self.gather_function, "keywords", {}))
        self._count_replicas(self.model)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        with preparing():
            super()._move_model_to_device(model, device)

    def call_model_init(self, trial: Any = None) -> Any:
        """Make a model as Trainer does."""
        model = super().call_model_init(trial)
        self._count_replicas(model)
        return model

    def _count_replicas(self, model: Any) -> None:
        """Count the replicas of the model where Trainer counts processes."""
        self.accelerator.count_replicas(model)
        if self.accelerator.counts_replicas and self.args.world_size > 1:
            self.args = copy.copy(self.args)
            self.args.distributed_state = _OneReplica(self.args.distributed_state)

    # -- losses --------------------------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a step as Trainer does."""
        with losses_in_steps(partitioned_models(model), reads_loss_alone=self._reads_loss_alone):
            return super().training_step(model, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """Return the loss of a batch. Trainer multiplies it by the number of processes: where it is of this process's rows alone."""
        if not self._has_own_rows:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **kwargs)
        with self._averaging(False), self._returned_numbers() as returned:
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch, **kwargs)
        is_averaged = self.args.average_tokens_across_devices and num_items_in_batch is not None
        if is_averaged and self._divides_own_loss and not any(loss is number for number in returned):
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        is_across = self.args.average_tokens_across_devices or self._returns_loss
        with self._averaging(is_across):
            return super()._get_num_items_in_batch(*args, **kwargs)

    @property
    def _reads_loss_alone(self) -> bool:
        """Whether the loss is that which the model returns, and no other result is read."""
        owners = [kind for kind in type(self).__mro__ if "compute_loss" in vars(kind)]
        is_own = owners == [Trainer, transformers.Trainer] and "compute_loss" not in vars(self)
        is_given = is_own and self.compute_loss_func is None and self.label_smoother is None
        return is_given and getattr(self.args, "past_index", -1) < 0

    @property
    def _has_own_rows(self) -> bool:
        """Whether each process passes its own rows to a partitioned model."""
        pm = model_in_processes(self.model)
        return pm is not None and passes_own_rows(pm)

    @property
    def _is_partitioned(self) -> bool:
        """Whether the model is a partitioned one itself, and not a module around it."""
        return isinstance(self.accelerator.unwrap_model(self.model, keep_torch_compile=False), PartitionedModel)

    @property
    def _returns_loss(self) -> bool:
        """Whether the loss is the number that a partitioned model returns for the rows of all, not one computed of its outputs."""
        return self._has_own_rows and self._is_partitioned and self.compute_loss_func is None and self.label_smoother is None

    @property
    def _divides_own_loss(self) -> bool:
        """Whether label smoothing, a function of the user's, or a module around the model divides an own loss by the items of all."""
        if self.compute_loss_func is not None or self.label_smoother is not None:
            return True
        return self.model_accepts_loss_kwargs and not self._is_partitioned

    @contextlib.contextmanager
    def _averaging(self, is_across_processes: bool) -> Iterator[None]:
        """Average tokens over processes, or not."""
        before = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = is_across_processes
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before

    @contextlib.contextmanager
    def _returned_numbers(self) -> Iterator[list[Tensor]]:
        """Collect the scalars that partitioned models inside a wrapper return; none if the model itself is partitioned."""
        returned: list[Tensor] = []

        def collect(_module: Any, _args: Any, result: Any) -> None:
            returned.extend(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dim() == 0)

        with contextlib.ExitStack() as stack:
            for inner in () if self._is_partitioned else partitioned_models(self.model):
                stack.callback(inner.register_forward_hook(collect).remove)
            yield returned

    # -- checkpoints ---------------------------------------------------------------------------------------------------------------

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the weights, which all processes gather; all wait until the first one has."""
        if model_in_processes(self.model) is None:
            super().save_model(*args, **kwargs)
            return
        with gathered_state(model=(self.model, self.model.state_dict())):
            super().save_model(*args, **kwargs)
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        pm = model_in_processes(self.model)
        if pm is None or self.args.save_only_model:
            super()._save_checkpoint(*args, **kwargs)
            return
        with gathered_state(optimizer=(self.optimizer, optimizer_state(pm, self.optimizer))):
            super()._save_checkpoint(*args, **kwargs)
        self.accelerator.wait_for_everyone()

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states, which are the same in all processes of one replica."""
        if not self.accelerator.counts_replicas or self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        pm = model_in_processes(self.model)
        loading = contextlib.nullcontext() if pm is None or self.optimizer is None else loading_gathered_state(pm, self.optimizer)
        with loading:
            super()._load_optimizer_and_scheduler(checkpoint)


class _OneReplica:
    """accelerate's state of processes that are one model: the number of processes is 1, all else is unchanged.

    Args:
        state: accelerate's ``PartialState``.
    """

    num_processes = 1
    distributed_type = "NO"

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def __reduce__(self) -> Any:
        """Save the state itself, as Trainer saves its arguments."""
        return copy.copy, (self._state,)
