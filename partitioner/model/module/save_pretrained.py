"""``pm.save_pretrained(folder)``: the weights and the configuration of a model of transformers, as ``from_pretrained`` reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from partitioner.specialize.trace import Trace


def save_pretrained(trace: Trace, pm: nn.Module) -> Callable[..., Any]:
    """Return the model's own ``save_pretrained`` with the present weights; the first process writes. All ranks must call it.

    Raises:
        AttributeError: the model has none.
    """
    save = getattr(trace.original, "save_pretrained", None)
    if save is None:
        raise AttributeError(f"{trace.name} has no save_pretrained(): it is for models of transformers")

    @functools.wraps(save)
    def saved(save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any) -> Any:
        weights = pm.state_dict() if state_dict is None else state_dict
        is_first = 0 in trace.runtime.local_ranks
        return save(save_directory, is_main_process=is_main_process and is_first, state_dict=weights, **kwargs)

    return saved
