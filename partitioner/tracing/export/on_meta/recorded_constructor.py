"""Run a constructor on the meta device, and compute single tensors of the built object.

    constructor                                                     recorded                        computed for ``inv_freq``

    inv_freq = 1.0 / base ** (torch.arange(0, 64, 2) / 64)          arange, div, pow, reciprocal    the same four, on the CPU
    self.register_buffer("inv_freq", inv_freq)
    self.weight = nn.Parameter(torch.empty(n, m))                   empty                           nothing
    nn.init.normal_(self.weight)                                    normal_                         nothing

Only the operations that a tensor depends on are computed, so that no parameter takes memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from passes.graph.schemas import draws_random_numbers, packet, written_values
from passes.ir.torch_private import TorchDispatchMode, no_dispatch_modes, tree_leaves, tree_map_only

_Built = TypeVar("_Built")

aten = torch.ops.aten

_OF_PYTHON_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make a tensor of Python's or numpy's values, which the meta device would drop."""

_UNINITIALIZED = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.empty_permuted)
"""Operators whose result has no values yet."""


@dataclass(frozen=True)
class _Operation:
    """An operation that read or made a tensor on the meta device; tensors on other devices are copied."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def reads(self) -> Iterator[Tensor]:
        return _on_meta((self.args, self.kwargs))

    @property
    def writes(self) -> Iterator[Tensor]:
        return _on_meta((self.result, written_values(self.function, self.args, self.kwargs)))


def run_recorded(constructor: Callable[[], _Built], dtype: torch.dtype) -> tuple[_Built, RecordedConstructor]:
    """Call a constructor on the meta device; return the built object, and the record that computes tensors of it.

    Args:
        dtype: the default dtype meanwhile.
    """
    record, before = RecordedConstructor(), torch.get_default_dtype()
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"), _PythonValues(record), record:
                return constructor(), record
        finally:
            torch.set_default_dtype(before)


class RecordedConstructor(TorchDispatchMode):
    """Records operations on the meta device while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._operations: list[_Operation] = []
        self.of_python: dict[int, tuple[Tensor, Tensor]] = {}
        """id of a tensor on the meta device -> this tensor, and the one with the values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run and record an operation; a number that code asks of a tensor is computed."""
        kwargs = kwargs or {}
        if packet(function) is aten._local_scalar_dense and args[0].is_meta:  # noqa: SLF001  the name of the operator of ``item()``
            value = self.value(args[0])
            if value is not None:
                return value.item()
        of_args, of_kwargs = (tree_map_only(Tensor, lambda leaf: leaf if leaf.is_meta else leaf.clone(), each) for each in (args, kwargs))
        result = function(*args, **kwargs)
        if next(_on_meta((args, kwargs, result)), None) is not None:
            self._operations.append(_Operation(function, of_args, of_kwargs, result))
        return result

    @torch.no_grad()
    def value(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor on the CPU with the values that a recorded one would have; None if they are random, or were never set."""
        if not tensor.is_meta:
            return tensor
        needed, operations = {_storage(tensor)}, list[_Operation]()
        for operation in reversed(self._operations):
            if any(_storage(each) in needed for each in operation.writes):
                operations.append(operation)
                needed |= {_storage(each) for each in operation.reads}
        if any(draws_random_numbers(operation.function) for operation in operations):
            return None
        computed = _Computed({key: (meta, real) for key, (meta, real) in self.of_python.items() if _storage(meta) in needed})
        for operation in reversed(operations):
            computed.run(operation)
        found = computed.of(tensor)
        return None if found is None or (found.is_floating_point() and bool(found.isnan().any())) else found


class _PythonValues(TorchFunctionMode):
    """Keeps the values of tensors that are made of values of Python or numpy."""

    def __init__(self, record: RecordedConstructor) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_on_meta = device is None or torch.device(device).type == "meta"
        if func not in _OF_PYTHON_VALUES or not is_on_meta or next(_on_meta((args, kwargs)), None) is not None:
            return func(*args, **kwargs)
        with no_dispatch_modes():
            real = func(*args, **{**kwargs, "device": "cpu"})
            meta = torch.empty_like(real, device="meta").requires_grad_(real.requires_grad)
            self._record.of_python[id(meta)] = meta, real.detach().clone()
        return meta


class _Computed:
    """The tensors of a record that have values.

    Args:
        known: id of a tensor on the meta device -> this tensor, and the one with the values.
    """

    def __init__(self, known: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._known = {key: (meta, real.clone()) for key, (meta, real) in known.items()}

    def run(self, operation: _Operation) -> None:
        """Compute an operation whose arguments have values; the result has none if they lack some."""
        args, kwargs = (tree_map_only(Tensor, self.of, each) for each in (operation.args, dict(operation.kwargs)))
        kwargs = {key: torch.device("cpu") if isinstance(value, torch.device) else value for key, value in kwargs.items()}
        if any(self.of(meta) is None for meta in operation.reads):
            return
        result = operation.function(*args, **kwargs)
        for meta, real in zip(tree_leaves(operation.result), tree_leaves(result), strict=True):
            if isinstance(meta, Tensor) and meta.is_meta:
                if packet(operation.function) in _UNINITIALIZED and (real.is_floating_point() or real.is_complex()):
                    real.fill_(float("nan"))
                self._known.setdefault(id(meta), (meta, real))

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor with the values of one on the meta device: itself, or the same memory where code took ``.data`` of it."""
        if not tensor.is_meta:
            return tensor
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        memory = _storage(tensor)
        alike = (real for meta, real in self._known.values() if _storage(meta) == memory and _is_laid_out_alike(meta, real))
        found = next((real for real in alike if real.dtype == tensor.dtype), None)
        return None if found is None else found.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_laid_out_alike(meta: Tensor, real: Tensor) -> bool:
    alike = (meta.stride(), meta.storage_offset()) == (real.stride(), real.storage_offset())
    return alike and meta.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def _on_meta(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among nested values that are on the meta device."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_meta)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
