"""Graph modules whose Python is written when somebody calls or prints them.

``fx.GraphModule`` writes and compiles its ``forward`` as soon as it has a graph. Most graphs of a compiler are read, cut and thrown away,
and no program runs by that ``forward``: writing it was two fifths of the time from a plan to its programs.

Pause cyclic garbage collection while large graphs are built.

Building them makes hundreds of thousands of small objects, most of which live to the end. Collecting cycles among them, again and again,
takes a third of the time of planning and of lowering, and half of that of a simulation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from passes.ir.graph import ModelGraph
from passes.ir.torch_private import TorchLazyGraphModule

__all__ = ["LazyGraphModule", "gc_paused", "rewritten"]


class LazyGraphModule(TorchLazyGraphModule):
    """What ``fx.GraphModule`` is; ``forward`` and ``code`` are written when they are asked for."""


def rewritten(graph: ModelGraph, target: fx.Graph, names: Mapping[str, str], class_name: str = "Model") -> ModelGraph:
    """Return the model with a rewritten copy of its graph.

    Args:
        target: the copy.
        names: node that the model returns -> its name in the copy; those left out keep theirs.
    """
    target.lint()
    outputs = tuple(replace(each, node=names.get(each.node or "", each.node)) for each in graph.outputs)
    return replace(graph, module=LazyGraphModule({}, target, class_name=class_name), outputs=outputs)


# -- pause cyclic garbage collection ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Look for no garbage meanwhile; a decorator, too. What nobody refers to is freed as ever: only circles wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
