"""Find the modules of a model that are copies of each other: of one class, with attributes of equal values.

    blocks.0   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.1   Block(heads=96, window=None), weights of (36864, 12288) ...      alike
    blocks.2   Block(heads=96, window=256), weights of (36864, 12288) ...       another form

Weights are compared by size and type, everything else by value; objects that hold something and do not compare by value are equal to
themselves alone.
Attributes in which such modules differ are left out of the comparison while they are not read (``unread_attributes.py``).

Such modules are candidates. The model runs on the meta device, which logs every PyTorch call with its arguments: numbers by value, tensors
by their source. Candidates of one form with equal logs are copies, and are traced once:

    model(tokens)                              log of the model                     logs of the blocks
      x = embedding(tokens)                    embedding(tokens)
      x = blocks.0(x)                          blocks.0(embedding's result)         norm, linear, ... of input 0, own weights
      x = blocks.1(x)                          blocks.1(result of blocks.0)         norm, linear, ... of input 0, own weights
      norm(x)                                  norm(result of blocks.1)

Then the model runs a second time, with stand-ins in place of all copies but one. If the rest of the model makes the same calls again, no
copy has a side effect that the rest reads. Copies do the same at other sizes, too: their code and attributes are equal, and a read of
anything else but arguments shows in the logs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from partitioner.tracing.inputs.ties import first_names
from partitioner.tracing.repeated.unread_attributes import Attribute, record_reads, recordable
from partitioner.tracing.restore import preserve
from passes.ir.torch_private import DisableTorchFunction, TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "LEAST_COPIES",
    "TRACED_ONE_BY_ONE",
    "TRACED_TO_COMPARE",
    "Copies",
    "StandIn",
    "calls_of",
    "find_copies",
    "intercept_calls",
    "words_of",
]

TRACED_ONE_BY_ONE = "modules that repeat are traced one by one, which takes longer"
"""Beginning of a note: no template is traced in place of its copies."""

TRACED_TO_COMPARE = "calls of the model are compared by tracing it again, which takes longer"
"""Beginning of a note: a run on the meta device does not show what the model computes."""

LEAST_COPIES = 3
"""The fewest copies that are worth finding: one of them is traced in any case."""

_REGISTERED = ("_parameters", "_buffers", "_modules")

_BASES = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types compared by ``==``; floats and complex numbers are compared by ``repr``, so that NaN equals NaN and 0.0 differs from -0.0."""

_VALUES = frozenset(_BASES)

_TYPES_OF_TENSORS = (torch.dtype, torch.device, torch.layout)
"""Results of questions that have one answer for all sizes of a tensor."""


class Forms:
    """Number the forms of modules: modules of equal class, attribute values, and tensor layouts have equal numbers.

    Args:
        unread: attributes whose values are not compared; None: no values are.
    """

    def __init__(self, unread: Collection[Attribute] | None = ()) -> None:
        self._unread = unread
        self._numbers: dict[Hashable, int] = {}

    def number(self, module: nn.Module, known: dict[nn.Module, int] | None = None) -> int:
        """Return the number of a module's form in its current state.

        Args:
            known: numbers of modules in this state; receives those of the module and of all modules in it.
        """
        known = {} if known is None else known
        if module not in known:
            known[module] = self._number(module, known)
        return known[module]

    def _number(self, module: nn.Module, known: dict[nn.Module, int]) -> int:
        attributes = {name: self._value(module, name) for name in vars(module) if name not in _REGISTERED}
        own_tensors = {**module._parameters, **module._buffers}  # noqa: SLF001  in contrast to named_parameters(), these include None
        tensors = [(name, None if tensor is None else layout_of(tensor)) for name, tensor in own_tensors.items()]
        children = [(name, None if child is None else self.number(child, known)) for name, child in module._modules.items()]  # noqa: SLF001
        form = type(module), comparison_key(attributes, _identity_key), tuple(tensors), tuple(children)
        return self._numbers.setdefault(form, len(self._numbers))

    def _value(self, module: nn.Module, name: str) -> Any:
        is_unread = self._unread is None or (type(module), name) in self._unread
        return None if is_unread else vars(module)[name]


def alike_modules(model: nn.Module, forms: Forms) -> dict[str, nn.Module]:
    """Return path -> module of the outermost modules whose form occurs ``LEAST_COPIES`` times or more, in the order of the model.

    Left out are modules without children, lists and dicts of modules (nothing calls them), and modules that contain a tied tensor or a
    shared submodule.
    """
    tied = [(name, first) for name, first in first_names(model).items() if name != first]  # two names of one tensor
    shared = {*itertools.chain(*tied), *_paths_of_shared_modules(model)}
    known: dict[nn.Module, int] = {}
    numbers = {path: forms.number(module, known) for path, module in model.named_modules() if path and any(module.children())}
    counts = Counter(numbers.values())
    alike: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path not in numbers or counts[numbers[path]] < LEAST_COPIES or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        is_nested = any(path.startswith(f"{outer}.") for outer in alike)
        if not is_nested and not any(name == path or name.startswith(f"{path}.") for name in shared):
            alike[path] = module
    return alike


def _differing_attributes(model: nn.Module) -> set[Attribute]:
    """Return the attributes whose values are the only difference of modules, as far as their reads can be recorded."""
    by_form: defaultdict[int, list[nn.Module]] = defaultdict(list)
    forms = Forms(unread=None)
    for module in alike_modules(model, forms).values():
        by_form[forms.number(module)].append(module)
    differing: set[Attribute] = set()
    for first, *others in by_form.values():
        for other in others:
            for one, another in zip(first.modules(), other.modules(), strict=True):
                differing |= {(type(one), name) for name in vars(one) if name not in _REGISTERED and not _is_equal(one, another, name)}
    return {(kind, name) for kind, name in differing if recordable(kind, name)}


def _is_equal(one: nn.Module, another: nn.Module, name: str) -> bool:
    return comparison_key(vars(one)[name], _identity_key) == comparison_key(vars(another)[name], _identity_key)


def comparison_key(value: Any, key_of_object: Callable[[Any], Hashable]) -> Hashable:
    """Return a key that is equal for equal values; containers are compared item by item.

    Args:
        key_of_object: gives the key of a tensor, and of an object that does not compare by value.
    """
    kind = type(value)
    if kind in _VALUES:
        return kind, value
    if isinstance(value, Tensor):
        return key_of_object(value)
    if isinstance(value, (tuple, list)):
        return kind, tuple([comparison_key(part, key_of_object) for part in value])
    if isinstance(value, (dict, Mapping)):  # to ask for dicts first takes a tenth of the time
        return kind, tuple([(comparison_key(key, key_of_object), comparison_key(part, key_of_object)) for key, part in value.items()])
    if isinstance(value, (float, complex)):
        return kind, repr(value)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset([comparison_key(part, key_of_object) for part in value])
    if isinstance(value, _BASES):
        return kind, value
    if isinstance(value, slice):
        return slice, comparison_key((value.start, value.stop, value.step), key_of_object)
    if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
        return kind, str(value.dtype), value.shape, value.tobytes()
    if type(value) is functools.partial:
        return functools.partial, comparison_key((value.func, value.args, value.keywords), key_of_object)
    return ("stateless", type(value)) if _is_stateless(value) else key_of_object(value)


class _Stateless:
    """Of the size of instances that hold nothing beside their ``__dict__``."""


def _is_stateless(value: object) -> bool:
    """Return whether an object holds nothing, no attributes, slots or parts written in C, so that all of its class do the same."""
    kind = type(value)
    return kind.__basicsize__ == _Stateless.__basicsize__ and kind.__itemsize__ == 0 and getattr(value, "__dict__", None) == {}


def layout_of(tensor: Tensor) -> Hashable:
    """Return all properties of a tensor that tracing can depend on."""
    with DisableTorchFunction():  # modes of functions would be asked for each
        strides = tensor.stride() if tensor.layout == torch.strided else None
        return type(tensor), tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad


def attribute_snapshot(module: nn.Module) -> list[Hashable]:
    """Return a key of all attributes of a module and its submodules, which changes when an attribute is replaced."""
    return [comparison_key(vars(submodule), _identity_key) for submodule in module.modules()]


def _identity_key(value: Any) -> Hashable:
    return "object", id(value)


def _paths_of_shared_modules(model: nn.Module) -> set[str]:
    """Return every path of each module that has more than one path."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    return {path for same_module in paths.values() if len(same_module) > 1 for path in same_module}


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


@dataclass(frozen=True)
class Copies:
    """Modules that compute the same, each with its own weights.

    Attributes:
        template: path of the module that is traced.
        others: paths of the modules whose graph is copied from the template's.
        stand_in: gives a result like that of each of them.
        unread: attributes in which they may differ, since they were not read.
    """

    template: str
    others: tuple[str, ...]
    stand_in: StandIn
    unread: frozenset[Attribute]


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


def calls_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: list[str]) -> Hashable | None:
    """Return all PyTorch calls of a model on the meta device, equal for equal calls in the same order; None if they cannot be compared.

    The model keeps what it changes in its attributes.

    Args:
        notes: gets the reason why they cannot be compared.
    """
    try:
        log = _run(model, args, kwargs, _CallLogger({}, stand_ins={}), restored=False).outer
    except Exception as error:  # noqa: BLE001  a model that reads values, or cannot run on the meta device
        notes.append(f"{TRACED_TO_COMPARE}: {words_of(error)}")
        return None
    if log.unseen:
        notes.append(f"{TRACED_TO_COMPARE}: PyTorch makes tensors in calls that are not seen")
        return None
    return tuple(log.entries)


def find_copies(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], notes: list[str]) -> tuple[Copies, ...]:
    """Return the modules of a model that compute the same; none unless a second run, with stand-ins, confirms all of them.

    Args:
        notes: gets the reason why copies are not looked for, or are not used.
    """
    return _find_copies(model, args, kwargs, frozenset(_differing_attributes(model)), notes)


def _find_copies(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], unread: frozenset[Attribute], notes: list[str]
) -> tuple[Copies, ...]:
    """Find copies that may differ in some attributes; those that are read are compared after all."""
    forms = Forms(unread)
    modules = alike_modules(model, forms)
    if len(modules) < LEAST_COPIES or any("forward" in vars(module) for module in modules.values()):
        return ()
    try:
        with record_reads(unread) as read:
            first = _run(model, args, kwargs, _CallLogger(modules, stand_ins={}))
        if read:
            unread, forms = unread - read, Forms(unread - read)
            if not alike_modules(model, forms).keys() <= modules.keys():  # others, inside some of these
                return _find_copies(model, args, kwargs, unread, notes)
        copies = _copies(first, forms, unread)
        if not copies:
            return ()
        stand_ins = {path: group.stand_in for group in copies for path in group.others}
        second = _run(model, args, kwargs, _CallLogger(modules, stand_ins))
    except Exception as error:  # noqa: BLE001  a model that reads values, or cannot run on the meta device, is traced whole
        notes.append(f"{TRACED_ONE_BY_ONE}: {words_of(error)}")
        return ()
    expected = [(call.path, call.log) for call in first.calls if call.path not in stand_ins]
    is_same = second.outer.entries == first.outer.entries and expected == [(call.path, call.log) for call in second.calls]
    if is_same and not second.outer.reads_unknown:
        return copies
    notes.append(f"{TRACED_ONE_BY_ONE}: the rest of the model calls something else where {copies[0].others[0]} does not run")
    return ()


def words_of(error: Exception) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


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
            return _identity_key(value) if self.objects is None else self.objects.setdefault(id(value), (len(self.objects), value))[0]
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
class _Call:
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


class _CallLogger(TorchFunctionMode):
    """Log every PyTorch call of a run: in the log of the candidate that makes it, else in ``outer``; ``stand_ins`` replace candidates."""

    def __init__(self, modules: Mapping[str, nn.Module], stand_ins: Mapping[str, StandIn]) -> None:
        super().__init__()
        self.outer = _Log(takes_unseen=True, objects={})
        self.calls: list[_Call] = []
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
        self.calls.append(_Call(path, tuple(log.entries), key, stand_in))
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


def _run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], logger: _CallLogger, *, restored: bool = True) -> _CallLogger:
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


def _copies(run: _CallLogger, forms: Forms, unread: frozenset[Attribute]) -> tuple[Copies, ...]:
    """Group the modules that are called once by their forms and the keys of their calls; return groups of ``LEAST_COPIES`` or more."""
    n_calls = Counter(call.path for call in run.calls)
    alike: defaultdict[Hashable, list[_Call]] = defaultdict(list)
    for call in run.calls:
        if call.key is not None and n_calls[call.path] == 1:
            alike[forms.number(run.modules[call.path]), call.key].append(call)
    copies = []
    for template, *others in alike.values():
        if len(others) + 1 >= LEAST_COPIES and template.stand_in is not None:
            copies.append(Copies(template.path, tuple(other.path for other in others), template.stand_in, unread))
    return tuple(copies)


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
