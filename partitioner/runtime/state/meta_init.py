"""Initialize a model on the meta device, one module at a time, so that no process ever holds the whole.

    for every module, children first, as ``model.apply(init_fn)`` goes:

    meta weight ──> real weight, whole ──> init_fn(module) ──> each rank copies its block ──> meta weight again

Every process draws the same random numbers for every module, so the values are those of one device, wherever blocks are held. Memory is
that of one module's own tensors. A function that uses tensors of other modules (``MultiheadAttention`` sets a bias of its projection) is
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

InitFunction = Callable[[nn.Module], object]
"""A function for ``nn.Module.apply`` that sets the parameters and buffers of one module, and perhaps of its children."""


def seed_text(seed: int | None) -> str:
    """Return the seed as text, or a digest of the current random state if there is none, for comparison between ranks."""
    state = bytes(torch.random.get_rng_state().tolist())
    return str(seed) if seed is not None else f"state {hashlib.sha256(state).hexdigest()[:8]}"


def initialize(model: nn.Module, state: State, gathered: GatheredState, init_fn: InitFunction | None, seed: int | None) -> None:
    """Set the tensors of all processes to the values that ``init_fn`` gives the model. Every rank must call it.

    Args:
        model: on the meta device; it is there again afterwards.
        state: of this process.
        gathered: assembles tensors from all processes.
        init_fn: called with every module; None: ``reset_parameters()`` of each.
        seed: for ``torch.manual_seed``; the random state is restored. None: continue from the current state, equal on all ranks.

    Raises:
        ConfigError: names tensors that get no value.
    """
    function = _reset_parameters if init_fn is None else _with_module_in_errors(init_fn)
    state.complete()  # as on the CPU, where a function finds what the constructors computed
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


def _reset_parameters(module: nn.Module) -> None:
    """Call ``reset_parameters``, or ``_reset_parameters`` as some of torch's modules name it."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()


def _with_module_in_errors(init_fn: InitFunction) -> InitFunction:
    """Wrap a function so that its errors name the class of the module."""

    def wrapped(module: nn.Module) -> Any:
        try:
            return init_fn(module)
        except (PartitionError, _ReachedError):
            raise
        except Exception as error:
            problem = f"init_fn failed for a {type(module).__name__}: {type(error).__name__}: {error}"
            raise ConfigError(problem, remedy="pass a function of one module, as model.apply takes it") from error

    return wrapped


class _ReachedError(Exception):
    """A function uses tensors, by name, that are still on the meta device."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        super().__init__(", ".join(sorted(names)))


class _TensorUses(TorchFunctionMode):
    """Records the real tensors of a model that are used, and raises ``_ReachedError`` for those on the meta device.

    Args:
        meta: id of tensor on the meta device -> name.
        real: id of real tensor -> name.
    """

    def __init__(self, meta: dict[int, str], real: dict[int, str]) -> None:
        super().__init__()
        self.meta = meta
        self.real = real
        self.used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        arguments = (*args, *(kwargs or {}).values())
        ids = [id(leaf) for value in arguments for leaf in (value if isinstance(value, list | tuple) else (value,))]
        if func not in _METADATA_FUNCTIONS:
            reached = {self.meta[key] for key in ids if key in self.meta}
            if reached:
                raise _ReachedError(reached)
            self.used |= {self.real[key] for key in ids if key in self.real}
        return func(*args, **(kwargs or {}))


_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "is_meta", "ndim", "is_leaf", "grad", "grad_fn", "layout", "is_sparse")
_METADATA_FUNCTIONS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.__len__, Tensor.__hash__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.requires_grad_),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
"""Functions that read no values, and may be called with tensors on the meta device."""


class _Initializer:
    """Initializes one module after another."""

    def __init__(self, model: nn.Module, state: State, gathered: GatheredState) -> None:
        self._state = state
        self._gathered = gathered
        # Name -> every dict of a module that holds the tensor, and its key there; tied tensors have several.
        self._places: defaultdict[str, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        self._meta: dict[str, Tensor] = {}
        self._initialized: set[str] = set()
        first_names: dict[int, str] = {}
        for path, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):  # noqa: SLF001  the one place where modules keep both
                for key, tensor in tensors.items():
                    if tensor is not None:
                        name = first_names.setdefault(id(tensor), f"{path}.{key}" if path else key)
                        self._places[name].append((tensors, key))
                        self._meta[name] = tensor
        self._known = {name for name in self._meta if state.knows(name)}
        buffers = {name for name in self._known if name in state.graph.buffers.values()}
        self._initialized |= {
            name for name in buffers if not self._meta[name].is_meta or isinstance(state.constructed.buffer(name), Tensor)
        }
        state.constructed.built.clear()

    def call(self, function: InitFunction, module: nn.Module) -> None:
        """Call the function with a module whose own tensors are real; again with more real tensors if it needs them."""
        own = {id(tensors) for tensors in (module._parameters, module._buffers)}  # noqa: SLF001
        names = {name for name, places in self._places.items() if any(id(tensors) in own for tensors, _ in places)}
        while True:
            start = torch.random.get_rng_state()
            with self._make_real(names) as real:
                try:
                    meta = {id(self._meta[name]): name for name in self._meta.keys() - names}
                    with _TensorUses(meta, {id(tensor): name for name, tensor in real.items()}) as uses:
                        function(module)
                except _ReachedError as reached:
                    torch.random.set_rng_state(start)
                    names |= reached.names
                    continue
                self._store(real, uses.used)
                return

    def unset(self) -> list[str]:
        """Return the names of tensors that have got no value."""
        return [name for name in self._meta if name in self._known and name not in self._initialized]

    @contextlib.contextmanager
    def _make_real(self, names: Collection[str]) -> Iterator[dict[str, Tensor]]:
        """Replace the named tensors by real ones for the time of the context: with their values, or NaN if they have none yet."""
        values = self._gathered.whole(name for name in self._meta if name in names and name in self._initialized & self._known)
        real: dict[str, Tensor] = {}
        for name in names:
            like = self._meta[name]
            value = values[name].cpu() if name in values else _nan_like(like)
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

    def _store(self, real: dict[str, Tensor], used: Collection[str]) -> None:
        """Copy into the blocks of this process the ``real`` tensors that the function has used, or replaced in its module."""
        for name, before in real.items():
            current = [tensors[key] for tensors, key in self._places[name]]
            after = next((tensor for tensor in current if tensor is not before), before)
            if any(tensor is not after for tensor in current):
                raise ConfigError(f"init_fn gave {name} a tensor of its own in one of its modules: it is tied", remedy="set it in place")
            if after.shape != before.shape:
                raise ConfigError(f"init_fn made {name} of shape {tuple(after.shape)}; the model has {tuple(before.shape)}")
            is_set = (after is not before or name in used) and not _has_nan(after)
            if is_set:
                self._initialized.add(name)
                if name in self._known:
                    self._state.set(name, after.detach())


def _nan_like(like: Tensor) -> Tensor:
    """Return a real tensor of NaN, which marks missing values; of zeros if the dtype has no NaN."""
    zeros = torch.zeros(like.shape, dtype=like.dtype)
    return zeros.fill_(float("nan")) if like.is_floating_point() or like.is_complex() else zeros


def _has_nan(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isnan().any())
