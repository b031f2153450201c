"""Parameters whose ``requires_grad`` changes after the model was partitioned.

frozen later        its gradient is computed, which the program does for all, and left out of ``.grad``
unfrozen later      no program computes its gradient: refused
frozen in part      parts of one parameter that lie on several devices: refused
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from passes.ir.errors import ConfigError

__all__ = ["Freezing"]


class Freezing:
    """Remembers what was frozen when the model was partitioned.

    Args:
        parameters: of this process; parts of one parameter have the same name.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        parts: defaultdict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in parameters:
            parts[name].append(parameter)
        self._frozen = [(name, parameter) for name, same in parts.items() for parameter in same if not parameter.requires_grad]
        self._parts = [(name, same) for name, same in parts.items() if len(same) > 1]

    def check(self) -> None:
        """Before gradients are computed.

        Raises:
            ConfigError: a parameter was unfrozen, or only some of its parts were frozen.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when the model was partitioned, and requires a gradient now: no program computes one",
                    remedy="call requires_grad_() on the model's parameter and partition it again",
                )
        for name, same in self._parts:
            if len({parameter.requires_grad for parameter in same}) > 1:
                raise ConfigError(
                    f"{name} lies in {len(same)} parts on several devices, and only some of them are frozen",
                    remedy=f'freeze all: for key, p in pm.named_parameters(): if key == "{name}": p.requires_grad_(False)',
                )
