"""Parameters and buffers as DTensors, the form of FSDP2 (``fully_shard``) and torchtitan.

A DTensor is on the ranks that hold the tensor: a parameter of a pipeline stage on the ranks of that stage. Where the plan's shards are
those of ``Shard`` and ``Replicate``, its local tensor is the parameter itself. Other shards (runs of heads of a fused projection; 7 rows as
3 + 2 + 2, which ``Shard`` cuts as 3 + 3 + 1) are resharded by ``Shard(0)`` over the same ranks.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # its stub lacks what it has
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.checkpoint.dtensor_regions import Placements, Submesh, dtensor_region, find_placements, submesh_of
from partitioner.runtime.state.gather import GatheredState
from partitioner.runtime.state.parameters import State, check_values
from passes.ir.errors import ConfigError
from passes.ir.mesh import Mesh
from passes.spmd.shards import Block

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class DTensorState:
    """Makes DTensors of the tensors of a model, over device meshes that it creates once; collective, as ``GatheredState`` is."""

    def __init__(self, state: State, runtime: Runtime, gathered: GatheredState, mesh: Mesh) -> None:
        self._state = state
        self._runtime = runtime
        self._gathered = gathered
        self._mesh = mesh
        self._device_meshes: dict[Submesh, DeviceMesh | None] = {}
        self._placements: dict[tuple[tuple[int, Block], ...], Placements | None] = {}

    def tensors(self) -> dict[str, DTensor]:
        """Return the tensors that this process holds; see ``PartitionedModel.dtensor_state_dict``."""
        check_values(self._state)
        self._state.check_names()
        if len(self._runtime.local_ranks) == self._runtime.n_ranks:
            return {name: self._of_one_process(tensor) for name, tensor in self._gathered.tensors().items()}
        blocks_of = {name: self._state.blocks_of_ranks(name) for name in self._state.names}
        submeshes = {name: submesh_of(self._mesh, sorted(blocks)) for name, blocks in blocks_of.items() if blocks}
        self._create_meshes(list(submeshes.values()))
        tensors = {name: self._tensor(name, blocks_of[name], submesh) for name, submesh in submeshes.items()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _tensor(self, name: str, blocks: Mapping[int, Block], submesh: Submesh) -> DTensor | None:
        """Return a tensor of the model as a DTensor; None if this rank holds nothing of it."""
        rank, shape = self._runtime.local_ranks[0], next(iter(blocks.values())).shape
        key = tuple(sorted(blocks.items(), key=lambda item: item[0]))
        if key not in self._placements:
            self._placements[key] = find_placements(blocks, submesh)
        placements = self._placements[key]
        mesh, local = self._device_meshes[submesh], None
        if placements is None:
            placements = (0,) * len(submesh.sizes)
            whole = self._gathered.whole([name])[name]  # all ranks take part
            if mesh is not None:
                offsets, lengths = dtensor_region(shape, placements, submesh.sizes, submesh.coordinates()[rank])
                places = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
                local = whole[places].clone(memory_format=torch.contiguous_format)
        elif mesh is not None:
            local = self._state.held(name)[0][1].detach()
        return None if mesh is None or local is None else _dtensor(local, mesh, placements, shape)

    def _create_meshes(self, submeshes: Sequence[Submesh]) -> None:
        """Create the device meshes that do not exist yet; all ranks create the same ones in the same order."""
        rank, members = self._runtime.local_ranks[0], self._runtime.members
        assert members is not None
        if not members.is_whole:
            raise ConfigError(
                f"dtensor_state_dict() makes process groups of all processes in their order, and this model has the processes {members}, "
                "those of its device mesh",
                remedy="take pm.sharded_state_dict() for torch.distributed.checkpoint, or pm.state_dict(), which is whole on every rank",
            )
        missing = {submesh for submesh in submeshes if submesh not in self._device_meshes}
        if not missing:
            return
        self._runtime.collect({})  # reports a rank that makes another call, for which the creation of process groups would wait
        device_type = self._runtime.devices[rank].type
        root = None
        if not self._mesh.widths:
            root = init_device_mesh(device_type, tuple(size for _, size in self._mesh.dimensions), mesh_dim_names=self._mesh.names)
        for submesh in sorted(missing, key=lambda each: (each.ranks, each.dimensions)):
            if root is not None and self._is_slice(submesh):
                created = root if submesh.names == self._mesh.names else root[submesh.names]
            else:
                ranks = torch.tensor(submesh.ranks).view(submesh.sizes)
                created = DeviceMesh(device_type, ranks, mesh_dim_names=submesh.names)
            self._device_meshes[submesh] = created if rank in submesh.ranks else None

    def _is_slice(self, submesh: Submesh) -> bool:
        """Return whether a submesh spans its dimensions, so that a slice of the device mesh by their names equals it."""
        return len(submesh.ranks) > 1 and submesh.ranks == self._mesh.group(submesh.ranks[0], submesh.names)

    def _of_one_process(self, whole: Tensor) -> DTensor:
        """Return a whole tensor of the one process as a DTensor over a mesh of one rank."""
        if not dist.is_initialized():
            # DeviceMesh would do so itself, but with a store at an address from the environment.
            dist.init_process_group(store=HashStore(), rank=0, world_size=1)
            atexit.register(_destroy_group)
        rank, device_type = dist.get_rank(), whole.device.type
        mesh = next((mesh for mesh in self._device_meshes.values() if mesh is not None and mesh.device_type == device_type), None)
        if mesh is None:
            submesh = Submesh(((device_type, 1),), (rank,))
            # DeviceMesh itself would count a group that the other processes, if there are any, do not make.
            group = dist.new_group([rank], use_local_synchronization=True)
            mesh = DeviceMesh.from_group(group, device_type, mesh=torch.tensor([rank]), mesh_dim_names=("ranks",))
            self._device_meshes[submesh] = mesh
        return _dtensor(whole, mesh, (None,), whole.shape)


def _dtensor(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415  its import takes as long as a fifth of this package's

    places = [Replicate() if dim is None else Shard(dim) for dim in placements]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, places, run_check=False, shape=torch.Size(shape), stride=stride)


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
