"""Give a model on the meta device its values, one module at a time: no process ever holds the whole.

    for every module, children first, as ``model.apply(init_fn)`` goes:

    meta weight ──> real weight, whole ──> init_fn(module) ──> each rank copies its block ──> meta weight again

Every process draws the same random numbers for every module, so the values are those of one device, wherever blocks are held. Memory is
that of one module's own tensors. Where a function reaches into other modules (``MultiheadAttention`` sets a bias of its projection), it is
called again with these made real, too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partitioner.runtime.state.gather import GatheredState
from partitioner.runtime.state.parameters import State
from passes.ir.errors import ConfigError, PartitionError, first_few

__all__ = ["InitFunction", "initialize", "seed_text"]

InitFunction = Callable[[nn.Module], object]
"""Sets the parameters and buffers of one module, given alone or with its children: what ``nn.Module.apply`` takes."""


def seed_text(seed: int | None) -> str:
    """The seed, or what stands for the present random state: equal where that is equal."""
    state = bytes(torch.random.get_rng_state().tolist())
    return str(seed) if seed is not None else f"state {hashlib.sha256(state).hexdigest()[:8]}"


def initialize(model: nn.Module, state: State, gathered: GatheredState, init_fn: InitFunction | None, seed: int | None) -> None:
    """Set everything that processes hold to what ``init_fn`` makes of the model. Every rank must call it.

    Args:
        model: on the meta device; it is there again afterwards.
        state: what this process holds.
        gathered: reads what all processes hold.
        init_fn: called with every module. None: ``reset_parameters()`` of each.
        seed: for ``torch.manual_seed``; the random state is put back. None: goes on from the present state, equal on all ranks.

    Raises:
        ConfigError: something is left without a value, by name.
    """
    function = _reset if init_fn is None else _named(init_fn)
    initializer = _Initializer(model, state, gathered)
    with torch.random.fork_rng(devices=(), enabled=seed is not None):
        if seed is not None:
            torch.random.manual_seed(seed)
        model.apply(lambda module: initializer.call(function, module))
    unset = initializer.unset()
    if unset:
        what = "init_fn" if init_fn is not None else "reset_parameters()"
        raise ConfigError(
            f"{what} gave no value to {first_few(unset)}",
            remedy="let init_fn(module) set all parameters and buffers of its module, also those that a constructor computes; "
            "pm.initialize(init_fn), or pm.load_state_dict(...)",
        )


def _reset(module: nn.Module) -> None:
    """As a constructor does it. Some of torch's own modules have the method with an underscore."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()


def _named(init_fn: InitFunction) -> InitFunction:
    """The function, whose errors name the module that it was called with."""

    def called(module: nn.Module) -> Any:
        try:
            return init_fn(module)
        except (PartitionError, _ReachedError):
            raise
        except Exception as error:
            problem = f"init_fn failed for a {type(module).__name__}: {type(error).__name__}: {error}"
            raise ConfigError(problem, remedy="pass a function of one module, as model.apply takes it") from error

    return called


class _ReachedError(Exception):
    """A function reads or writes tensors that are not real yet."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        super().__init__(", ".join(sorted(names)))


class _Watch(TorchFunctionMode):
    """Sees which tensors of a model functions are called with.

    Args:
        meta: identity -> name, of those that are not real.
        real: the same of those that are.
    """

    def __init__(self, meta: dict[int, str], real: dict[int, str]) -> None:
        super().__init__()
        self.meta = meta
        self.real = real
        self.used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = [leaf for value in (*args, *(kwargs or {}).values()) for leaf in (value if isinstance(value, list | tuple) else (value,))]
        if func not in _ASKS_NO_VALUES:
            reached = {self.meta[id(value)] for value in given if id(value) in self.meta}
            if reached:
                raise _ReachedError(reached)
            self.used |= {self.real[id(value)] for value in given if id(value) in self.real}
        return func(*args, **(kwargs or {}))


_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "is_meta", "ndim", "is_leaf", "grad", "grad_fn", "layout", "is_sparse")
_ASKS_NO_VALUES = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.__len__, Tensor.__hash__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.requires_grad_),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
"""What may be called with a tensor that is not real: it asks for its shape and the like."""


class _Initializer:
    """Calls a function with module after module."""

    def __init__(self, model: nn.Module, state: State, gathered: GatheredState) -> None:
        self._state = state
        self._gathered = gathered
        self._places: defaultdict[str, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        self._meta: dict[str, Tensor] = {}
        self._done: set[str] = set()
        first_names: dict[int, str] = {}
        for path, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):  # noqa: SLF001  the one place where modules keep both
                for key, tensor in tensors.items():
                    if tensor is not None:
                        name = first_names.setdefault(id(tensor), f"{path}.{key}" if path else key)
                        self._places[name].append((tensors, key))
                        self._meta[name] = tensor
        self._names = {name for name in self._meta if state.knows(name)}

    def call(self, function: InitFunction, module: nn.Module) -> None:
        """Call the function once with a module whose own tensors are real."""
        own = {id(tensors) for tensors in (module._parameters, module._buffers)}  # noqa: SLF001
        names = {name for name, places in self._places.items() if any(id(tensors) in own for tensors, _ in places)}
        while True:
            start = torch.random.get_rng_state()
            with self._real(names) as real:
                try:
                    meta = {id(self._meta[name]): name for name in self._meta.keys() - names}
                    with _Watch(meta, {id(tensor): name for name, tensor in real.items()}) as watch:
                        function(module)
                except _ReachedError as reached:
                    torch.random.set_rng_state(start)
                    names |= reached.names
                    continue
                self._keep(real, watch.used)
                return

    def unset(self) -> list[str]:
        """The tensors of the model that have no value."""
        return [name for name in self._meta if name in self._names and name not in self._done]

    @contextlib.contextmanager
    def _real(self, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
        """Put real tensors in the places of the named ones: with their values, or filled with what no function leaves there."""
        values = self._gathered.whole(name for name in self._meta if name in names and name in self._done & self._names)
        real: dict[str, Tensor] = {}
        for name in names:
            like = self._meta[name]
            value = values[name].cpu() if name in values else _without_values(like)
            real[name] = nn.Parameter(value, requires_grad=like.requires_grad) if isinstance(like, nn.Parameter) else value
        try:
            for name, tensor in real.items():
                for tensors, key in self._places[name]:
                    tensors[key] = tensor
            yield real
        finally:
            for name in names:
                for tensors, key in self._places[name]:
                    tensors[key] = self._meta[name]

    def _keep(self, real: dict[str, Tensor], used: Collection[str]) -> None:
        """Copy what the function made into the blocks that this process holds."""
        for name, given in real.items():
            found = [tensors[key] for tensors, key in self._places[name]]
            made = next((tensor for tensor in found if tensor is not given), given)
            if any(tensor is not made for tensor in found):
                raise ConfigError(f"init_fn gave {name} a tensor of its own in one of its modules: it is tied", remedy="set it in place")
            if made.shape != given.shape:
                raise ConfigError(f"init_fn made {name} of shape {tuple(made.shape)}; the model has {tuple(given.shape)}")
            is_set = (made is not given or name in used) and not _lacks_values(made)
            if is_set:
                self._done.add(name)
                if name in self._names:
                    self._state.set(name, made.detach())


def _without_values(like: Tensor) -> Tensor:
    """A real tensor that can be told from one with values, if its dtype has room for that."""
    empty = torch.zeros(like.shape, dtype=like.dtype)
    return empty.fill_(float("nan")) if like.is_floating_point() or like.is_complex() else empty


def _lacks_values(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any())
