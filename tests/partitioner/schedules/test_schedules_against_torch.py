"""Our schedules order their actions as torch.distributed.pipelining does, wherever torch accepts the numbers.

torch makes an order for ranks and microbatches that its constraints allow; where it refuses (ValueError) there is nothing to compare, and
each test counts how many comparisons it made. Interleaved1F1B differs on purpose where the ranks do not divide the microbatches:
torch makes the groups of microbatches larger than R, which takes more memory than the paper's bound; ours keeps the bound. With one
stage a rank torch's Interleaved1F1B holds up to twice the activations of 1F1B; ours is 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _Action as TorchAction

from partitioner.schedules.catalog import SCHEDULES, make_schedule
from passes.ir.schedule import Schedule

N_RANKS = range(1, 9)
N_MICROBATCHES = range(1, 17)


def _rows(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule.actions]


def _torch_rows(kind: type, n_ranks: int, n_microbatches: int, stages_per_rank: int) -> list[list[str]]:
    """Return the compute actions of each rank; an overlapped forward and backward in starting order. Raise torch's ValueError."""
    n_stages = n_ranks * stages_per_rank
    stages = [SimpleNamespace(num_stages=n_stages, group_size=n_ranks, group_rank=0, submod=None) for _ in range(stages_per_rank)]
    order = kind(stages, n_microbatches).pipeline_order
    slots = [[slot for slot in order[rank] if slot is not None] for rank in range(n_ranks)]
    return [[str(action) for slot in rank_slots for action in (slot.sub_actions or (slot,))] for rank_slots in slots]


def _torch_single_row(kind: type, rank: int, n_ranks: int, n_microbatches: int) -> list[str]:
    """Return the calls of torch's single-stage schedule on the stage of one rank in a training step.

    Its ``pipeline_order`` is for reading only, and wrong on the last rank of 1F1B (it begins with 2F1 on three ranks), so watch it run.
    """
    ran: list[str] = []
    stage = MagicMock(num_stages=n_ranks, stage_index=rank, is_first=rank == 0, is_last=False, device=torch.device("cpu"))
    for communication in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops", "_get_init_p2p_neighbors_ops"):
        getattr(stage, communication).return_value = []
    stage.forward_one_chunk.side_effect = lambda microbatch, *args, **kwargs: ran.append(f"{rank}F{microbatch}")
    stage.backward_one_chunk.side_effect = lambda microbatch, *args, **kwargs: ran.append(f"{rank}B{microbatch}")
    kind(stage, n_microbatches, loss_fn=MagicMock()).step()
    return ran


def _accepted(name: str, kind: type, stages_per_rank: int) -> Iterator[tuple[int, int, list[list[str]], list[list[str]]]]:
    for n_ranks, n_microbatches in product(N_RANKS, N_MICROBATCHES):
        try:
            theirs = _torch_rows(kind, n_ranks, n_microbatches, stages_per_rank)
        except ValueError:
            continue
        yield n_ranks, n_microbatches, _rows(make_schedule(name, n_ranks, n_microbatches, stages_per_rank)), theirs


@pytest.mark.parametrize(("name", "kind"), [("GPipe", ScheduleGPipe), ("1F1B", Schedule1F1B)])
def test_one_stage_a_rank_runs_as_torch_runs(name: str, kind: type) -> None:
    n_compared = 0
    for n_ranks, n_microbatches in product((1, 2, 3, 4, 8), (1, 3, 4, 8, 11)):
        if kind is Schedule1F1B and n_microbatches < n_ranks:
            with pytest.raises(ValueError, match="greater than"):
                _torch_single_row(kind, 0, n_ranks, n_microbatches)
            continue
        rows = _rows(make_schedule(name, n_ranks, n_microbatches))
        assert rows == [_torch_single_row(kind, rank, n_ranks, n_microbatches) for rank in range(n_ranks)]
        n_compared += 1
    assert n_compared >= 18


@pytest.mark.parametrize("stages_per_rank", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_interleaved_order_is_torchs_where_ranks_divide_microbatches(stages_per_rank: int) -> None:
    n_compared = 0
    for n_ranks, n_microbatches, ours, theirs in _accepted("Interleaved1F1B", ScheduleInterleaved1F1B, stages_per_rank):
        if n_microbatches % n_ranks == 0:
            assert ours == theirs, (n_ranks, n_microbatches)
            n_compared += 1
    assert n_compared == sum(16 // n_ranks for n_ranks in N_RANKS)


@pytest.mark.parametrize(
    ("name", "kind", "stages_per_rank", "accepts"),
    [
        ("ZB1P", ScheduleInterleavedZeroBubble, 1, lambda n_ranks, m: m % max(1, m // n_ranks) == 0),
        ("ZBV", ScheduleZBVZeroBubble, 2, lambda n_ranks, m: True),
        ("DualPipeV", ScheduleDualPipeV, 2, lambda n_ranks, m: m >= 2 * n_ranks),
    ],
)
def test_zero_bubble_order_is_torchs(name: str, kind: type, stages_per_rank: int, accepts: Callable[[int, int], bool]) -> None:
    n_compared = 0
    for n_ranks, n_microbatches, ours, theirs in _accepted(name, kind, stages_per_rank):
        assert ours == theirs, (n_ranks, n_microbatches)
        n_compared += 1
    assert n_compared == sum(accepts(n_ranks, m) for n_ranks, m in product(N_RANKS, N_MICROBATCHES))


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_our_text(name: str) -> None:
    schedule = make_schedule(name, 4, 6)
    for line, actions in zip(schedule.to_text().splitlines(), schedule.actions, strict=True):
        read: list[Any] = [TorchAction.from_str(cell) for cell in line.split(",")]
        assert [(each.stage_index, each.computation_type.value, each.microbatch_index) for each in read] == [
            (action.stage, action.kind.value, action.microbatch) for action in actions
        ]
