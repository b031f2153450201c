"""How fast ranks compute and talk: what makes work and bytes comparable before anything is planned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cost_models.hardware import Cluster
from passes.ir.graph import ModelGraph

__all__ = ["Pace", "pace_of"]


@dataclass(frozen=True)
class Pace:
    """How fast ranks compute and talk.

    Attributes:
        flops: FLOP/s of a rank.
        bandwidth: B/s between ranks.
        latency: s of a message.
        copying: s a byte that is copied into a message, or out of one.
        asked: whether somebody asked for the ranks, so that work is cut though messages take longer than it saves, as they do for small
            models; else nothing counts but time.
    """

    flops: float
    bandwidth: float
    latency: float
    copying: float = 0.0
    asked: bool = False


def pace_of(graph: ModelGraph, cluster: Cluster, *, asked: bool) -> Pace | None:
    """That of neighbours in a cluster; None for a device alone."""
    if len(cluster.devices) == 1:
        return None
    held = [node.meta["val"].dtype for node in graph.graph.nodes if node.name in graph.parameters]
    dtype = next((dtype for dtype in held if dtype.is_floating_point), torch.float32)
    link = cluster.link(0, 1)
    copying = 2 / min(device.bandwidth for device in cluster.devices) if link.copies else 0.0
    return Pace(min(device.flops(dtype) for device in cluster.devices), link.bandwidth, link.latency, copying, asked)
