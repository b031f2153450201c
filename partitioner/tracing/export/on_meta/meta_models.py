"""Trace a model on the meta device as one on the CPU: autocast casts there, and constants that forward makes have values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from partitioner.tracing.export.on_meta.constructed import ConstructedTensors
from passes.ir.graph import Autocast
from passes.ir.torch_private import MetaTensorDesc, MetaTensorDescriber, tree_leaves, tree_map_only

__all__ = ["as_on_cpu", "autocast_as_cpu"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_computed: WeakKeyDictionary[nn.Module, dict[int, tuple[Tensor, Tensor | str]]] = WeakKeyDictionary()
"""Model -> id of a tensor on the meta device among attributes -> this tensor, and its values or why they are not known.

Values are those of a constructor, so they do not change; every trace of a model has the same tensor.
"""


@contextlib.contextmanager
def as_on_cpu(model: nn.Module, autocast: Autocast | None) -> Iterator[dict[int, Tensor]]:
    """While active, trace a model on the meta device as one on the CPU; see ``attributes_as_cpu`` for the tensors that are yielded."""
    with autocast_as_cpu(autocast), meta_as_cpu(), attributes_as_cpu(model) as without_values:
        yield without_values


@contextlib.contextmanager
def attributes_as_cpu(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """While active, tensors on the meta device among attributes of modules are on the CPU, with the values that constructors compute.

    Yields:
        id of a tensor on the CPU without values -> the tensor on the meta device that it stands for, where the values are not known.
    """
    registered = {StorageWeakRef(each.untyped_storage()) for each in (*model.parameters(), *model.buffers())}
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _OF_EVERY_MODULE and any(_is_on_meta(leaf) for leaf in tree_leaves(value))
    ]
    known, unknown = _computed.setdefault(model, {}) if found else {}, dict[int, tuple[Tensor, Tensor]]()
    constructed = ConstructedTensors.of(model) if found else None

    def on_cpu(tensor: Tensor) -> Tensor:
        if constructed is None or not _is_on_meta(tensor) or StorageWeakRef(tensor.untyped_storage()) in registered:
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor, constructed.attribute(tensor)
        values = known[id(tensor)][1]
        if isinstance(values, Tensor):
            return values
        if id(tensor) not in unknown:
            unknown[id(tensor)] = tensor, torch.empty_like(tensor, device="cpu")
        return unknown[id(tensor)][1]

    try:
        for module, name, value in found:
            vars(module)[name] = tree_map_only(Tensor, on_cpu, value)
        yield {id(stand_in): tensor for tensor, stand_in in unknown.values()}
    finally:
        for module, name, value in found:
            vars(module)[name] = value


def _is_on_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


@contextlib.contextmanager
def autocast_as_cpu(autocast: Autocast | None) -> Iterator[None]:
    """While active, make ``torch.autocast`` for the meta device, or for the planned device, that of the CPU, where traced values are.

    PyTorch has no autocast for the meta device; even ``autocast(enabled=False)`` fails, which models write around rotary embeddings.
    """
    renamed = ("meta",) if autocast is None or autocast.planned_for is None else ("meta", autocast.planned_for)
    original = torch.autocast.__init__

    def initialize(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type in renamed else device_type, *args, **kwargs)

    torch.autocast.__init__ = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def meta_as_cpu() -> Iterator[None]:
    """While active, trace tensors on the meta device as fake tensors on the CPU, which need no memory either.

    ``torch.tensor(values, device=x.device)`` in forward then keeps its values, which a tensor on the meta device has not.
    """
    original = MetaTensorDescriber.describe_tensor

    def describe_tensor(self: MetaTensorDescriber, tensor: Tensor, **kwargs: Any) -> MetaTensorDesc[Any]:
        described = original(self, tensor, **kwargs)
        return replace(described, device=torch.device("cpu")) if described.device.type == "meta" else described

    MetaTensorDescriber.describe_tensor = describe_tensor  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        MetaTensorDescriber.describe_tensor = original  # type: ignore[method-assign]
