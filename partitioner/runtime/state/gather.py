"""Assemble tensors of the model from the blocks that processes hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from partitioner.runtime.state.part_gradient import plain


class GatheredState:
    """Assembles tensors of the model; collective, so every rank must make the same calls."""

    def __init__(self, state: State, runtime: Runtime) -> None:
        self._state = state
        self.runtime = runtime

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

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Return the tensors as ``tensors`` does, without communication for those that every process holds whole.

        Args:
            prefix: what their names begin with.
        """
        self._state.check_names()
        names = [name for name in self._state.names if name.startswith(prefix)]
        held = {name: self._state.held(name)[0][1].detach() for name in names if self._state.is_whole_everywhere(name)}
        gathered = self.whole(name for name in names if name not in held)
        return {name: tensor for name in names if (tensor := held.get(name, gathered.get(name))) is not None}

    def _collect(self, names: Iterable[str], read: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor | None]:
        """Assemble tensors from the results of ``read`` for the blocks of each that processes own; tied names have one tensor."""
        first_name_of = {name: self._state.first_name(name) for name in names}
        if not first_name_of:
            return {}
        first_names = list(dict.fromkeys(first_name_of.values()))
        owned = {key: read(tensor) for name in first_names for key, tensor in self._state.owned(name)}
        blocks = self.runtime.collect(owned)
        assembled = {name: self._state.whole(name, blocks) for name in first_names}
        return {name: assembled[first] for name, first in first_name_of.items()}


def separated(tensors: Mapping[str, Tensor], held: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the tensors, contiguous and each with memory of its own: not that of another (tied parameters), nor of a held one."""
    result: dict[str, Tensor] = {}
    seen = {tensor.untyped_storage().data_ptr() for tensor in held}
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()  # noqa: PLW2901
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return result
