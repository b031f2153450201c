"""Compare a model's forward with a cache of fixed length to that with its own cache, for a short prompt and one token after it.

    own cache        keys of 4 tokens                              logits
    fixed length     keys of 4 tokens, and 60 places for later     equal logits, if the model leaves those out

A model that reads the number of keys as the number of tokens computes another mask with a cache of fixed length: GPT-Neo, whose attention
takes the last rows of a table, ``bias[:, :, keys - queries : keys, :keys]``. Only the numbers show it. The comparison is on the model's own
weights, with one row; the places of one layer at a time are in memory.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.model.generation.cached_forward import cache_name, given_cache_type, language_model, logits_of
from partitioner.tracing.export.export import TRACING
from partitioner.tracing.restore import preserve
from passes.ir.errors import ConfigError
from passes.ir.graph import Autocast

_PROMPT = 3
"""Tokens before the one that is decoded: keys before the first would be those of padding."""


def check_static_cache(model: nn.Module, length: int, autocast: Autocast | None) -> None:
    """Raise ConfigError if a model computes other logits with a cache of so many positions than with its own.

    A model without values (on the ``meta`` device), or one that does not run where it is, is not compared.
    """
    parameters = list(model.parameters())
    if length <= _PROMPT + 1 or not parameters or any(parameter.is_meta for parameter in parameters):
        return
    embeddings: Any = language_model(model).get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(_PROMPT + 1, device=parameters[0].device)[None] % int(embeddings.weight.shape[0])
    context = autocast.enabled() if autocast is not None else torch.autocast("cpu", enabled=False)
    with TRACING, preserve(model), torch.no_grad(), context:
        model.train(mode=False)
        try:
            expected = _with_own_cache(model, ids)
        except (RuntimeError, ValueError):  # it may be for another device than it is on: the ranks' programs are not concerned
            return
        found = _with_fixed_length(model, ids, length)
    eps = max(torch.finfo(each.dtype).eps for each in (*parameters, expected) if each.is_floating_point())
    if not torch.allclose(found, expected, rtol=0, atol=float(expected.abs().max()) * eps**0.5, equal_nan=True):
        raise ConfigError(
            f"{type(model).__name__} computes other logits with a cache of {length} positions than with one of the tokens so far: its mask "
            "follows from the number of keys",
            remedy="model.generate(), after model.load_state_dict(pm.full_state_dict()), decodes on one device",
        )


def _with_own_cache(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of the last token of the prompt, and of the one after it."""
    forward: Any = functools.partial(type(model).forward, model, use_cache=True, return_dict=True)
    first = forward(input_ids=ids[:, :_PROMPT], attention_mask=torch.ones_like(ids[:, :_PROMPT]))
    last = forward(input_ids=ids[:, _PROMPT:], attention_mask=torch.ones_like(ids), **{cache_name(): first[cache_name()]})
    return torch.cat([first.logits[:, -1:], last.logits[:, -1:]], 1)


def _with_fixed_length(model: nn.Module, ids: Tensor, length: int) -> Tensor:
    """Return the same logits with a cache of fixed length."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    mask = ids.new_ones(1, length)
    mask[:, -1] = 0  # a later position is left out anyway; a model that sees ones alone may make no mask, which a trace cannot see
    cache = _padded_cache_type()(length)
    logits = []
    for chunk in (slice(0, _PROMPT), slice(_PROMPT, None)):
        cache.position = positions[chunk]
        every = logits_of(model, type(model), ids[:, chunk], mask, positions[None, chunk], cache)
        logits.append(every[:, -1:])
    return torch.cat(logits, 1)


@functools.cache
def _padded_cache_type() -> Any:
    """Return a cache class that keeps the tokens so far, and gives them to a layer, followed by zeros."""
    base: Any = given_cache_type()

    class PaddedCache(base):  # type: ignore[misc]
        def __init__(self, length: int) -> None:
            super().__init__(torch.zeros(0), {})
            self.length = length

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, ...]:
            old = self.tensors.get(layer_idx, (key_states[:, :, :0], value_states[:, :, :0]))
            self.tensors[layer_idx] = held = tuple(torch.cat(pair, 2) for pair in zip(old, (key_states, value_states), strict=True))
            return tuple(F.pad(each, (0, 0, 0, self.length - each.shape[2])) for each in held)

        def get_max_cache_shape(self, layer_idx: int = 0) -> int:
            return self.length

    return PaddedCache
