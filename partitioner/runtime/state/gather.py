"""Assemble tensors of the model from the blocks that processes hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.part_gradient import plain

__all__ = ["GatheredState"]


class GatheredState:
    """Assembles tensors of the model; collective, so every rank must make the same calls."""

    def __init__(self, state: State, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime

    def tensors(self) -> dict[str, Tensor]:
        """Return every parameter and buffer of the original ``state_dict()``."""
        self._state.check_names()
        return self.whole(self._state.names)

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the named parameters and buffers, whole."""
        tensors = self._collect(names, Tensor.detach)
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the whole gradient of every parameter of the original ``named_parameters()``; None for one without."""
        return self._collect(self._state.parameter_names, lambda tensor: None if tensor.grad is None else plain(tensor.grad))

    def held(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors that this process holds, in the order of the original; those sharded over processes are assembled.

        Args:
            prefix: what their names begin with.
        """
        self._state.check_names()
        names = [name for name in self._state.names if name.startswith(prefix)]
        blocks_of = {name: self._state.held(name) for name in names}
        tensors = {name: blocks[0][1].detach() for name, blocks in blocks_of.items() if blocks and blocks[0][0].is_whole}
        tensors.update(self.whole(name for name in names if name not in tensors and self._state.is_cut(name)))
        return {name: tensors[name] for name in names if name in tensors}

    def _collect(self, names: Iterable[str], read: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor | None]:
        """Assemble tensors from the results of ``read`` for the blocks of each that processes own."""
        names = list(names)
        if not names:
            return {}
        owned = {key: read(tensor) for name in names for key, tensor in self._state.owned(name)}
        blocks = self._runtime.collect(owned)
        return {name: self._state.whole(name, blocks) for name in names}
