"""Arguments of a call that do not match the traced inputs are refused, with a remedy."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from partitioner import ConfigError, partition


def test_another_number_of_dimensions_is_refused_with_a_remedy() -> None:
    x = torch.rand(4, 6)
    pm = partition(nn.Linear(6, 3), ["cpu"] * 2, "data", example_inputs=x)
    with pytest.raises(ConfigError, match=re.escape("input has 1 dimension; the model was traced with 2: (batch, 6)")) as found:
        pm(x[0])
    assert found.value.remedy == "pass a tensor of 2 dimensions; for one sample, input[None]"
    with pytest.raises(ConfigError, match="input has 3 dimensions") as found:
        pm(x[None])
    assert found.value.remedy == "pass a tensor of 2 dimensions"
