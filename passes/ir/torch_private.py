"""The private names of torch that these packages use, each with the reason: the one file to change when torch changes.

Nothing else imports from a private module of torch or from ``torch.fx.experimental``; a test imports this file and calls all names.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher  # runs composite operations on fake tensors without fixing symbolic sizes
from torch._ops import HigherOrderOperator, OpOverload  # types of the operations of a traced graph; torch.ops holds their instances only
from torch._subclasses.fake_tensor import FakeTensorMode  # runs a loss, a graph or a call on shapes alone
from torch.autograd import forward_ad  # says whether a level of forward-mode differentiation is entered
from torch.distributed import Store  # type: ignore[attr-defined]  # its stub lacks what it has
from torch.fx._lazy_graph_module import _LazyGraphModule as TorchLazyGraphModule  # writes its Python when it is called
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (  # records what autograd and vmap dispatch as a graph, and changes of modes
    PreDispatchTorchFunctionMode,
    get_proxy_mode,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # makes sizes that are open
from torch.utils import _pytree  # the structure of arguments and results as torch.export has it
from torch.utils._python_dispatch import TorchDispatchMode  # sees what operations cast below autocast, and every storage they make
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes  # a trace within a trace
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ModularIndexing  # how symbolic sizes spell these functions
from torch.utils._sympy.numbers import int_oo  # no upper end of a range of sizes
from torch.utils._sympy.value_ranges import ValueRanges  # the sizes that a symbol stands for

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensorMode",
    "FloorDiv",
    "HigherOrderOperator",
    "Max",
    "Min",
    "Mod",
    "ModularIndexing",
    "OngoingTrace",
    "OpOverload",
    "RecordKind",
    "TorchDispatchMode",
    "TorchLazyGraphModule",
    "TreeSpec",
    "dynamo_source",
    "enable_python_dispatcher",
    "flash_attention",
    "flash_attention_gradients",
    "foreach_add_",
    "foreach_copy_",
    "foreach_norm",
    "forward_ad_level",
    "graph_break",
    "has_tangent",
    "indexing_by_tensors",
    "is_profiling",
    "is_resumed",
    "is_transformed",
    "is_view",
    "is_wrapped",
    "last_traced_node",
    "make_fx",
    "no_dispatch_modes",
    "no_rules",
    "open_size",
    "outside_of_autocast",
    "process_group",
    "pytree",
    "records_as_dicts",
    "registered_operators",
    "running_ddp",
    "set_grad_mode",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
    "use_lazy_graph_module",
    "version_of",
    "will_run",
    "with_records",
    "without_saved_tensors_hooks",
]

aten = torch.ops.aten

T = TypeVar("T")

DisableTorchFunction = torch._C.DisableTorchFunction
"""Hides from a trace that autocast or the mode of gradients changes inside, which it would record through a mode of functions."""

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Calls functions on the plain tensors of a subclass, as in torch's guide to subclasses."""

foreach_add_ = torch._foreach_add_
"""Adds to many tensors in one call, as ``torch.optim`` does."""

is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]  # of the C extension
"""Whether a profiler is active in this thread: ``torch.profiler.record_function`` costs 10 to 100 microseconds without one, too."""

foreach_copy_ = torch._foreach_copy_
"""Copy each tensor of a list into the one in the same place of another: every step does, and one call for each would cost more."""

foreach_norm = torch._foreach_norm
"""Called by ``torch.nn.utils.clip_grad_norm_`` for tensors on an accelerator; a subclass must recognize it."""

no_rules = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of a class of tensors that has none, as that of parameters."""

set_grad_mode = torch._C._set_grad_enabled
"""How graphs of Dynamo change the mode of gradients."""

registered_operators = torch._C._dispatch_get_registrations_for_dispatch_key
"""Names of operators with a kernel for a dispatch key: the documentation of the ops that autocast casts is incomplete."""

will_run = torch._C._will_engine_execute_node
"""Whether the backward that runs now will run a node, too: ``torch.autograd.grad(loss, x)`` accumulates nothing in leaves."""


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """While active, autograd calls no hooks on saved tensors that were set around: no public function leaves those that are set."""
    autograd, hooks = torch._C._autograd, list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]]()
    while (pair := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)


@contextmanager
def outside_of_autocast() -> Iterator[None]:
    """Trace what is inside between regions of autocast: those that the model has entered end before, and begin again after it.

    ``torch.export`` forgets a change of the mode of gradients that comes inside a region.

    with autocast:                     enter autocast
        with no_grad:                  exit autocast, set_grad_enabled(False), enter autocast
            y = linear(x)              linear(x)
                                       exit autocast, set_grad_enabled(True), enter autocast
                                       exit autocast
    """
    stack = torch.overrides._get_current_function_mode_stack()
    modes = [mode for mode in stack if isinstance(mode, PreDispatchTorchFunctionMode)]
    regions = [(mode, node.args) for mode in modes for node in mode.enter_autocast_nodes]
    for mode, _ in reversed(regions):
        mode.__torch_function__(torch.amp.autocast_mode._exit_autocast, ())
    yield
    for mode, arguments in regions:
        mode.__torch_function__(torch.amp.autocast_mode._enter_autocast, (), arguments)


def version_of(tensor: Tensor) -> int | None:
    """Return how often the memory of a tensor was written in place: what autograd compares of saved tensors; None in inference mode."""
    return None if tensor.is_inference() else tensor._version


def open_size(symbol: sympy.Symbol, like: Tensor) -> torch.SymInt:
    """Return a size that is ``symbol``, in the fake mode of a tensor.

    Public functions give one without a size to try (``torch.library.get_ctx().new_dynamic_size``), of which much cannot be traced.
    """
    environment = like.fake_mode.shape_env or ShapeEnv()  # type: ignore[attr-defined]  # of fake tensors
    if symbol not in environment.var_to_range:
        environment.backed_var_to_val[symbol] = sympy.Integer(next(_TRIED))
        environment._update_var_to_range(symbol, ValueRanges(0, int_oo))
    size = environment.create_symintnode(symbol, hint=int(environment.backed_var_to_val[symbol]))
    assert isinstance(size, torch.SymInt)
    return size


_TRIED = itertools.count(1_000_003)
"""The sizes that are tried, each once: no other size of a graph, so that none seems to be equal to it."""


def indexing_by_tensors() -> AbstractContextManager[Any]:
    """Return a context in which ``tensor[index]`` works below ``vmap`` with an index that is a level of it, as masks of attention need."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: PLC0415  it takes seconds

    context: AbstractContextManager[Any] = TransformGetItemToIndex()
    return context


def last_traced_node() -> fx.Node | None:
    """Return the last node of the graph that ``make_fx`` or ``torch.export`` writes now; None if there is none."""
    mode = get_proxy_mode()
    return None if mode is None else next(reversed(mode.tracer.graph.nodes), None)


class OngoingTrace:
    """A graph that ``make_fx`` or ``torch.export`` writes now.

    Args:
        mode: that of torch.
    """

    def __init__(self, mode: Any) -> None:
        self._mode, self._tracer = mode, mode.tracer

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """Return the node of a tensor; None if it is not of this trace."""
        from torch.fx.experimental.proxy_tensor import get_proxy_slot  # noqa: PLC0415  an export loads it

        found: Any = get_proxy_slot(tensor, self._tracer, None)
        return None if found is None else found.proxy.node

    def attribute(self, name: str) -> Any:
        """Return the value of a node ``get_attr`` of the graph."""
        return operator.attrgetter(name)(self._tracer.root)

    def call(self, function: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Trace a call."""
        with self._mode:
            return function(*args, **kwargs)

    def constant(self, value: Tensor) -> Tensor:
        """Return a tensor of the trace that is a constant of these values."""
        constant: Tensor = self.call(aten.lift_fresh_copy.default, value)
        return constant


def dynamo_source(placeholder: fx.Node) -> str:
    """Return where Dynamo reads an argument of one of its graphs, as Python: ``L['self']._modules['fc']._parameters['weight']``."""
    return str(placeholder._dynamo_source.name)  # type: ignore[attr-defined]


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` (``grad``, ``vmap``, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transform of ``torch.func`` made a tensor: it has no storage of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


forward_ad_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")  # each call asks: a function would cost more
"""Return the level of forward-mode differentiation; -1: it is not active."""


def has_tangent(tensors: Iterable[object]) -> bool:
    """Return whether forward-mode differentiation is active, and one of these is a tensor with a tangent."""
    if forward_ad._current_level < 0:
        return False
    return any(isinstance(each, Tensor) and forward_ad.unpack_dual(each).tangent is not None for each in tensors)


def graph_break(module: fx.GraphModule) -> tuple[str, str, int] | None:
    """Return why and where (file, line) a function breaks off after a graph of Dynamo; None if the graph is the last part of it."""
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return str(reason.reason).partition("\n")[0], frame.filename, frame.lineno


def is_resumed(module: fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo begins after a graph break."""
    stack = getattr(getattr(module, "compile_subgraph_reason", None), "user_stack", ())
    return any(frame.name.startswith("torch_dynamo_resume_in") for frame in stack)


def is_view(tensor: Tensor) -> bool:
    """Return whether a tensor is a view of another one."""
    return tensor._is_view()


def running_ddp() -> nn.parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward runs now: modules inside of it see by nothing else that they are."""
    running: nn.parallel.DistributedDataParallel | None = nn.parallel.DistributedDataParallel._get_active_ddp_module()
    return running


def process_group(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a process group of the processes that make it with the same store, in the order of their ranks in it.

    ``dist.new_group`` waits for every process, or names the group by how many groups a process has, which need not be alike; torch before
    2.13 sorts ranks. ``dist.destroy_process_group`` does not know this group: it ends when nothing refers to it.
    """
    group = dist.ProcessGroup(store, rank, size)
    kind = getattr(dist.ProcessGroup.BackendType, backend.upper())
    group._set_default_backend(kind)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group._register_backend(torch.device("cuda"), kind, dist.ProcessGroupNCCL(store, rank, size, options))
    else:
        group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout))
    return group


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor] | None:
    """Return the result of fused attention, and the logarithm of the sum of exponentials of each row; None: no kernel takes the call.

    ``torch.nn.functional.scaled_dot_product_attention`` keeps these logarithms to itself, and attention by blocks needs them.

    Args:
        mask: added to scores.
        is_causal: of as many queries as keys.
        dropout_p: the kernel for CPUs can be traced with dropout, and refuses to run.
    """
    if not _has_flash_attention(query, key, value, mask):
        return None
    operands = [_with_four_dimensions(x) for x in (query, key, value)]
    if query.is_cuda:
        result, log_total = aten._scaled_dot_product_flash_attention(*operands, dropout_p, is_causal, scale=scale)[:2]
    else:
        added = _mask_of_kernel(mask, query, key)
        result, log_total = aten._scaled_dot_product_flash_attention_for_cpu(*operands, dropout_p, is_causal, attn_mask=added, scale=scale)
    return result.reshape(*query.shape[:-1], value.shape[-1]), log_total.reshape(query.shape[:-1])


def flash_attention_gradients(
    grad: Tensor,
    result: Tensor,
    log_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of queries, keys and values of ``flash_attention``, given a result and logarithms; None: no kernel."""
    if not _has_flash_attention(query, key, value, mask):
        return None
    rows = [_with_four_dimensions(x.contiguous()) for x in (grad, query)]
    blocks, given = [_with_four_dimensions(x) for x in (key, value)], _with_four_dimensions(result.contiguous())
    totals = _with_four_dimensions(log_total.unsqueeze(-1)).squeeze(-1).contiguous()
    if query.is_cuda:
        no_dropout = query.new_empty(2, dtype=torch.uint64)
        sizes = (None, None, query.shape[-2], key.shape[-2])
        grads = aten._scaled_dot_product_flash_attention_backward(
            *rows, *blocks, given, totals, *sizes, 0.0, is_causal, no_dropout, no_dropout.new_empty(0), scale=scale
        )
    else:
        added = _mask_of_kernel(mask, query, key)
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = kernel(*rows, *blocks, given, totals, 0.0, is_causal, attn_mask=added, scale=scale)
    of_query, of_key, of_value = (each.reshape(x.shape) for each, x in zip(grads, (query, key, value), strict=True))
    return of_query, of_key, of_value


def _mask_of_kernel(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the bias of the scores, for each pair of a query and a key."""
    return None if mask is None else _with_four_dimensions(mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2]))


def _with_four_dimensions(x: Tensor) -> Tensor:
    """Return a tensor with rows, heads, positions and features, and contiguous features."""
    x = x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_flash_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch has a fused kernel for attention whose result it can be asked for with the logarithms of sums."""
    width = query.shape[-1]
    if value.shape[-1] != width or not query.numel() or not key.numel():
        return False
    if query.is_cuda:
        capability = torch.cuda.get_device_capability(query.device)
        widest = 256 if capability in ((8, 0), (9, 0)) else 192  # the backward of wider ones needs more shared memory than others have
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        return is_half and mask is None and width <= widest and width % 8 == 0 and capability >= (8, 0)
    return query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# -- pytrees, with dataclasses -----------------------------------------------------------------------------------------------------
#
# torch takes a dataclass apart only if its class is registered, for the whole process. A user's class stays unchanged: an instance is
# replaced by a ``_Record``, a class of this file that is registered. Its fields are the children, and unflattening gives the user's class.


@dataclass(frozen=True)
class RecordKind:
    """The class of an instance that is taken apart, and the attributes that are its children."""

    cls: type
    names: tuple[str, ...]


class _Record:
    """Represents an instance of a dataclass whose class is not registered."""

    def __init__(self, value: Any) -> None:
        fields = dict.fromkeys((*type(value).__dataclass_fields__, *getattr(value, "__dict__", ())))
        self.kind = RecordKind(type(value), tuple(name for name in fields if hasattr(value, name)))
        self.children = [with_records(getattr(value, name)) for name in self.kind.names]


def _unflatten_record(children: Iterable[Any], kind: RecordKind) -> Any:
    """Return an instance with these attributes; ``__init__`` and ``__post_init__`` have run when the first one was made."""
    value: Any = object.__new__(kind.cls)
    for name, child in zip(kind.names, children, strict=True):
        object.__setattr__(value, name, child)  # also of a frozen class
    return value


_pytree.register_pytree_node(
    _Record,
    lambda record: (record.children, record.kind),
    _unflatten_record,
    flatten_with_keys_fn=lambda record: (
        [(_pytree.GetAttrKey(name), child) for name, child in zip(record.kind.names, record.children, strict=True)],
        record.kind,
    ),
)


def _is_record(value: Any) -> bool:
    """Return whether a leaf is an instance of a dataclass, and neither a module, tensor nor function object."""
    return hasattr(type(value), "__dataclass_fields__") and not callable(value) and not isinstance(value, Tensor | type)


def with_records(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return nested values with instances of dataclasses as pytrees; unflattening gives instances again."""
    leaves, spec = _pytree.tree_flatten(tree, is_leaf)
    if not any(map(_is_record, leaves)):
        return tree
    return tree_unflatten([_Record(leaf) if _is_record(leaf) else leaf for leaf in leaves], spec)


def records_as_dicts(tree: Any) -> Any:
    """Return nested values with a mapping of its attributes in place of each instance of a dataclass: the leaves stay in their order."""
    leaves, spec = _pytree.tree_flatten(tree)
    if not any(map(_is_record, leaves)):
        return tree
    return tree_unflatten([_as_dict(leaf) if _is_record(leaf) else leaf for leaf in leaves], spec)


def _as_dict(value: Any) -> dict[str, Any]:
    return {name: records_as_dicts(getattr(value, name)) for name in _Record(value).kind.names}


def tree_flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Return the leaves and the structure of nested values."""
    leaves, spec = _pytree.tree_flatten(tree, is_leaf)
    return _pytree.tree_flatten(with_records(tree, is_leaf), is_leaf) if any(map(_is_record, leaves)) else (leaves, spec)


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of nested values."""
    return tree_flatten(tree, is_leaf)[0]


def tree_map_only(kind: Any, function: Callable[[Any], Any], tree: Any) -> Any:
    """Return nested values with a function applied to the leaves of a type."""
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([function(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves], spec)


class pytree:  # noqa: N801  it stands for the module
    """The functions of ``torch.utils._pytree``, for dataclasses too."""

    SUPPORTED_NODES = _pytree.SUPPORTED_NODES
    SequenceKey = _pytree.SequenceKey
    keystr = staticmethod(_pytree.keystr)
    register_pytree_node = staticmethod(_pytree.register_pytree_node)
    tree_flatten = staticmethod(tree_flatten)
    tree_leaves = staticmethod(tree_leaves)
    tree_map_only = staticmethod(tree_map_only)
    tree_unflatten = staticmethod(tree_unflatten)

    @staticmethod
    def tree_flatten_with_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[tuple[Any, Any]], TreeSpec]:
        """Return the leaves, each with its path, and the structure of nested values."""
        return _pytree.tree_flatten_with_path(with_records(tree, is_leaf), is_leaf)

    @staticmethod
    def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
        """Return nested values with a function applied to the leaves."""
        leaves, spec = tree_flatten(tree)
        return tree_unflatten([function(leaf) for leaf in leaves], spec)
