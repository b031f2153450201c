"""Say the padding of a convolution in numbers where a word says it, so that a part can have less of it.

Before:                                                       After:

    y = aten.conv2d.padding(x, w, b, [1, 1], "same")              y = aten.conv2d.default(x, w, b, [1, 1], [1, 1])

``"same"`` with a kernel of an even size pads unevenly, which numbers cannot say: that stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from passes.operators import bound_arguments

__all__ = ["number_paddings"]

aten = torch.ops.aten

_BY_NUMBERS: Mapping[Any, Any] = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


def number_paddings(graph: fx.Graph) -> None:
    """Rewrite in place."""
    for node in graph.nodes:
        if node.target not in _BY_NUMBERS:
            continue
        given = bound_arguments(node)
        kernel = [int(size) for size in given["weight"].meta["val"].shape[2:]]
        dilation = list(given["dilation"]) * (len(kernel) // len(given["dilation"]))
        extents = [step * (size - 1) if given["padding"] == "same" else 0 for step, size in zip(dilation, kernel, strict=True)]
        if all(extent % 2 == 0 for extent in extents):
            order = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given["padding"] = [extent // 2 for extent in extents]
            node.target, node.args, node.kwargs = _BY_NUMBERS[node.target], tuple(given[name] for name in order), {}
