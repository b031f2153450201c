"""Trace a model on the meta device as one on the CPU: the tensors among its attributes have values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from partitioner.tracing.export.on_meta.constructed import ConstructedTensors
from passes.ir.torch_private import tree_leaves, tree_map_only

__all__ = ["attributes_as_cpu"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_computed: WeakKeyDictionary[nn.Module, dict[int, tuple[Tensor, Tensor | str]]] = WeakKeyDictionary()
"""Model -> id of a tensor on the meta device among attributes -> this tensor, and its values or why they are not known.

Values are those of a constructor, so they do not change; every trace of a model has the same tensor.
"""


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
