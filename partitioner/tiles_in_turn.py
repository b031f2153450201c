"""What a model whose tiles are computed in turn does not do: it has no backward."""

from __future__ import annotations

from collections.abc import Collection

from passes.ir.errors import ConfigError
from passes.ir.plan import Plan

__all__ = ["check_forward_only"]


def check_forward_only(plan: Plan, wanted: Collection[str]) -> None:
    """Before gradients are computed.

    Args:
        wanted: what they are wanted for.

    Raises:
        ConfigError: the plan computes tiles in turn, and something is wanted.
    """
    if plan.tiles and wanted:
        raise ConfigError(
            "tiles in turn on one device compute a forward, no gradients",
            remedy='detach the inputs; to train, cut space over devices: partition(model, devices=4, mode="tile")',
        )
