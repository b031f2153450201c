"""Strategies of Lightning Fabric for partitioned models.

fabric = Fabric(strategy=FabricPartitionStrategy())      every process of a launcher is a rank; without one, all ranks are in this process
fabric = Fabric(strategy=FabricDDPStrategy())            passes partitioned models through, wraps all others in DistributedDataParallel
pm, optimizer = fabric.setup(pm, optimizer)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from partitioner.integrations.interface import partitioned_models, passes_own_rows, refuse_parameters_outside, share_random_states
from partitioner.integrations.lightning.clip_norm import clip_norm
from partitioner.integrations.lightning.optimizer_states import has_other_stages, load_optimizer_state, optimizer_state
from partitioner.integrations.lightning.processes import Processes, reduced
from partitioner.model.partitioned_model import PartitionedModel
from partitioner.runtime import torchrun
from passes.ir.errors import ConfigError


class _WithPartitionedModels:
    """Handling of partitioned models in Fabric's strategies, to be combined with one of Lightning's."""

    precision: Any
    checkpoint_io: Any

    @property
    def partitioned_models(self) -> list[PartitionedModel]:
        """The partitioned models that were set up."""
        models: list[PartitionedModel] = vars(self).setdefault("_partitioned_models", [])
        return models

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return a partitioned model, or a module around one, unchanged: its gradients are those of all ranks already."""
        models = partitioned_models(module)
        if not models:
            return cast(nn.Module, cast(Any, super()).setup_module(module))
        refuse_parameters_outside(module)
        self.partitioned_models.extend(models)
        vars(self)["_backward_sync_control"] = _SyncControl(vars(self).get("_backward_sync_control"))
        return module

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to the device of this process; a partitioned model has its devices already."""
        if not isinstance(module, PartitionedModel):
            cast(Any, super()).module_to_device(module)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the sampler of a loader; None where every process passes the whole batch."""
        models = self.partitioned_models
        if not models:
            return cast("dict[str, Any] | None", cast(Any, super()).distributed_sampler_kwargs)
        model = models[-1]
        if not passes_own_rows(model):
            return None
        return {"num_replicas": model.data_parallel_size, "rank": model.data_parallel_rank}

    def clip_gradients_norm(
        self, module: nn.Module, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """Clip gradients by their norm over all processes."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_norm(partitioned_models(module), parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer, as one process has it."""
        if not any(map(has_other_stages, self.partitioned_models)):
            return cast("dict[str, Any]", cast(Any, super()).get_optimizer_state(optimizer))
        return optimizer_state(self.partitioned_models, optimizer)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint; an optimizer takes the part of the state that this process holds."""
        if not any(map(has_other_stages, self.partitioned_models)):
            return cast("dict[str, Any]", cast(Any, super()).load_checkpoint(path, state, *args, **kwargs))
        wrapped: Any = state
        if isinstance(state, Optimizer):
            load_optimizer_state(self.partitioned_models, state, self.checkpoint_io.load_checkpoint(path))
            return {}
        if isinstance(state, Mapping):
            wrapped = {
                key: _LoadedByPart(self.partitioned_models, each) if isinstance(each, Optimizer) else each for key, each in state.items()
            }
        remainder = cast("dict[str, Any]", cast(Any, super()).load_checkpoint(path, wrapped, *args, **kwargs))
        if isinstance(state, dict):
            state.update({key: each for key, each in wrapped.items() if not isinstance(each, _LoadedByPart)})
        return remainder


class FabricPartition(Processes, _WithPartitionedModels):
    """A strategy of Fabric for partitioned models: with a launcher, each process is a rank; without one, all ranks are in this process."""

    strategy_name = "partitioner"

    def setup_environment(self) -> None:
        """Join the other processes; their random states become those of rank 0, so that loaders that shuffle read the same rows."""
        super().setup_environment()
        if torchrun.is_launched():
            share_random_states()

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return a partitioned model unchanged."""
        if partitioned_models(module) or next(module.parameters(), None) is None:
            return super().setup_module(module)
        raise ConfigError(
            f"fabric.setup() was given a {type(module).__name__} that is not partitioned",
            remedy="pm = partition(model, devices=..., mode=...), make the optimizer of pm.parameters(), and fabric.setup(pm, optimizer)",
        )

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to the device of this process; a partitioned model has its devices already."""
        if not isinstance(module, PartitionedModel):
            module.to(self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
        """Arguments of the sampler of a loader; None where every process passes the whole batch."""
        return super().distributed_sampler_kwargs if self.partitioned_models else None

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a value over all processes."""
        return reduced(tensor, reduce_op) if isinstance(tensor, Tensor) and torchrun.is_launched() else tensor


class FabricDDP(_WithPartitionedModels):
    """Fabric's DistributedDataParallel for modules, and partitioned models as they are: their programs add up gradients themselves."""


class _SyncControl:
    """Skips the synchronization of gradients in a partitioned model."""

    def __init__(self, others: Any) -> None:
        self._others = others

    @contextlib.contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Let backwards inside add up no gradients over ranks."""
        models = partitioned_models(module)
        with contextlib.ExitStack() as stack:
            if not models and self._others is not None:
                stack.enter_context(self._others.no_backward_sync(module, enabled))
            for model in models if enabled else ():
                stack.enter_context(model.no_sync())
            yield


class _LoadedByPart:
    """An optimizer as an object with a state, of which this process takes its part."""

    def __init__(self, models: list[PartitionedModel], optimizer: Optimizer) -> None:
        self._models = models
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return optimizer_state(self._models, self._optimizer)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        load_optimizer_state(self._models, self._optimizer, state_dict)
