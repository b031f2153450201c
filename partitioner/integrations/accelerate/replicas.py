"""An Accelerator that counts replicas of a partitioned model, not processes: their number decides which batches each process reads.

                      inputs="global": every rank reads every batch     inputs="local", one replica a process
num_processes         1                                                 as started
loader                not distributed                                   distributed over processes
scheduler             a step for a step of the optimizer                as many steps as processes, as with DistributedDataParallel
gather(), reduce()    the tensor itself, which every rank has           over all processes
check_trigger()       over all processes                                over all processes
process_index         as started: the first process writes files        as started

accelerate's state, and its functions (``broadcast_object_list``, ``wait_for_everyone``), count processes.
"""

# accelerate's class is Any.
# mypy: allow-subclassing-any

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from partitioner.integrations.accelerate.checkpoints import gathered_state, loading_gathered_state, optimizer_state
from partitioner.integrations.interface import (
    model_in_processes,
    partitioned_models,
    passes_own_rows,
    preparing,
    refuse_parameters_outside,
    share_random_states,
)
from partitioner.model.partitioned_model import PartitionedModel
from passes.ir.errors import ConfigError

_OTHER_WAYS = {"FSDP": "fsdp_plugin", "DEEPSPEED": "deepspeed_plugin", "MEGATRON_LM": "megatron_lm_plugin"}
"""Type of accelerate's distribution -> the argument of ``Accelerator`` that chooses it."""


class AcceleratorOfReplicas(accelerate.Accelerator):
    """Accelerator for models whose ranks are in several processes; for all others it does as accelerate's class."""

    flag_tensor: Any
    _has_own_rows: bool | None = None
    """Whether processes pass their own rows to the partitioned models; None: there is none."""

    @property
    def counts_replicas(self) -> bool:
        """Whether all processes are one model."""
        return self._has_own_rows is False

    @property
    def num_processes(self) -> int:
        """The number of replicas."""
        return 1 if self.counts_replicas else int(super().num_processes)

    @property
    def multi_device(self) -> bool:
        """Whether there are several replicas, on accelerators."""
        return bool(super().multi_device) and not self.counts_replicas

    def count_replicas(self, module: Any) -> None:
        """Count the replicas of a partitioned model that a module is or contains.

        Raises:
            ConfigError: accelerate would shard the model itself, or loaders give rows of their own to ranks that need the same ones.
        """
        pm = model_in_processes(module)
        if pm is None or self.state.num_processes == 1:
            return
        self._refuse_sharding_by_accelerate()
        refuse_parameters_outside(module)
        if self._has_own_rows is None:
            self._start_counting(pm)
        elif self._has_own_rows != passes_own_rows(pm):
            raise ConfigError(
                "one Accelerator prepares two partitioned models, whose processes are one model for one of them and replicas for the other",
                remedy='partition both with inputs="global", or both with inputs="local"',
            )

    def _start_counting(self, pm: PartitionedModel) -> None:
        """Count replicas from here on: the processes share the random states of the first if they read the same batches."""
        n_replicas, has_own_rows = pm.data_parallel_size, passes_own_rows(pm)
        if has_own_rows and n_replicas != self.state.num_processes:
            raise ConfigError(
                f'Accelerator.prepare(loader) gives batches to all {self.state.num_processes} processes, and with inputs="local" ranks of '
                f"one replica need the same rows: there are {n_replicas} replicas",
                remedy='partition(..., inputs="global"): then every process reads every batch',
            )
        if not has_own_rows:
            if self._dataloaders or self._schedulers:
                raise ConfigError(
                    "a loader or scheduler was prepared before the partitioned model, for processes that read rows of their own",
                    remedy="accelerator.prepare(pm, optimizer, loader, scheduler), in one call, or the model first",
                )
            share_random_states()
        self._has_own_rows = has_own_rows

    def _refuse_sharding_by_accelerate(self) -> None:
        """Raise ConfigError if accelerate shards models itself."""
        plugin = _OTHER_WAYS.get(self.distributed_type.value)
        if plugin is not None or getattr(self.state, "parallelism_config", None) is not None:
            plugin = plugin or "parallelism_config"
            raise ConfigError(
                f"Accelerator({plugin}=...) would shard a model that is partitioned already",
                remedy=f"Accelerator() without {plugin}, and partition(model, mode=...) with the mode for it; with accelerate launch, a "
                "configuration without it; with Trainer, TrainingArguments() without fsdp=, deepspeed= and parallelism_config=",
            )

    # -- preparing -----------------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare models, optimizers, loaders and schedulers as Accelerator does."""
        for each in args:
            self.count_replicas(each)
        with preparing():
            return super().prepare(*args, **kwargs)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare a model, without DistributedDataParallel if it is partitioned: its programs reduce gradients.

        Another model has none either if all processes are one replica: its gradients are equal in all, and it gets the values of the first.
        """
        self.count_replicas(model)
        is_partitioned = model_in_processes(model) is not None
        without_ddp = evaluation_mode or is_partitioned or self.counts_replicas
        with preparing():
            prepared = super().prepare_model(model, device_placement=device_placement, evaluation_mode=without_ddp)
        if self.counts_replicas:
            of_ranks = {id(tensor) for pm in partitioned_models(model) for tensor in (*pm.parameters(), *pm.buffers())}
            for tensor in (*prepared.parameters(), *prepared.buffers()):
                if id(tensor) not in of_ranks:
                    dist.broadcast(tensor.detach(), 0)
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader; where every rank reads every batch, also of an iterable data set."""
        if self.counts_replicas and self.dispatch_batches:
            raise ConfigError(
                "Accelerator(dispatch_batches=True) reads batches in the first process, and every rank of a partitioned model reads all",
                remedy='leave dispatch_batches=None; or partition(..., inputs="local")',
            )
        if self.counts_replicas and isinstance(data_loader.dataset, IterableDataset):
            self.dataloader_config.dispatch_batches = False
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler; of one replica it makes one step for a step of the optimizer."""
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches |= self.counts_replicas
        return prepared

    # -- values of all replicas ----------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return the values of all replicas."""
        return tensor if self.counts_replicas else super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of all replicas, without rows that a loader has added to its last batch."""
        return input_data if self.counts_replicas else super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over all replicas."""
        return tensor if self.counts_replicas else super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad tensors to the largest size of all replicas."""
        return tensor if self.counts_replicas else super().pad_across_processes(tensor, *args, **kwargs)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each replica its part of the inputs."""
        with contextlib.ExitStack() as stack:
            yield inputs if self.counts_replicas else stack.enter_context(super().split_between_processes(inputs, apply_padding))

    def check_trigger(self) -> bool:
        """Return whether any process has set the trigger."""
        if self.counts_replicas:
            self.flag_tensor = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
            dist.all_reduce(self.flag_tensor)
        return bool(super().check_trigger())

    # -- checkpoints ---------------------------------------------------------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the states of all stages, by the first process; all wait until it has."""
        pm = self._model_in_processes()
        states = {} if pm is None else {str(index): (each, optimizer_state(pm, each)) for index, each in enumerate(self._optimizers)}
        with gathered_state(**states):
            location = super().save_state(*args, **kwargs)
        if pm is not None:
            self.wait_for_everyone()
        return location

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint of ``save_state``; every process takes its part."""
        pm = self._model_in_processes()
        with contextlib.ExitStack() as stack:
            if pm is not None:
                for optimizer in self._optimizers:
                    stack.enter_context(loading_gathered_state(pm, optimizer))
            return super().load_state(*args, **kwargs)

    def _model_in_processes(self) -> PartitionedModel | None:
        return next(filter(None, map(model_in_processes, self._models)), None)
