"""Log the PyTorch calls of a model on the meta device: numbers by value, tensors by their source.

    model(tokens)                              log of the model                     logs of the candidates
      x = embedding(tokens)                    embedding(tokens)
      x = blocks.0(x)                          blocks.0(embedding's result)         norm, linear, ... of input 0, own weights
      x = blocks.1(x)                          blocks.1(result of blocks.0)         norm, linear, ... of input 0, own weights
      norm(x)                                  norm(result of blocks.1)

Candidates are modules that may be copies of each other; a stand-in gives a result like that of one, without computing it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from partitioner.tracing.repeated.forms import attribute_snapshot, comparison_key, identity_key, layout_of
from partitioner.tracing.restore import preserve
from passes.ir.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_TYPES_OF_TENSORS = (torch.dtype, torch.device, torch.layout)
"""Results of questions that have one answer for all sizes of a tensor."""

Handler: TypeAlias = Callable[..., Any]
"""Called in place of a module's ``forward``: with the module's path, ``forward``, and its arguments."""


@dataclass(frozen=True)
class StandIn:
    """Gives a result like a module's, without computing it.

    Attributes:
        leaves: for each leaf of the result: ``("input", k)``, leaf k of the arguments; ``("like", k)``, a new tensor like it; or
            ``("value", v)``, the value v, no tensor.
        tree: the structure of the result.
    """

    leaves: tuple[tuple[str, Any], ...]
    tree: TreeSpec

    def __call__(self, arguments: Sequence[Any], template: Sequence[Any] = ()) -> list[Any]:
        """Return the leaves of the result for the leaves of the arguments.

        Args:
            template: leaves of the result of a module that computes the same; new tensors then have the strides of these.
        """
        leaves = []
        for place, (kind, source) in enumerate(self.leaves):
            if kind == "like":
                leaves.append(torch.clone(template[place]) if template else torch.clone(arguments[source], memory_format=_CONTIGUOUS))
            else:
                leaves.append(arguments[source] if kind == "input" else source)
        return leaves


_CONTIGUOUS = torch.contiguous_format


@contextlib.contextmanager
def intercept_calls(modules: Mapping[str, nn.Module], handler: Handler) -> Iterator[None]:
    """While active, route the calls of modules to a handler."""

    def routed(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: handler(path, forward, *args, **kwargs)

    for path, module in modules.items():
        module.forward = routed(path, module.forward)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


@dataclass
class _Log:
    """PyTorch calls, in order: of one candidate, or of the rest of the model.

    Attributes:
        entries: for each call, a key of its function, arguments, modes, and result.
        sources: id of a tensor -> its source: an argument, a parameter or buffer, (entry, leaf) of an earlier result, or, of what PyTorch
            makes unseen (``vmap`` does), the number of its first read.
        takes_unseen: whether a tensor without a source is given one, as in the rest of the model before it calls a candidate.
        reads_unknown: whether a call has read a tensor without a source.
        unseen: tensors that were given one, kept alive, so that their ids stay unique.
        objects: id of another object, such as a cache that each run makes anew -> its number, and the object; None: it is compared by
            identity, as copies must be given one object.
    """

    entries: list[Hashable] = field(default_factory=list)
    sources: dict[int, Hashable] = field(default_factory=dict)
    takes_unseen: bool = False
    reads_unknown: bool = False
    unseen: list[Tensor] = field(default_factory=list)
    objects: dict[int, tuple[int, Any]] | None = None

    def source_of(self, value: Any) -> Hashable:
        """Return the source of a tensor, and note if it has none; for another object, a key of its identity."""
        if not isinstance(value, Tensor):
            if callable(value) and isinstance(value, Hashable):
                return value
            return identity_key(value) if self.objects is None else self.objects.setdefault(id(value), (len(self.objects), value))[0]
        if id(value) not in self.sources and self.takes_unseen:
            self.sources[id(value)] = "unseen", len(self.unseen)
            self.unseen.append(value)
        self.reads_unknown |= id(value) not in self.sources
        return self.sources.get(id(value))

    def register_result(self, result: Any) -> Hashable:
        """Record the next entry as the source of the new tensors of its result; return a key of the result for that entry."""
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self.sources.setdefault(id(leaf), (len(self.entries), position))
        return comparison_key(result, self._result_key)

    def _result_key(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self.source_of(value), layout_of(value)
        return str(type(value))


@dataclass(frozen=True)
class Call:
    """One call of a candidate.

    Attributes:
        path: of the module.
        log: the entries of its log.
        key: equal for calls that do the same, of modules of one form; None if the module cannot be a copy.
        stand_in: gives a result like that of the call; None if that takes computing.
    """

    path: str
    log: tuple[Hashable, ...]
    key: Hashable
    stand_in: StandIn | None


class CallLogger(TorchFunctionMode):
    """Log every PyTorch call of a run: in the log of the candidate that makes it, else in ``outer``; ``stand_ins`` replace candidates."""

    def __init__(self, modules: Mapping[str, nn.Module], stand_ins: Mapping[str, StandIn]) -> None:
        super().__init__()
        self.outer = _Log(takes_unseen=True, objects={})
        self.calls: list[Call] = []
        self._around = _modes()
        self._log: _Log | None = self.outer  # None: calls are not logged
        self.modules = modules
        self._stand_ins = stand_ins
        self._alive: list[Any] = []  # keeps tensors alive, so that their ids stay unique

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        log = self._log
        if log is None:
            return func(*args, **(kwargs or {}))
        arguments = comparison_key((args, kwargs or {}), log.source_of)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, _TYPES_OF_TENSORS):
            return result  # asking computes nothing: later calls show the decisions that follow from it
        self._alive.append(result)
        log.entries.append((func, arguments, _modes(), log.register_result(result)))
        return result

    def call_module(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a candidate or its stand-in, as one entry of ``outer``; a candidate inside another one is an ordinary module."""
        if self._log is not self.outer:
            return forward(*args, **kwargs)
        self._log = None
        arguments, tree = tree_flatten((args, kwargs))
        entry = path, str(tree), comparison_key(arguments, self.outer.source_of)
        self.outer.takes_unseen = False
        stand_in, inner = self._stand_ins.get(path), _Log()
        if stand_in is None:
            result, inner = self._run_module(path, forward, args, kwargs)
        else:
            result = tree_unflatten(stand_in(arguments), stand_in.tree)
        self._alive.append((arguments, result))
        self.outer.entries.append((*entry, self.outer.register_result(result)))
        for tensor, source in inner.sources.items():  # what it left in a cache may be read: not that of a copy, which has a stand-in
            self.outer.sources.setdefault(tensor, ("inside", path, source))
        self._log = self.outer
        return result

    def _run_module(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, _Log]:
        """Run a candidate with a log of its own, and record the call in ``calls``; return its result and its log."""
        module = self.modules[path]
        arguments, tree = tree_flatten((args, kwargs))
        log, attributes, modes = _module_log(module, arguments), attribute_snapshot(module), _modes()
        layouts = tuple(layout_of(leaf) if isinstance(leaf, Tensor) else comparison_key(leaf, id) for leaf in arguments)
        self._log = log
        result = forward(*args, **kwargs)
        self._log = None
        changes_attributes = attribute_snapshot(module) != attributes
        changes_arguments = [*map(id, tree_leaves((args, kwargs)))] != [*map(id, arguments)]  # a list or dict among them
        leaves, result_tree = tree_flatten(result)
        stand_in = _stand_in(arguments, leaves, result_tree)
        key = None
        is_pure = not (changes_attributes or changes_arguments or log.reads_unknown)
        is_traced_in_place = modes == self._around  # and not in a graph of its own, as a region of other modes is
        if stand_in is not None and is_pure and is_traced_in_place and all(map(_has_value, arguments)):
            results = tuple(log.source_of(leaf) if isinstance(leaf, Tensor) else comparison_key(leaf, id) for leaf in leaves)
            key = str(tree), layouts, modes, tuple(log.entries), str(result_tree), results
        self.calls.append(Call(path, tuple(log.entries), key, stand_in))
        return result, log


def _module_log(module: nn.Module, arguments: Sequence[Any]) -> _Log:
    """Return an empty log that knows the tensors of the arguments by position, and parameters and buffers by name."""
    log = _Log()
    for position, leaf in enumerate(arguments):
        if isinstance(leaf, Tensor):
            log.sources.setdefault(id(leaf), ("input", position))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        log.sources[id(tensor)] = "state", name
    return log


def run_logged(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], logger: CallLogger, *, restored: bool = True
) -> CallLogger:
    """Run a model on the meta device under a logger, and return the logger; ``restored``: whether it has its attributes back then."""
    args, kwargs = tree_map_only(Tensor, _on_meta, (tuple(args), dict(kwargs)))
    state = dict((*model.named_parameters(), *model.named_buffers()))
    replaced = {name: _on_meta(tensor) for name, tensor in state.items() if tensor.device.type != "meta"}
    for name, tensor in (*enumerate(tree_leaves((args, kwargs))), *state.items(), *replaced.items()):
        logger.outer.sources[id(tensor)] = "given", name
    kept = preserve(model) if restored else contextlib.nullcontext()
    with kept, intercept_calls(logger.modules, logger.call_module), logger:
        result = torch.func.functional_call(model, replaced, args, dict(kwargs)) if replaced else model(*args, **kwargs)
    logger.outer.entries.append(logger.outer.register_result(result))
    return logger


def _on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor with the same layout on the meta device: the tensor itself if it is there."""
    if tensor.device.type == "meta":
        return tensor
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)


def _modes() -> Hashable:
    """Return the global state of PyTorch that decides what a call computes: grad and inference mode, default dtype, autocast."""
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast


def _stand_in(arguments: Sequence[Any], leaves: Sequence[Any], tree: TreeSpec) -> StandIn | None:
    """Return the stand-in for a call with these leaves of arguments and result; None if no stand-in gives such a result."""
    storages = [_storage_key(leaf) for leaf in arguments if isinstance(leaf, Tensor)]
    sources: list[tuple[str, Any]] = []
    for leaf in leaves:
        source = _leaf_source(leaf, arguments)
        if source is None:
            return None
        if source[0] == "like":  # a new tensor: its storage is neither an argument's nor another result's
            if _storage_key(leaf) in storages:
                return None
            storages.append(_storage_key(leaf))
        sources.append(source)
    return StandIn(tuple(sources), tree)


def _leaf_source(leaf: Any, arguments: Sequence[Any]) -> tuple[str, Any] | None:
    """Return an entry of ``StandIn.leaves`` for one leaf of a result; None if there is none."""
    if not isinstance(leaf, Tensor):
        return ("value", leaf) if _has_value(leaf) else None
    for position, argument in enumerate(arguments):
        if argument is leaf:
            return "input", position
    for position, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and _is_like(argument, leaf):
            return "like", position
    return None


def _storage_key(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _is_like(argument: Tensor, result: Tensor) -> bool:
    """Return whether a contiguous clone of an argument has the type, shape, and memory layout of a result."""
    fills_storage = result.untyped_storage().nbytes() == result.numel() * result.element_size()
    kinds = [(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in (argument, result)]
    return kinds[0] == kinds[1] and fills_storage and result.is_contiguous() and argument.is_floating_point()


def _has_value(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, or compares by value: no part of it is an object compared by identity."""
    objects: list[Any] = []
    comparison_key(leaf, objects.append)
    return isinstance(leaf, Tensor) or not objects
