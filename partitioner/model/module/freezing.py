"""Find parameters that were frozen, or unfrozen, after the model was partitioned.

frozen later        programs still compute the gradient; it is not added to ``.grad``
unfrozen later      the next step differentiates the same graph by this parameter, too: other programs, and no new trace
partly frozen       refused: the shards of one parameter must agree
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from passes.ir.errors import ConfigError
from passes.ir.mesh import rank_list

__all__ = ["Freezing"]


class Freezing:
    """Follows changes of ``requires_grad`` of the parameters of a model. Programs compute gradients for those that were ever trained."""

    def __init__(self, state: State, runtime: Runtime) -> None:
        self._state, self._runtime = state, runtime

    def check(self) -> None:
        """Find the parameters that were unfrozen since the last check. Every rank must call it before gradients are computed.

        A process sees the flags of the parameters that it holds. While parameters are frozen that not all processes hold, each step asks.

        Raises:
            ConfigError: only some shards of a parameter were frozen, or unfrozen.
        """
        gradients, stored = self._state.gradients, self._state.stored
        frozen = {name: each for each, name in self._state.graph.parameters.items() if name not in gradients.trained}
        unfrozen = {name for name, each in frozen.items() if any(one.parameter.requires_grad for one in stored[each])}
        if len(self._runtime.local_ranks) < self._runtime.n_ranks:
            unfrozen |= self._unfrozen_elsewhere(frozen, unfrozen)
        if unfrozen:
            gradients.trained |= unfrozen
        self._check_shards()

    def _unfrozen_elsewhere(self, frozen: dict[str, str], unfrozen: set[str]) -> set[str]:
        """Return those of the frozen parameters that other processes have unfrozen.

        Args:
            frozen: name -> placeholder, until now.
            unfrozen: those that this process has unfrozen.
        """
        (rank,) = self._runtime.local_ranks
        held_by: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in frozen:
            ranks = tuple(sorted(self._state.blocks_in_processes(name)))
            if len(ranks) < self._runtime.n_ranks:
                held_by[ranks].append(name)
        found = set[str]()
        for ranks, names in sorted(held_by.items()):
            own = _as_text(index for index, name in enumerate(names) if name in unfrozen) if rank in ranks else None
            agreed = self._runtime.agree(f"unfrozen parameters of {rank_list(ranks)}", own)
            found.update(names[index] for index in _from_text(agreed))
        return found

    def _check_shards(self) -> None:
        """Raise ConfigError if only some of the shards of a parameter in this process are frozen."""
        for shards in self._state.stored.values():
            if len(shards) > 1 and len({shard.parameter.requires_grad for shard in shards}) > 1:
                name = shards[0].name
                raise ConfigError(
                    f"{name} is stored in {len(shards)} parts on several devices, and only some of them are frozen",
                    remedy=f'freeze all: for key, p in pm.named_parameters(): if key == "{name}": p.requires_grad_(False)',
                )


def _as_text(indices: Iterable[int]) -> str:
    return " ".join(map(str, indices)) or "none"


def _from_text(text: str | None) -> list[int]:
    return [int(index) for index in (text or "").split() if index.isdigit()]
