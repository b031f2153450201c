"""The parameters and buffers of a module, and what has taken their places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from passes.ir.errors import ConfigError

__all__ = ["RegisteredTensors"]


@dataclass(frozen=True, eq=False)
class RegisteredTensors:
    """The parameters and buffers of a module, where they are registered.

    Attributes:
        places: the table of a module, the key there, the tensor, and its name.
    """

    places: tuple[tuple[dict[str, Any], str, Any, str], ...]

    @classmethod
    def of(cls, root: nn.Module) -> RegisteredTensors:
        """Return those of a module and its parts."""
        tables = [(part.__dict__[kind], path) for path, part in root.named_modules() for kind in ("_parameters", "_buffers")]
        return cls(tuple((table, key, tensor, f"{path}.{key}".lstrip(".")) for table, path in tables for key, tensor in dict.items(table)))

    def replaced(self) -> dict[str, Tensor]:
        """Return name -> the tensor that has taken the place of the registered one without ``setattr``, by ``functional_call`` say."""
        return {name: table[key] for table, key, tensor, name in self.places if table[key] is not tensor}

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Return a context in which the registered tensors are in their places."""
        others = [(table, key, table[key]) for table, key, tensor, _ in self.places if table[key] is not tensor]
        for table, key, tensor, _ in self.places:
            table[key] = tensor
        try:
            yield
        finally:
            for table, key, other in others:
                table[key] = other

    def refuse_replaced(self) -> None:
        """Raise ConfigError if a tensor was replaced."""
        for name in self.replaced():
            raise ConfigError(
                f"{name} was replaced, as torch.func.functional_call does: steps and compiled code read the model's own tensor",
                remedy="call pm(...) and .backward() with other tensors, without torch.compile; or copy them: pm.load_state_dict(values)",
            )
