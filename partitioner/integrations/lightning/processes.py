"""Shared code of strategies of Trainer and Fabric: the processes that a launcher has started, each with one rank, or one with all ranks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.runtime import torchrun


class Processes:
    """The processes of a strategy, to be combined with Lightning's ``ParallelStrategy``.

    Without a launcher the number of processes is one: all ranks are in it.
    """

    package: str
    """Of Lightning, whose base the class has."""

    num_nodes = 1
    accelerator: Any
    cluster_environment: Any
    parallel_devices: Sequence[torch.device] | None

    @property
    def global_rank(self) -> int:
        """The rank of this process."""
        return int(self.cluster_environment.global_rank()) if self._waits_for_group else torchrun.rank()

    @property
    def local_rank(self) -> int:
        """The index of this process among those of its machine."""
        return int(self.cluster_environment.local_rank()) if self._waits_for_group else torchrun.local_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return int(self.cluster_environment.world_size()) if self._waits_for_group else torchrun.world_size()

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and logs."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """Device of this process's batches and results."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def _waits_for_group(self) -> bool:
        """Whether a launcher that torch does not know (SLURM, MPI) has started the processes, and there is no process group yet."""
        launched = self.cluster_environment is not None and self.cluster_environment.creates_processes_externally
        return bool(launched and not torchrun.is_launched() and self.cluster_environment.world_size() > 1)

    def set_world_ranks(self) -> None:
        """Tell Lightning's functions for rank 0 which process this is."""
        utilities = importlib.import_module(f"{self.package}.utilities.rank_zero")
        core = importlib.import_module("lightning_utilities.core.rank_zero")
        utilities.rank_zero_only.rank = core.rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        """Start no processes: without a launcher all ranks are in this one."""

    def setup_environment(self) -> None:
        """Join the process group of all processes, if there are several."""
        cast(Any, super()).setup_environment()
        if self._waits_for_group:
            environment = self.cluster_environment
            dist.init_process_group(
                "nccl" if self.root_device.type == "cuda" else "gloo",
                init_method=f"tcp://{environment.main_address}:{environment.main_port}",
                rank=environment.global_rank(),
                world_size=environment.world_size(),
            )
        elif torchrun.is_launched():
            torchrun.join_group(self.root_device)
        self.set_world_ranks()

    def barrier(self, *_args: Any, **_kwargs: Any) -> None:
        """Wait for all processes."""
        if torchrun.is_launched() and dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process ``src``."""
        if not (torchrun.is_launched() and dist.is_initialized()):
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  of Lightning
        """Return whether all processes, or any, decide so."""
        if not torchrun.is_launched():
            return decision
        count = reduced(torch.tensor(int(decision), device=self.root_device), "sum")
        return int(count) == torchrun.world_size() if all else int(count) > 0


def reduced(tensor: Tensor, operation: str | None) -> Tensor:
    """Return the sum, mean, minimum or maximum of a tensor over all processes."""
    name = str(operation or "mean").lower().rpartition(".")[2]
    kind = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(name, dist.ReduceOp.SUM)
    result = tensor.detach().clone()
    if name in ("mean", "avg"):
        result = result if result.is_floating_point() else result.float()
    dist.all_reduce(result, kind)
    return result / torchrun.world_size() if name in ("mean", "avg") else result
