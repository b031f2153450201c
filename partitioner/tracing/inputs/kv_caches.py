"""Let the key-value caches of transformers pass through a trace as nested tensors.

transformers registers its outputs (``ModelOutput``) as pytrees when it is imported, but not the caches that they may hold.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from passes.ir.torch_private import pytree

_LAYER_TENSORS = ("keys", "values", "conv_states", "recurrent_states")
"""Attributes of a cache layer that hold tensors: the states of convolutions and linear attention are dicts, by their number."""

_LAYER_STATE = (
    "sliding_window",
    "cumulative_length",
    "number_of_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
    "record_past",
)
"""Attributes of a cache layer besides its tensors; a layer has some of them."""


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
    """Return a tuple of tensors, such as (keys, values), for each layer, and the types and other state as the context."""
    tensors = [tuple(_children(getattr(layer, name)) for name in _tensor_names(layer)) for layer in cache.layers]
    kinds = tuple((type(layer), _tensor_names(layer)) for layer in cache.layers)
    states = [tuple((name, _frozen(getattr(layer, name))) for name in _LAYER_STATE if hasattr(layer, name)) for layer in cache.layers]
    return tensors, (type(cache), kinds, tuple(states))


def _tensor_names(layer: Any) -> tuple[str, ...]:
    """Return the attributes of a cache layer that hold its tensors: a layer of a convolution has no keys."""
    return tuple(name for name in _LAYER_TENSORS if hasattr(layer, name))


def _children(value: Any) -> Any:
    """Return the states of a dict as a tuple, and any other value unchanged."""
    return tuple(value[number] for number in sorted(value)) if isinstance(value, dict) else value


def _frozen(value: Any) -> Any:
    """Return a dict as its items, because a context is compared and hashed, and any other value unchanged."""
    return _Items(sorted(value.items())) if isinstance(value, dict) else value


class _Items(tuple[Any, ...]):
    """Items of a dict in the context of a cache."""

    __slots__ = ()


def _unflatten_dynamic(layers: Any, context: Any) -> Any:
    """Rebuild a cache without computing: a pytree is also unflattened with other objects in place of tensors."""
    kind, layer_kinds, states = context
    cache = kind()
    cache.layers = []
    for tensors, (layer_kind, names), state in zip(layers, layer_kinds, states, strict=True):
        layer = layer_kind.__new__(layer_kind)
        for name, value in zip(names, tensors, strict=True):
            setattr(layer, name, dict(enumerate(value)) if isinstance(value, tuple) else value)
        if "keys" in names:
            layer.is_initialized = layer.keys is not None
        for name, value in state:
            setattr(layer, name, dict(value) if isinstance(value, _Items) else value)
        _set_place(layer, tensors)
        cache.layers.append(layer)
    return cache


def _set_place(layer: Any, tensors: Any) -> None:
    """Set the dtype and device of a cache layer to those of its first tensor; a layer without keys has None for none."""
    first = next((leaf for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, torch.Tensor)), None)
    if first is not None:
        layer.dtype, layer.device = first.dtype, first.device
    elif not hasattr(layer, "keys"):
        layer.dtype = layer.device = None


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
