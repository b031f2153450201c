"""How long messages and collectives take: alpha-beta formulas in bytes, group size and link, also of sympy expressions.

``size`` is always that of the whole tensor: what all_reduce and broadcast leave on every rank, what all_gather produces, what
reduce_scatter consumes. Rings (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005).
"""

from __future__ import annotations

from cost_models.hardware import Link
from cost_models.sizes import Size

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "send_receive"]


def send_receive(size: Size, link: Link) -> Size:
    """One message."""
    return link.latency + size / link.bandwidth


def reduce_scatter(size: Size, n_ranks: int, link: Link) -> Size:
    """Every rank passes on n - 1 parts, one of n each, and adds."""
    return (n_ranks - 1) * send_receive(size / n_ranks, link)


def all_gather(size: Size, n_ranks: int, link: Link) -> Size:
    """Every rank passes on n - 1 parts, one of n each."""
    return (n_ranks - 1) * send_receive(size / n_ranks, link)


def all_reduce(size: Size, n_ranks: int, link: Link) -> Size:
    """A reduce_scatter, then an all_gather."""
    return reduce_scatter(size, n_ranks, link) + all_gather(size, n_ranks, link)


def broadcast(size: Size, n_ranks: int, link: Link) -> Size:
    """A scatter along the ring, then an all_gather: a large message need not wait for its last byte."""
    return 2 * all_gather(size, n_ranks, link)


def all_to_all(size: Size, n_ranks: int, link: Link) -> Size:
    """Every rank sends every other one of the n parts that it holds."""
    return (n_ranks - 1) * send_receive(size / n_ranks, link)
