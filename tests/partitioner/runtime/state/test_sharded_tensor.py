"""Checkpoints in blocks: what one plan saves, any other loads, and so does the unpartitioned model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from partitioner import PartitionedModel
from partitioner.runtime.state.sharded_tensor import BlockTensor, block_chunks
from passes.ir.errors import ConfigError
from passes.spmd.shards import Block
from tests.support.models.zoo import case_named
from tests.support.running.transparency import make_partitioned

Mode = str | Mapping[str, int]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def test_chunks_of_a_strided_block() -> None:
    """Each element of the block is in one chunk, at its place: compared with indexing."""
    whole = torch.arange(3 * 4 * 2 * 5).reshape(24, 5)
    for cuts in itertools.product([(0, 3), (1, 2)], [(0, 4), (1, 4), (2, 3)], [(0, 2), (1, 2)], [(0, 5), (3, 5)]):
        sizes = [stop - start for start, stop in cuts]
        block = Block((24, 5), (3, 4, 2, 5), tuple((each,) for each in cuts), (sizes[0] * sizes[1] * sizes[2], sizes[3]))
        part = block.take(whole)
        rebuilt = torch.full_like(part, -1)
        for start, place in block_chunks(block):
            lengths = part[place].shape
            rebuilt[place] = whole[tuple(slice(first, first + length) for first, length in zip(start, lengths, strict=True))]
        assert torch.equal(rebuilt, part)


def made(mode: Mode, factor: float = 1.0, name: str = "gpt") -> tuple[nn.Module, PartitionedModel]:
    """Return a model and its partition, with scaled weights that identify them."""
    instance = case_named(name).build()
    with torch.no_grad():
        for parameter in instance.model.parameters():
            parameter.mul_(factor)
    devices = 4 if isinstance(mode, dict) else 3
    return instance.model, make_partitioned(instance, devices=devices, mode=mode, n_microbatches=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a batch of 8 rows does not divide over 3 ranks")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("tensor", {"fsdp": 2, "pipeline": 2}), ({"data": 2, "tensor": 2}, "fsdp")],
    ids=str,
)
def test_any_plan_loads_what_any_plan_saved(saved: Mode, loaded: Mode, tmp_path: Path) -> None:
    """Three ranks hold uneven blocks of heads, in runs; tied weights are saved under both names."""
    model, pm = made(saved)
    save(pm.sharded_state_dict(), checkpoint_id=tmp_path, no_dist=True)
    _, other = made(loaded, factor=0.5)
    state = other.sharded_state_dict()
    load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    plain = made("pipeline", factor=0.25)[0]
    whole = plain.state_dict()
    load(whole, checkpoint_id=tmp_path, no_dist=True)
    found = other.full_state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(plain.state_dict()[name], tensor), name
    x = case_named("gpt").build().args
    torch.testing.assert_close(other(*x), model(*x))


@pytest.mark.slow
def test_a_block_is_no_tensor_to_compute_with() -> None:
    """Ranks in one process hold whole parameters, so the block that no rank here holds is made by hand."""
    _, pm = made("fsdp")
    state = pm.sharded_state_dict()
    name = "blocks.0.up.weight"
    whole = pm.full_state_dict()[name]
    half = Block(tuple(whole.shape), tuple(whole.shape), (((0, 24),), ((0, 12),)), (24, 12))
    state[name] = BlockTensor([(half, half.take(whole))])
    with pytest.raises(ConfigError, match="of which this process holds blocks"):
        torch.add(state[name], 1)
    with pytest.raises(ConfigError, match=f"the blocks of {name} are those of another plan"):
        pm.load_state_dict(state)
