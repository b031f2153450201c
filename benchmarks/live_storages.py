"""Memory that a run really takes: every storage that operators make is counted, for as long as it is there."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.ir.torch_private import TorchDispatchMode, tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of what operators make, from when a storage is made to when nothing holds it; what was there before is not counted.

    Tensors on the meta device have no memory.

    Attributes:
        rank: the running rank, where several ranks run in one process.
        peaks: rank -> the most bytes that it held.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.rank = 0
        self.peaks: defaultdict[int, int] = defaultdict(int)
        self._held: defaultdict[int, int] = defaultdict(int)
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run an operator, and count what it makes: a result that shares memory with an argument is not counted."""
        given = tree_leaves((args, kwargs))
        before = {_key(leaf.untyped_storage()) for leaf in given if isinstance(leaf, Tensor)}
        before |= {_key(leaf) for leaf in given if isinstance(leaf, torch.UntypedStorage)}  # of a file that is mapped into memory
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._count(leaf.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key = _key(storage)
        if key in self._seen or key in before:
            return
        self._seen.add(key)
        self._held[self.rank] += storage.nbytes()
        self.peaks[self.rank] = max(self.peaks[self.rank], self._held[self.rank])
        weakref.finalize(storage, self._free, key, self.rank, storage.nbytes())

    def _free(self, key: int, rank: int, size: int) -> None:
        self._seen.discard(key)
        self._held[rank] -= size


def _key(storage: torch.UntypedStorage) -> int:
    key: int = storage._cdata  # noqa: SLF001  data_ptr is equal for storages without bytes
    return key


def held() -> int:
    """Return the bytes of all storages of plain tensors and parameters that Python can reach."""
    storages: dict[int, int] = {}
    for tensor in [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and not each.is_meta]:
        with contextlib.suppress(NotImplementedError):  # of vmap's tensors, which have no storage
            storages[_key(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak bytes of a call, its result included."""
    with LiveStorages() as counter:
        call()
    most: int = counter.peaks[0]
    return most
