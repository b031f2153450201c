"""Take values from DTensors: those of another plan, of a model that FSDP2 shards, or that a checkpoint was loaded into."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from partitioner.runtime.state.checkpoint.dtensor_regions import Placements, Submesh, describes
from partitioner.runtime.state.sharded_tensor import BlockTensor
from passes.ir.errors import ConfigError
from passes.spmd.shards import Block


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing that module: an existing DTensor has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def check_source(name: str, value: Any) -> None:
    """Raise ConfigError if a DTensor is on other processes than this one, which needs a part of it."""
    if is_dtensor(value) and value.device_mesh.get_coordinate() is None:
        ranks = ", ".join(map(str, value.device_mesh.mesh.flatten().tolist()))
        raise ConfigError(
            f"{name} is a DTensor on ranks {ranks}, and this process is none of them",
            remedy="save it with torch.distributed.checkpoint, and load that into pm.sharded_state_dict() or pm.dtensor_state_dict()",
        )


def without_dtensor(value: Any, blocks: Mapping[int, Block], local_ranks: Sequence[int]) -> Any:
    """Return the values of a DTensor: this process's block where it is sharded as the plan has it, else the whole, gathered.

    Other values are returned as they are. Every process of the DTensor's mesh must call it.

    Args:
        value: of a tensor of the model, or of a state of its optimizer.
        blocks: rank -> the block that it holds, for all ranks.
        local_ranks: the ranks of this process.
    """
    if not is_dtensor(value) or value.device_mesh.get_coordinate() is None:
        return value
    placements = _placements(value.placements)
    if len(local_ranks) == 1 and placements is not None and value.device_mesh.size() > 1:
        ranks = value.device_mesh.mesh
        submesh = Submesh(tuple((str(index), size) for index, size in enumerate(ranks.shape)), tuple(ranks.flatten().tolist()))
        if tuple(value.shape) == next(iter(blocks.values())).shape and describes(placements, submesh, blocks):
            return BlockTensor([(blocks[local_ranks[0]], value.detach().to_local())])
    whole: Tensor = value.detach().full_tensor()
    return whole


def _placements(placements: Sequence[Any]) -> Placements | None:
    """Return the placements of a DTensor as dimensions of the tensor; None if some are neither ``Shard`` nor ``Replicate``."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415  imported by then

    if any(type(place) not in (Replicate, Shard) for place in placements):
        return None
    return tuple(place.dim if isinstance(place, Shard) else None for place in placements)
