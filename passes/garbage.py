"""Work on graphs of many nodes without looks for garbage.

What such work makes, hundreds of thousands of small objects, mostly lives to its end. To look for garbage among them, again and again,
takes a third of the time of planning and of lowering, and half of that of a simulation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["nothing_collected"]


@contextlib.contextmanager
def nothing_collected() -> Iterator[None]:
    """Look for no garbage meanwhile; a decorator, too. What nobody refers to is freed as ever: only circles wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
