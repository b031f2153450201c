"""Refuse a folder or module of a script that Python imports in place of ``passes`` or ``cost_models``.

Python looks beside the script first: a folder ``passes/`` there shadows the installed package. Its error would name a module of ours that
is missing, ``passes.ir``, and no folder. Nothing but the standard library is imported here, since the other packages may be the wrong ones.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2]
"""Has the three packages beside each other, installed or in a checkout."""


def check_shadowed_packages() -> None:
    """Raise ImportError if ``passes`` or ``cost_models`` is another package, and say which one shadows it."""
    for name in ("passes", "cost_models"):
        found = _location(name)
        if found is not None and found != _FOLDER / name:
            raise ImportError(
                f"{found} shadows the package {name!r} of partitioner, in {_FOLDER / name}: Python finds it first, by "
                f"{'the script or an earlier import' if name in sys.modules else 'the order of sys.path'}\n"
                f"  remedy: rename {found}, or start the script from a file in another folder",
                name=name,
                path=str(found),
            )


def _location(name: str) -> Path | None:
    """Return the folder of a package, or the file of a module, that ``import`` gives; None: it has none, and the import itself fails."""
    imported = sys.modules.get(name)
    spec: ModuleSpec | None = importlib.util.find_spec(name) if imported is None else imported.__spec__
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return next((Path(location).resolve() for location in spec.submodule_search_locations), None)
    return None if spec.origin is None else Path(spec.origin).resolve()
