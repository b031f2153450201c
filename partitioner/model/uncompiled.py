"""The call of a partitioned model inside ``torch.compile``: Dynamo breaks its graph there, and the programs run as without a compiler.

Import this module when Dynamo traces, not before: it imports Dynamo, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a partitioned model runs programs of several ranks: compile around it without fullgraph=True"
)
def call_uncompiled(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``forward(*args, **kwargs)``, which no compiler traces."""
    return forward(*args, **kwargs)
