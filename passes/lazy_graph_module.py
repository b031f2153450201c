"""Graph modules whose Python is written when somebody calls or prints them.

``fx.GraphModule`` writes and compiles its ``forward`` as soon as it has a graph. Most graphs of a compiler are read, cut and thrown away,
and no program runs by that ``forward``: writing it was two fifths of the time from a plan to its programs.
"""

from __future__ import annotations

import contextlib

from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

__all__ = ["LazyGraphModule", "traced_lazily"]


class LazyGraphModule(_LazyGraphModule):
    """What ``fx.GraphModule`` is; ``forward`` and ``code`` are written when they are asked for."""


def traced_lazily() -> contextlib.AbstractContextManager[None]:
    """While it lasts, what PyTorch's tracers give is lazy, too."""
    return _use_lazy_graph_module(should_use=True)
