"""Alpha-beta formulas of messages and collectives, in bytes, group size and link; numbers or sympy expressions.

``size`` is always that of the whole tensor: what all_reduce and broadcast leave on every rank, what all_gather produces, what
reduce_scatter consumes; of an all_to_all, what one rank holds. With a the latency and b the seconds per byte of a link:

    send_receive        a + s b
    ring                n - 1 steps of s/n: reduce_scatter, all_gather; both one after the other: all_reduce
    gathered            n - 1 messages of s: each rank reduces all tensors itself, where these are small
    tree                2 log2(n) a + 2 s b: up and down two trees, each of which carries half of the message in many pieces
    hierarchical        reduce_scatter in each node, all_reduce of the parts between nodes, all_gather in each node

Rings: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005; Patarasuk, Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009. Trees: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", 2009; NCCL's double binary trees. Membership of groups and shared links:
``cost_models.collectives.algorithms``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cost_models.hardware.clusters import Link
from passes.ir.tensor_spec import Size


def send_receive(size: Size, link: Link) -> Size:
    """Return the time of one message."""
    return link.latency + size / link.bandwidth


def reduce_scatter(size: Size, n_ranks: int, link: Link) -> Size:
    """Return the time in which every rank passes on n - 1 parts, one of n each, and adds."""
    return (n_ranks - 1) * send_receive(size / n_ranks, link)


def all_gather(size: Size, n_ranks: int, link: Link) -> Size:
    """Return the time in which every rank passes on n - 1 parts, one of n each."""
    return (n_ranks - 1) * send_receive(size / n_ranks, link)


def all_reduce(size: Size, n_ranks: int, link: Link) -> Size:
    """Return the time of a reduce_scatter, then an all_gather."""
    return reduce_scatter(size, n_ranks, link) + all_gather(size, n_ranks, link)


def gathered_all_reduce(size: Size, n_ranks: int, link: Link) -> Size:
    """Return the time in which every rank sends its whole tensor to every other rank and adds the received ones."""
    return (n_ranks - 1) * send_receive(size, link)


def tree_all_reduce(size: Size, n_ranks: int, link: Link) -> Size:
    """Up to the roots of two trees and down again; pieces are so many that only the first one's way counts."""
    steps = math.ceil(math.log2(n_ranks)) if n_ranks > 1 else 0
    return 2 * steps * link.latency + (2 * size / link.bandwidth if n_ranks > 1 else 0)


def hierarchical_all_reduce(size: Size, levels: Sequence[tuple[int, Link]]) -> Size:
    """Inner groups first: they leave each rank a part, which groups between them reduce.

    Args:
        size: bytes of the tensor.
        levels: how many ranks or groups each level joins, and by which link, innermost first.
    """
    (n_ranks, link), *outer = levels
    if not outer:
        return all_reduce(size, n_ranks, link)
    between = hierarchical_all_reduce(size / n_ranks, outer)
    return reduce_scatter(size, n_ranks, link) + between + all_gather(size, n_ranks, link)


def broadcast(size: Size, n_ranks: int, link: Link) -> Size:
    """Return the time of a scatter along the ring, then an all_gather: a large message need not wait for its last byte."""
    return 2 * all_gather(size, n_ranks, link)


def all_to_all(size: Size, n_ranks: int, link: Link) -> Size:
    """Return the time in which every rank sends one of its n parts to each other rank."""
    return (n_ranks - 1) * send_receive(size / n_ranks, link)


def halo_exchange(size: Size, n_ranks: int, link: Link) -> Size:
    """Return the time of exchanging borders of ``size`` bytes with each neighbour: two in the middle, sent one after the other."""
    return min(n_ranks - 1, 2) * send_receive(size, link)
