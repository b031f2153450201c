"""Graph modules that generate their Python code when they are called or printed; pause garbage collection.

``fx.GraphModule`` writes and compiles its ``forward`` as soon as it has a graph. Most graphs of a compiler are read, cut and thrown away,
and no program runs by that ``forward``: writing it was two fifths of the time from a plan to its programs.

Building large graphs makes hundreds of thousands of small objects, most of which live to the end. Looking for cycles among them
repeatedly takes a third of the time of planning and of lowering, and half of that of a simulation: ``gc_paused``.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from passes.ir.graph import ModelGraph
from passes.ir.torch_private import TorchLazyGraphModule


class LazyGraphModule(TorchLazyGraphModule):
    """An ``fx.GraphModule`` that generates ``forward`` and ``code`` when they are first used."""


def rewritten(graph: ModelGraph, target: fx.Graph, names: Mapping[str, str], class_name: str = "Model") -> ModelGraph:
    """Return the model with a rewritten copy of its graph.

    Args:
        target: the rewritten copy.
        names: node that the model returns -> its name in the copy; nodes left out keep their names.
    """
    target.lint()
    outputs = tuple(replace(each, node=names.get(each.node or "", each.node)) for each in graph.outputs)
    return replace(graph, module=LazyGraphModule({}, target, class_name=class_name), outputs=outputs)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection; also usable as a decorator. Reference counting goes on: only cycles stay in memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
