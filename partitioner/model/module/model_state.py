"""The parameters, buffers and gradients of a partitioned model: read, saved and loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from partitioner.model.module.structure import ModuleInPlan
from partitioner.model.steps.gradient_accumulation import Accumulation
from partitioner.runtime.state.checkpoint.dtensors import DTensorState
from partitioner.runtime.state.clip_grad_norm import ModelNorm, scale_gradients
from partitioner.runtime.state.gather import GatheredState, separated
from partitioner.runtime.state.hooks import refuse_hooks
from partitioner.runtime.state.meta_init import InitFunction, initialize, seed_text
from partitioner.runtime.state.optimizers.state import full_optimizer_state_dict, load_optimizer_state_dict, sharded_optimizer_state_dict
from partitioner.runtime.state.optimizers.state_hooks import OptimizerStates, attach_hooks
from partitioner.specialize.trace import Trace
from passes.ir.arguments.checked import at_least, checked_arguments, positive
from passes.ir.errors import ConfigError


class ModelState(ModuleInPlan):
    """A module with this process's part of the parameters and buffers of a model.

    Args:
        trace: the model as it was partitioned.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._first = trace
        self._is_alone = len(trace.runtime.local_ranks) == trace.runtime.n_ranks
        self._accumulation = Accumulation(trace.state.named_parameters())
        self._norm = ModelNorm(trace.original, trace.state, trace.runtime)
        self._gathered = GatheredState(trace.state, trace.runtime)
        self._dtensors = DTensorState(trace.state, trace.runtime, self._gathered, trace.plan.grid)
        self._optimizer_states = OptimizerStates(trace.state, trace.runtime)

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks are in this process."""
        return self._is_alone

    @property
    def data_parallel_size(self) -> int:
        """Number of parts in which processes pass the batch: ``num_replicas`` of a ``DistributedSampler``; 1 in a single process."""
        return 1 if self.has_all_ranks else self._first.programs.rows.count

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's part of the batch: ``rank`` of a ``DistributedSampler``."""
        return 0 if self.has_all_ranks else self._first.programs.rows.part_index(self._first.runtime.local_ranks[0])

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under their original names, in the order of the original.

        With all ranks in one process on one device, each is whole and comes once. With one rank a process, each is the rank's part of it.
        Parts of one parameter on several devices of one process all have its name.
        """
        return super().named_parameters(prefix, recurse, remove_duplicate)

    @checked_arguments()
    def named_parts(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a rank's part of each parameter, under the original name: the tensors that it computes with. Do not change them."""
        if rank not in self._first.runtime.local_ranks:
            ranks = ", ".join(map(str, self._first.runtime.local_ranks))
            raise ConfigError(f"rank {rank} is not in this process", remedy=f"the ranks in this process: {ranks}")
        return self._first.state.named_parts(rank)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this process's parameters, and an empty one if other processes alone train some: optimizers refuse an empty list."""
        return iter([*(each for _, each in self.named_parameters(recurse=recurse)), *(self._first.stand_in if recurse else ())])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return all parameters and buffers, whole, under the original names, on every rank.

        What some rank does not hold whole is gathered: all ranks must call it. ``sharded_state_dict`` and ``dtensor_state_dict`` do not
        gather.
        """
        refuse_hooks(self, "state_dict()")
        return super().state_dict(*args, **kwargs)

    @checked_arguments()
    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return this process's shards for ``torch.distributed.checkpoint``, which saves and loads them without gathering.

        ``dcp.save(pm.sharded_state_dict())``; and, for any plan and number of processes, ``state = pm.sharded_state_dict()``,
        ``dcp.load(state)``, ``pm.load_state_dict(state)``. An unpartitioned model loads the same checkpoint into its ``state_dict()``.
        """
        return dict(self._first.state.sharded())

    @checked_arguments()
    def dtensor_state_dict(self) -> dict[str, Tensor]:
        """Return this process's parameters and buffers as DTensors over a ``DeviceMesh``, as FSDP2 and torchtitan have them.

        Each is on the ranks that hold the tensor, with the plan's mesh dimensions, ``Shard`` where the plan shards and ``Replicate``
        where it does not; shards that ``Shard`` does not describe are resharded by ``Shard(0)``. All ranks must call it. With all ranks
        in one process, tensors are whole, on a mesh of one rank; a process group of that rank is made if there is none.
        """
        return dict(self._dtensors.tensors())

    @checked_arguments()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values into parameters and buffers, from a full state dict or this process's part of one.

        Args:
            state_dict: original name -> tensor.
            strict: refuse names that are missing or unknown.
            assign: refused: values are copied into the present tensors.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as ``nn.Module`` does.

        Raises:
            ConfigError: an entry does not fit; nothing is loaded then.
        """
        refuse_hooks(self, "load_state_dict()")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    load_safetensors = ModuleInPlan.load_safetensors

    @checked_arguments()
    def initialize(self, init_fn: InitFunction | None = None, *, seed: int | None = None) -> None:
        """Initialize a model from the meta device, module by module: no process ever holds more than one module whole.

        The values are those of one device: of the model built on the CPU, ``torch.manual_seed(seed)``, and ``model.apply(init_fn)``. Every
        rank must call it, with the same function.

        Args:
            init_fn: sets the parameters and buffers of one module. None: calls its ``reset_parameters()``.
            seed: None: continue from the present random state.

        Raises:
            ConfigError: parameters or buffers that would be left without a value, by name.
        """
        self._first.runtime.agree("seed", seed_text(seed))
        initialize(self._first.original, self._first.state, self._gathered, init_fn, seed)

    @checked_arguments()
    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer of ``pm.parameters()``, under the original names. All ranks must call it.

        Returns:
            ``"state"``: parameter -> ``exp_avg``, ``step``, ...; no entry for a parameter that has had no gradient; ``"param_groups"``:
            the options, with names of parameters.

        Raises:
            ConfigError: a parameter of the optimizer is not one of this model; or a state is neither one number for its parameter nor one
                for each element, and this process holds a part of the parameter, so that the state cannot be gathered.
        """
        attach_hooks(optimizer)
        return full_optimizer_state_dict(self._first.state, self._first.runtime, optimizer)

    @checked_arguments()
    def sharded_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's shards of an optimizer's state, for ``torch.distributed.checkpoint`` to save and load without gathering.

        An optimizer that has not stepped gets that of its first step, all zeros, for ``dcp.load`` to fill. Groups are those of all ranks.
        """
        attach_hooks(optimizer)
        return sharded_optimizer_state_dict(self._first.state, self._first.runtime, optimizer)

    @checked_arguments()
    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load the state of another optimizer, of any plan or of the unpartitioned model, into one of ``pm.parameters()``.

        Args:
            optimizer: of the same kind.
            state_dict: from one of the two methods above, or ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.

        Raises:
            ConfigError: names, shapes or dtypes are not those of the model; the state is that of another kind of optimizer, or lacks a
                parameter; or parameters of one group come from groups with different options. Nothing is loaded then.
        """
        attach_hooks(optimizer)
        load_optimizer_state_dict(self._first.state, self._first.runtime, optimizer, state_dict)

    @checked_arguments()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer of the original ``state_dict()``, on every rank. All ranks must call it.

        Each is contiguous and has memory of its own, also where names are tied, so that ``safetensors.torch.save_file`` saves it.
        """
        return separated(self._gathered.tensors(), (*self.parameters(), *self.buffers()))

    @checked_arguments()
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of every parameter of the original ``named_parameters()``, on every rank; None where there is none."""
        self._accumulation.check("full_gradients()")
        return self._gathered.gradients()

    @checked_arguments()
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication: steps inside keep each rank's part in ``.grad``, the first step outside sums them.

        Some gradients are reduced in every step: of sharded parameters (``"fsdp"``, ``"zero1"``, ``"zero2"``), since no rank has room for
        the whole; of parameters that stages share (tied embeddings), over these stages; and of stages that several ranks share round-robin
        (``{"pipeline": (2, 1)}``).
        """
        return self._accumulation.no_sync()

    @checked_arguments({"max_norm": at_least(0), "norm_type": positive})
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over the model, each parameter counted once, is at most ``max_norm``; return the old norm."""
        self._accumulation.check("clip_grad_norm_()")
        norm = self._norm.of_gradients(norm_type)
        scale_gradients(self.parameters(), norm, max_norm)
        return norm
