"""Put every ``getitem`` right behind its producer.

Before:                                  After:

    split = aten.split(x, 4)                 split = aten.split(x, 4)
    linear = aten.linear(y, w)               a = split[0]
    a = split[0]                             b = split[1]
    b = split[1]                             linear = aten.linear(y, w)

A cut between two nodes then never separates a list of tensors from its items.
"""

from __future__ import annotations

import operator

from torch import fx

__all__ = ["place_getitems"]


def place_getitems(graph: fx.Graph) -> None:
    """Move the items in place; their order is kept."""
    for node in list(graph.nodes):
        last = node
        for item in [user for user in node.users if user.op == "call_function" and user.target is operator.getitem]:
            if last.next is not item:
                last.append(item)
            last = item
