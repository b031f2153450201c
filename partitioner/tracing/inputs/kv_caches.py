"""Let the key-value caches of transformers pass through a trace as nested tensors.

transformers registers its outputs (``ModelOutput``) as pytrees when it is imported, but not the caches that they may hold.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from passes.ir.torch_private import pytree

__all__ = ["register_caches"]

_LAYER_STATE = ("sliding_window", "cumulative_length")
"""Attributes of a cache layer besides its keys and values; a layer has some of them."""


def register_caches() -> None:
    """Register ``DynamicCache`` and ``EncoderDecoderCache``, if transformers is imported and they are not registered."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return
    for name, flatten, unflatten in (
        ("DynamicCache", _flatten_dynamic, _unflatten_dynamic),
        ("EncoderDecoderCache", _flatten_pair, _unflatten_pair),
    ):
        cache = getattr(module, name, None)
        if cache is not None and cache not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                cache,
                flatten,
                unflatten,
                serialized_type_name=f"transformers.cache_utils.{name}",
                flatten_with_keys_fn=_with_keys(flatten),
            )


def _flatten_dynamic(cache: Any) -> tuple[list[Any], Any]:
    """Return a pair (keys, values) for each layer, and the types and other state as the context."""
    tensors = [(layer.keys, layer.values) for layer in cache.layers]
    states = [tuple((name, getattr(layer, name)) for name in _LAYER_STATE if hasattr(layer, name)) for layer in cache.layers]
    return tensors, (type(cache), tuple(type(layer) for layer in cache.layers), tuple(states))


def _unflatten_dynamic(layers: Any, context: Any) -> Any:
    """Rebuild a cache without computing: a pytree is also unflattened with other objects in place of tensors."""
    kind, layer_kinds, states = context
    cache = kind()
    cache.layers = []
    for (keys, values), layer_kind, state in zip(layers, layer_kinds, states, strict=True):
        layer = layer_kind.__new__(layer_kind)
        layer.keys, layer.values, layer.is_initialized = keys, values, keys is not None
        if isinstance(keys, torch.Tensor):
            layer.dtype, layer.device = keys.dtype, keys.device
        for name, value in state:
            setattr(layer, name, value)
        cache.layers.append(layer)
    return cache


def _flatten_pair(cache: Any) -> tuple[list[Any], Any]:
    """Return the two caches of an ``EncoderDecoderCache``, and its type and flags as the context."""
    return [cache.self_attention_cache, cache.cross_attention_cache], (type(cache), tuple(sorted(cache.is_updated.items())))


def _unflatten_pair(caches: Any, context: Any) -> Any:
    """Rebuild an ``EncoderDecoderCache``: its constructor needs two caches, so it gets empty ones, which are then replaced."""
    kind, is_updated = context
    empty = type(sys.modules["transformers.cache_utils"].DynamicCache())
    cache = kind(empty(), empty())
    cache.self_attention_cache, cache.cross_attention_cache = caches
    cache.is_updated = dict(is_updated)
    return cache


def _with_keys(flatten: Any) -> Any:
    """Return a flatten function that also returns a key, its index, for each child."""

    def flatten_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(cache)
        return [(pytree.SequenceKey(index), child) for index, child in enumerate(children)], context

    return flatten_with_keys
