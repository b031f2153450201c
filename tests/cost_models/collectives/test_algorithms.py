"""Collectives on clusters: closed formulas, links that are shared, and the backends that carry them out."""

from __future__ import annotations

import datetime as dt
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.collectives.algorithms import Collective, Group, group_links, message_links, slowest_link
from cost_models.collectives.alpha_beta import (
    all_gather,
    all_reduce,
    all_to_all,
    gathered_all_reduce,
    halo_exchange,
    hierarchical_all_reduce,
    reduce_scatter,
    send_receive,
    tree_all_reduce,
)
from cost_models.hardware.clusters import Cluster, Device, Level, Link
from passes.ir.comm.backends import BACKENDS, BackendOperation, check_backend, default_backend
from passes.ir.errors import ConfigError

NEAR, FAR = Link(1e-6, 200e9), Link(1e-5, 20e9)
DEVICE = Device("d", {"float32": 1e12}, 2**30, 1e11)


def nodes(count: int, width: int, *, shared: bool = False) -> Cluster:
    """Return a cluster of ``count`` nodes of ``width`` devices."""
    return Cluster([DEVICE] * (count * width), [Level(width, NEAR), Level(count * width, FAR, shared)])


def collective_time(kind: Collective, size: float, group: Group, cluster: Cluster, at_once: Sequence[Group] = ()) -> float:
    return group_links(group, cluster, at_once).seconds(kind, size)


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_each_algorithm_is_its_formula(n_ranks: int) -> None:
    alpha, beta, size = FAR.latency, 1 / FAR.bandwidth, 1e6
    step = alpha + size / n_ranks * beta
    assert reduce_scatter(size, n_ranks, FAR) == all_gather(size, n_ranks, FAR) == pytest.approx((n_ranks - 1) * step)
    assert all_reduce(size, n_ranks, FAR) == pytest.approx(2 * (n_ranks - 1) * step)
    assert all_to_all(size, n_ranks, FAR) == pytest.approx((n_ranks - 1) * step)
    assert tree_all_reduce(size, n_ranks, FAR) == pytest.approx(2 * math.ceil(math.log2(n_ranks)) * alpha + 2 * size * beta)
    assert halo_exchange(size, n_ranks, FAR) == pytest.approx(min(2, n_ranks - 1) * (alpha + size * beta))


def test_a_hierarchy_sends_a_part_between_nodes() -> None:
    size = 8e6
    inner = 2 * 3 * (NEAR.latency + size / 4 / NEAR.bandwidth)
    outer = 2 * 1 * (FAR.latency + size / 4 / 2 / FAR.bandwidth)
    assert hierarchical_all_reduce(size, [(4, NEAR), (2, FAR)]) == pytest.approx(inner + outer)
    assert collective_time("all_reduce", size, tuple(range(8)), nodes(2, 4)) == pytest.approx(inner + outer)


def test_the_fastest_algorithm_is_taken() -> None:
    group, cluster = tuple(range(8)), nodes(1, 8)
    assert collective_time("all_reduce", 1e9, group, cluster) == pytest.approx(all_reduce(1e9, 8, NEAR))
    assert collective_time("all_reduce", 10, group, cluster) == pytest.approx(tree_all_reduce(10, 8, NEAR))
    assert collective_time("all_reduce", 0, group, cluster) == pytest.approx(tree_all_reduce(0, 8, NEAR))
    assert collective_time("all_reduce", 10, (3,), cluster) == 0


def test_a_collective_starts_once_whatever_its_steps() -> None:
    cluster, group = Cluster([DEVICE] * 8, replace(NEAR, start=1e-3)), tuple(range(8))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "halo_exchange"):
        assert collective_time(kind, 1e6, group, cluster) == pytest.approx(1e-3 + collective_time(kind, 1e6, group, nodes(1, 8)))
    assert collective_time("all_reduce", 1e6, (3,), cluster) == 0
    with pytest.raises(ConfigError, match="start"):
        replace(NEAR, start=-1.0)


def test_small_tensors_are_gathered_where_the_link_says_so() -> None:
    """Up to a kibibyte of all four ranks: three messages of the whole instead of six of a quarter."""
    gathering = Link(1e-3, 1e6, gathered_bytes=1024)
    cluster, group = Cluster([DEVICE] * 4, gathering), tuple(range(4))
    assert gathered_all_reduce(256, 4, gathering) == pytest.approx(3 * (1e-3 + 256e-6))
    assert collective_time("all_reduce", 256, group, cluster) == gathered_all_reduce(256, 4, gathering)
    assert collective_time("all_reduce", 257, group, cluster) == tree_all_reduce(257, 4, gathering)
    assert collective_time("all_gather", 256, group, cluster) == all_gather(256, 4, gathering)


def test_a_ring_is_as_fast_as_its_slowest_step() -> None:
    cluster = nodes(2, 2)
    assert slowest_link((0, 1), cluster) == NEAR
    assert slowest_link((0, 2, 1, 3), cluster) == FAR
    assert collective_time("all_gather", 1e6, (0, 2, 1, 3), cluster) == pytest.approx(all_gather(1e6, 4, FAR))


def test_groups_that_cross_at_once_share_an_adapter() -> None:
    pair, other = (0, 2), (1, 3)
    own, shared = nodes(2, 2), nodes(2, 2, shared=True)
    alone = collective_time("all_gather", 1e6, pair, shared)
    assert collective_time("all_gather", 1e6, pair, own, at_once=[pair, other]) == alone
    assert collective_time("all_gather", 1e6, pair, shared, at_once=[pair, other]) == pytest.approx(
        all_gather(1e6, 2, Link(FAR.latency, FAR.bandwidth / 2))
    )
    assert collective_time("all_gather", 1e6, (0, 1), shared, at_once=[(0, 1), (2, 3)]) == pytest.approx(all_gather(1e6, 2, NEAR))


def test_messages_that_leave_one_device_at_once_share_its_link() -> None:
    cluster = nodes(2, 2)
    assert [link.bandwidth for link in message_links([(0, 2), (0, 3), (1, 3), (0, 1)], cluster)] == [10e9, 10e9, 20e9, 200e9]
    assert send_receive(1e6, message_links([(0, 1)], cluster)[0]) == send_receive(1e6, NEAR)


def test_placement_lays_another_mesh_dimension_on_the_near_links() -> None:
    cluster = nodes(2, 2)
    across = cluster.placed((0, 2, 1, 3))
    assert cluster.link(0, 1) == across.link(0, 2) == NEAR
    assert cluster.link(0, 2) == across.link(0, 1) == FAR
    with pytest.raises(ConfigError, match="once"):
        cluster.placed((0, 0, 1, 2))


def gloo_calls() -> dict[BackendOperation, Callable[[Any, int], Any]]:
    """Return each operation on the real backend, for one of two ranks."""

    def exchange(group: Any, rank: int) -> Any:
        return group.send([torch.ones(2)], 1 - rank, 0) if rank else group.recv([torch.empty(2)], 1 - rank, 0)

    def whole() -> Tensor:
        return torch.ones(4)

    return {
        "send_receive": exchange,
        "broadcast": lambda group, _rank: group.broadcast(whole(), 0),
        "all_reduce": lambda group, _rank: group.allreduce(whole()),
        "all_gather": lambda group, _rank: group.allgather([[torch.empty(4), torch.empty(4)]], [whole()]),
        "reduce_scatter": lambda group, _rank: group.reduce_scatter(torch.empty(2), [torch.ones(2), torch.ones(2)]),
        "all_to_all": lambda group, _rank: group.alltoall_base(torch.empty(4), whole(), [], []),
    }


def test_gloo_does_on_cpus_what_the_table_says() -> None:
    store, done = torch.distributed.HashStore(), {}  # type: ignore[attr-defined]  # its stub lacks it

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, 2, dt.timedelta(seconds=30))
        for operation, call in gloo_calls().items():
            call(group, rank).wait()
            done[operation, rank] = True

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {operation for operation, _ in done} == set(BACKENDS["gloo"]["cpu"]) == set(get_args(BackendOperation))


def test_an_operation_that_a_backend_lacks_is_refused_with_one_that_has_it() -> None:
    check_backend(default_backend("cuda"), "cuda", "all_to_all")
    with pytest.raises(ConfigError, match=r"(?s)'gloo' has no all_to_all on cuda.*nccl"):
        check_backend("gloo", "cuda", "all_to_all")
    with pytest.raises(ConfigError, match="another kind of device"):
        check_backend("nccl", "tpu", "all_reduce")
