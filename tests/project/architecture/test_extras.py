"""No package of an extra is needed until it is used, and then the error names the extra."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from tests import ROOT

OPTIONAL = (
    *("accelerate", "diffusers", "lightning", "lightning_fabric", "peft"),
    *("pyarrow", "pytorch_lightning", "safetensors", "sklearn", "tensorboard", "transformers"),
)
"""Top-level modules of the extras."""

PROLOGUE = f"""
import importlib, importlib.util, pkgutil, sys
for name in ({", ".join(map(repr, OPTIONAL))}):
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
"""

EVERY_MODULE = """
for root in ("passes", "cost_models", "partitioner"):
    for found in pkgutil.walk_packages(importlib.import_module(root).__path__, root + "."):
        of_integration = found.name.split(".")[:2] == ["partitioner", "integrations"] and found.name.count(".") > 2
        if not found.name.endswith("__main__") and not of_integration:  # those are imported where the library is
            importlib.import_module(found.name)
print("all imported")
"""

INTEGRATIONS = """
for name in sys.argv[1:]:
    module = importlib.import_module("partitioner.integrations." + name)
    for public in getattr(module, "__all__", ()):
        try:
            getattr(module, public)
        except Exception as error:
            assert type(error).__name__ == "ConfigError" and f"torch-partitioner[{name}]" in str(error), error
        else:
            raise AssertionError(f"{name}.{public} was imported")
print("all refused")
"""


def run(code: str, *arguments: str) -> str:
    ended = subprocess.run([sys.executable, "-c", PROLOGUE + code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
def test_every_module_is_imported_without_the_extras() -> None:
    assert run(EVERY_MODULE) == "all imported"


@pytest.mark.slow
def test_an_integration_names_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    integrations = sorted({path.stem for path in (ROOT / "partitioner/integrations").iterdir()} & set(extras))
    assert run(INTEGRATIONS, *integrations) == "all refused"
