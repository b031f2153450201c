"""Name the mixtures of experts of a model, on the first of the products of each, for recorders of expert loads.

    up = partitioner.grouped_mm(tokens, p_mlp_up, group)           meta["custom"] = {"mixture": "mlp"}
    down = partitioner.grouped_mm(gated, p_mlp_down, group)

Products belong together if their module is the same, and one choice of experts says the group of their rows. The names are those of the
model: each stage and rank of it says the same, whichever products it has.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.graph.provenance import module_path
from passes.graph.schemas import packet
from passes.rules.ops.grouped_mm import MIXTURE, grouped_mm

__all__ = ["name_mixtures"]

aten = torch.ops.aten

_VIEWS = frozenset({aten.view, aten.reshape, aten.flatten, aten.unsqueeze, aten.squeeze, aten.contiguous, aten.clone, aten.to, aten.alias})


def name_mixtures(graph: fx.Graph) -> None:
    """Mark the products in place; a second mixture of one module, or a second call of it, has a number: ``"mlp (2)"``."""
    choices: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is not grouped_mm:
            continue
        module, choice = module_path(node), _choice(node.args[2])
        known = choices.setdefault(module, [])
        if choice not in known:
            known.append(choice)
            name = module if len(known) == 1 else f"{module} ({len(known)})".strip()
            node.meta["custom"] = {**node.meta.get("custom", {}), MIXTURE: name}


def _choice(group: fx.Node) -> fx.Node:
    """Return the numbers of experts that a view of them comes from."""
    while packet(group.target) in _VIEWS:
        group = group.all_input_nodes[0]
    return group
