"""The table of GPT-3 in the docs: graphs of the models come to the closed forms, to the last FLOP and parameter."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT


def load() -> ModuleType:
    """Load the module of the table."""
    specification = importlib.util.spec_from_file_location("docs_gpt3", ROOT / "docs" / "gpt3.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look there
    specification.loader.exec_module(module)
    return module


GPT3 = load()


@pytest.mark.slow
@pytest.mark.parametrize("shape", GPT3.SHAPES, ids=[shape.name for shape in GPT3.SHAPES])
def test_graphs_come_to_the_closed_forms(shape: Any) -> None:
    found = GPT3.counted(shape)
    assert found.parameters == shape.parameters
    assert found.flops == shape.weight_flops + shape.attention_flops
