"""Let ``torch.compile`` find the backend "partitioner" where the package is not installed, but imported from a checkout.

An installed package declares it as an entry point. PyTorch reads the entry points when it first meets a backend that it does not know;
``declare_backend`` answers for a package without metadata. Nothing is imported for it: Dynamo alone takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["declare_backend"]

_NAME = "partitioner"
_TARGET = "partitioner.integrations.torch_compile.backend:partitioner_backend"


class _Imported(importlib.metadata.Distribution):
    """The metadata of the imported package: a name of its own, since an older version may be installed, and its entry point."""

    def read_text(self, filename: str) -> str | None:
        texts = {"METADATA": f"Name: {_NAME}-imported\n", "entry_points.txt": f"[torch_dynamo_backends]\n{_NAME} = {_TARGET}\n"}
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(__file__).parents[2] / path


class _Finder:
    """Finds the metadata of the imported package; asked last, so that an installed entry point of the same name counts."""

    @staticmethod
    def find_spec(_name: str, _path: Any = None, _target: Any = None) -> None:
        """Return None: it finds no modules."""

    @staticmethod
    def find_distributions(context: importlib.metadata.DistributionFinder.Context) -> Iterator[importlib.metadata.Distribution]:
        """Yield the package when all packages are listed."""
        if context.name is None:
            yield _Imported()


def declare_backend() -> None:
    """Declare the backend, without importing anything of PyTorch."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.append(_Finder())
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and _NAME not in dynamo.list_backends(()):  # it has read the entry points before
        dynamo.register_backend(_compile, name=_NAME)


def _compile(module: Any, example_inputs: Any, **keywords: Any) -> Any:
    """Call the backend, which is imported at the first call."""
    package, _, function = _TARGET.partition(":")
    return getattr(importlib.import_module(package), function)(module, example_inputs, **keywords)
