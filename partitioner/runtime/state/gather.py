"""The tensors of the model, put together from the blocks that processes hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.part_gradient import plain

__all__ = ["GatheredState"]


class GatheredState:
    """Reads what all processes hold: every rank must ask alike."""

    def __init__(self, state: State, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer of the original ``state_dict()``."""
        self._state.check_names()
        return self.whole(self._state.names)

    def whole(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The named parameters and buffers."""
        found = self._collect(names, Tensor.detach)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter of the original ``named_parameters()``; None where there is none."""
        return self._collect(self._state.parameter_names, lambda held: None if held.grad is None else plain(held.grad))

    def held(self) -> dict[str, Tensor]:
        """What this process holds, in the order of the original; what is cut over processes is put together."""
        self._state.check_names()
        whole = {name: blocks for name in self._state.names if (blocks := self._state.held(name)) and blocks[0][0].is_whole}
        held = {name: blocks[0][1].detach() for name, blocks in whole.items()}
        cut = [name for name in self._state.names if name not in whole and self._state.is_cut(name)]
        held.update({name: tensor for name, tensor in self._collect(cut, Tensor.detach).items() if tensor is not None} if cut else {})
        return {name: held[name] for name in self._state.names if name in held}

    def _collect(self, names: Iterable[str], part: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor | None]:
        """Tensors of the model put together from what all processes own of each."""
        names = list(names)
        if not names:
            return {}
        owned = {key: part(tensor) for name in names for key, tensor in self._state.owned(name)}
        found = self._runtime.collect(owned)
        return {name: self._state.whole(name, found) for name in names}
