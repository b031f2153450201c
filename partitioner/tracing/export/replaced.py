"""The names of torch that are replaced while a model is traced, and the one context that replaces them.

Calls of functions that torch dispatches to modes are not here: ``partitioner.tracing.export.watched_calls`` sees these without replacing
anything. A name is replaced where torch offers no other way; ``tests/partitioner/tracing/export/test_replaced.py`` has a test for each,
which fails without it.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from partitioner.tracing.autograd.checkpoints import with_marked_decisions
from partitioner.tracing.autograd.functions import apply_as_operator
from partitioner.tracing.autograd.hooks import enter_hooks, is_grad_enabled_for, leave_hooks
from partitioner.tracing.export.guards import bool_of_condition
from partitioner.tracing.export.known_values import KnownValues
from passes.ir.graph import Autocast
from passes.ir.torch_private import OngoingTrace


@dataclass(frozen=True)
class TraceRecord:
    """Records of one trace, which replacements write and read.

    Attributes:
        questions: what code of the model asked of the state of autograd.
        comparisons: symbols of sizes, and lines of the model that compare them with one.
        cpu_devices: types of devices whose autocast is that of the CPU: traced tensors are there.
        known_values: computes decisions by known values; None: nothing is known.
    """

    questions: set[str] = field(default_factory=set)
    comparisons: list[tuple[sympy.Symbol, str]] = field(default_factory=list)
    cpu_devices: tuple[str, ...] = ("meta",)
    known_values: KnownValues | None = None


@dataclass(frozen=True)
class Replaced:
    """A name of torch that is replaced while a model is traced.

    Attributes:
        name: dotted, from ``torch``.
        reason: what the replacement does.
        since: the first version of torch that has the name; 2.0 for older ones.
        without: what fails, or is wrong, without it.
        make: returns the replacement of an original; a function among them is called by the thread that traces alone.
    """

    name: str
    reason: str
    since: str
    without: str
    make: Callable[[Any, TraceRecord], Any]


def _autocast(original: Callable[..., None], record: TraceRecord) -> Callable[..., None]:
    def initialize(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type in record.cpu_devices else device_type, *args, **kwargs)

    return initialize


def _described_on_cpu(original: Callable[..., Any], _: TraceRecord) -> Callable[..., Any]:
    def describe_tensor(*args: Any, **kwargs: Any) -> Any:
        described = original(*args, **kwargs)
        return replace(described, device=torch.device("cpu")) if described.device.type == "meta" else described

    return describe_tensor


def _call_by_known_values(original: Callable[..., Any], record: TraceRecord) -> Callable[..., Any]:
    def proxy_call(mode: Any, function: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        known = record.known_values
        found = NotImplemented if known is None else known.result(function, args, kwargs, lambda: OngoingTrace(mode))
        return original(mode, function, pre_dispatch, args, kwargs) if found is NotImplemented else found

    return proxy_call


_FLEX = "torch.nn.attention.flex_attention"

REPLACED = (
    Replaced(
        "torch.SymBool.__bool__",
        "notes the line of the model that compares a size with one",
        "2.0",
        "torch assumes that an open batch has two rows or more, and no note says where one row is computed as several are",
        lambda original, record: bool_of_condition(original, record.comparisons),
    ),
    Replaced(
        "torch.autograd.graph.saved_tensors_hooks.__enter__",
        "ignores hooks of torch, begins a region of a checkpoint, and refuses hooks of other code",
        "2.0",
        "hooks that change saved tensors are forgotten, checkpoints are not marked, and nested ones have no gradients",
        lambda _, __: enter_hooks,
    ),
    Replaced(
        "torch.autograd.graph.saved_tensors_hooks.__exit__",
        "ends a region of a checkpoint",
        "2.0",
        "torch takes away a hook that was not set, and stops with an internal error",
        lambda _, __: leave_hooks,
    ),
    Replaced(
        "torch.is_grad_enabled",
        "notes that the model asks whether gradients are on",
        "2.0",
        "a model that computes something else without gradients has the program of the mode that it was traced in for both",
        lambda original, record: is_grad_enabled_for(original, record.questions),
    ),
    Replaced(
        "torch.utils.checkpoint._CachingTorchDispatchMode.__init__",
        "marks the values that a policy of selective checkpointing saves",
        "2.2",
        "the plan recomputes everything in a checkpoint",
        with_marked_decisions,
    ),
    Replaced(
        "torch.autograd.function._SingleLevelFunction.apply",
        "calls an operator for each custom autograd function, which looks up ``super().apply`` at each call",
        "2.0",
        "torch.export traces the forward and forgets the backward: gradients are wrong",
        lambda _, record: apply_as_operator(record.questions),
    ),
    Replaced(
        f"{_FLEX}._validate_device",
        "allows gradients on every device",
        "2.6",
        "FlexAttention in training is refused on the CPU",
        lambda _, __: lambda *_: None,
    ),
    Replaced(
        f"{_FLEX}.setup_compilation_env",
        "keeps the mode that records the levels of ``vmap``",
        "2.11",
        "a trace of FlexAttention fails",
        lambda _, __: contextlib.nullcontext,
    ),
    Replaced(
        f"{_FLEX}._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        "lets FlexAttention call its operator without Dynamo",
        "2.9",
        "a run on the meta device compiles FlexAttention, and fails: repeated modules are traced one by one",
        lambda _, __: True,
    ),
    Replaced(
        "torch._dynamo._trace_wrapped_higher_order_op.mod_index",
        "indexes by an operator in place of an autograd function",
        "2.6",
        "torch.export cannot write an autograd function inside a region of autocast or of ``torch.no_grad()``",
        lambda _, __: torch.ops.aten.index.Tensor,
    ),
    Replaced(
        "torch.nn.modules.transformer._detect_is_causal_mask",
        "takes a mask for causal where the call says so, ``is_causal=True``, in place of comparing its values",
        "2.1",
        "a transformer of torch.nn with a mask among its inputs cannot be traced",
        lambda _, __: lambda _mask, is_causal=None, _size=None: is_causal is True,
    ),
    Replaced(
        "torch.fx.experimental.proxy_tensor.proxy_call",
        "computes decisions by values that the trace knows",
        "2.0",
        "``if mask.all()`` of a constant mask cannot be traced",
        _call_by_known_values,
    ),
    Replaced(
        "torch.compiler._is_compiling_flag",
        "is true in runs on the meta device, too, as in an export",
        "2.3",
        "libraries call in these runs what an export does not, and repeated modules are traced one by one",
        lambda _, __: True,
    ),
    Replaced(
        "torch.autocast.__init__",
        "makes autocast for the meta device, and for the planned one, that of the CPU",
        "2.0",
        "``torch.autocast`` for CUDA casts nothing where there is none, and runs on the meta device fail: modules are traced one by one",
        _autocast,
    ),
    Replaced(
        "torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor",
        "traces tensors on the meta device as fake tensors on the CPU",
        "2.4",
        "``torch.tensor(values, device=x.device)`` in forward has no values on the meta device",
        _described_on_cpu,
    ),
)
"""Every name of torch that is replaced while a model is traced."""


def devices_as_cpu(autocast: Autocast | None) -> tuple[str, ...]:
    """Return the types of devices whose autocast is that of the CPU in a trace: meta, and that of the plan."""
    return ("meta",) if autocast is None or autocast.planned_for is None else ("meta", autocast.planned_for)


@contextlib.contextmanager
def replaced(record: TraceRecord, names: Collection[str] = tuple(each.name for each in REPLACED)) -> Iterator[None]:
    """While active, names of torch have their replacements, for calls of this thread.

    Args:
        names: of the entries that are applied; one in a module that is not imported is left out.
    """
    imported = frozenset(sys.modules)
    with contextlib.ExitStack() as stack:
        for entry in REPLACED:
            if entry.name in names and (owner := _owner(entry.name)) is not None:
                _replace(stack, owner, entry, record, imported)
        yield


def _owner(name: str) -> Any:
    """Return the object with a name; None if no code has imported FlexAttention, which has the name."""
    if name.startswith(_FLEX) and _FLEX not in sys.modules:
        return None
    return pkgutil.resolve_name(name.rpartition(".")[0])


def _replace(stack: contextlib.ExitStack, owner: Any, entry: Replaced, record: TraceRecord, imported: Collection[str]) -> None:
    """Replace one name until the stack closes."""
    name = entry.name.rpartition(".")[2]
    original, is_inherited = getattr(owner, name), name not in vars(owner)
    replacement = entry.make(original, record)
    if isinstance(replacement, types.FunctionType):
        replacement = _in_this_thread(replacement, original)
    setattr(owner, name, replacement)
    stack.callback(*((delattr, owner, name) if is_inherited else (setattr, owner, name, original)))
    stack.callback(_put_back, name, replacement, original, imported)


def _in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the original in other threads, and where Dynamo reads it, in the body of a loop or branch."""
    thread = threading.get_ident()

    @functools.wraps(replacement)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or threading.get_ident() != thread:
            return original(*args, **kwargs)
        return replacement(*args, **kwargs)

    return call


def _put_back(name: str, replacement: Any, original: Any, imported: Collection[str]) -> None:
    """Give a function to the modules that were imported meanwhile, and have its replacement by ``from ... import``."""
    for module in [sys.modules[each] for each in sys.modules.keys() - imported]:
        if vars(module).get(name) is replacement:
            setattr(module, name, original)
