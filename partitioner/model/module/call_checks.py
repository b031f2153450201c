"""Check, before each call, what a user may have changed on the modules and parameters since the last one.

The common case is that nothing has changed: one pass over the parameters compares flags and identities, and calls no other function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from partitioner.runtime.base import Runtime
from partitioner.runtime.state.hooks import CALL_HOOKS, GLOBAL_HOOKS, refuse_global_hooks, refuse_hooks, refuse_parameter_hooks
from partitioner.runtime.state.parameters import State, check_values
from passes.ir.errors import ConfigError
from passes.ir.mesh import rank_list


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

    def refuse_replaced(self) -> None:
        """Raise ConfigError if a tensor has taken the place of a registered one without ``setattr``."""
        for table, key, tensor, name in self.places:
            if table[key] is not tensor:
                raise ConfigError(
                    f"{name} was replaced, as torch.func.functional_call does, and programs read the model's own tensor",
                    remedy="copy the values, pm.load_state_dict(values), or compile the model itself: "
                    'torch.compile(model, backend="partitioner") takes other tensors',
                )


class CallChecks:
    """Checks the modules and parameters of a partitioned model.

    Args:
        model: the partitioned model.
        places: of its parameters and buffers.
        state: the tensors of this process.
        runtime: its ranks.
    """

    def __init__(self, model: nn.Module, places: RegisteredTensors, state: State, runtime: Runtime) -> None:
        self._own, self._places, self._state = vars(model), places, state
        self._freezing = _Freezing(state, runtime)
        self._is_alone = len(runtime.local_ranks) == runtime.n_ranks
        self._parameters = tuple(parameter for _, parameter in state.named_parameters())
        self._has_values = False
        self._trained: list[bool] | None = None

    def before_call(self, *, tracked: bool) -> None:
        """Check what every call depends on: values, frozen parameters, hooks of all modules. Every rank must call it.

        Args:
            tracked: whether gradients are on.

        Raises:
            ConfigError: parameters are on the meta device; parts of one are frozen apart; or a hook is registered for all modules.
        """
        if not self._has_values:
            check_values(self._state)
            self._has_values = True
        if tracked:
            trained = [parameter.requires_grad for parameter in self._parameters]
            if not self._is_alone or trained != self._trained:
                self._freezing.check()
                self._trained = trained
        if any(GLOBAL_HOOKS):
            refuse_global_hooks()

    def before_step(self, model: nn.Module, *, in_no_sync: bool) -> None:
        """Check what a training step depends on.

        Raises:
            ConfigError: hooks of the model would not be called; a tensor was replaced; or a parameter has a hook that would get another
                gradient than on the original.
        """
        if any(self._own[name] for name in CALL_HOOKS):
            refuse_hooks(model, "train_step()")
        self._places.refuse_replaced()
        self.before_backward(in_no_sync=in_no_sync)

    def before_backward(self, *, in_no_sync: bool) -> None:
        """Check what a backward depends on: the hooks of parameters."""
        for parameter in self._parameters:
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:  # noqa: SLF001  as ``has_hooks``
                refuse_parameter_hooks(self._state.stored_parameters(), in_no_sync=in_no_sync)
                return


class _Freezing:
    """Finds parameters that were frozen, or unfrozen, after the model was partitioned.

    frozen later        programs still compute the gradient; it is not added to ``.grad``
    unfrozen later      the next step differentiates the same graph by this parameter, too: other programs, and no new trace
    partly frozen       refused: the shards of one parameter must agree
    """

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
