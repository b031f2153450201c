"""Write the casts of ``torch.autocast`` as operations.

Before, traced inside autocast("cpu", bfloat16):     After:

    linear = aten.linear(x, w, b)                        to = aten.to(x, bfloat16);  to_1 = aten.to(w, bfloat16);  to_2 = ...
                                                         linear = aten.linear(to, to_1, to_2)
    norm = aten.layer_norm(linear, ...)                  norm = aten.layer_norm(linear, ...)

What is cast is not looked up but seen: each operation runs once more on fake tensors inside autocast, and the casts of its arguments are
recorded. Without autocast, on the cast arguments, it must give the same dtypes; else it is refused by name.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.fake_tensors import call_like, fake_mode
from passes.graph.provenance import place_of
from passes.graph.schemas import is_autograd_function, written_arguments
from passes.ir.errors import TraceError
from passes.ir.graph import Autocast
from passes.ir.torch_private import FakeTensorMode, HigherOrderOperator, OpOverload, TorchDispatchMode, TreeSpec, pytree
from passes.normalize.autocast.operation_lists import SINGLE_UNLESS_SAID, may_be_cast, operations_of, overload

aten = torch.ops.aten
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_CAST = aten._to_copy.default  # noqa: SLF001  what a conversion comes down to
_PRODUCTS = frozenset({aten.einsum.default, aten.tensordot.default, aten.linalg_multi_dot.default, aten.chain_matmul.default})
"""Operations made of products only, after views: a cast after them may move before them."""
_SINGLE = frozenset({aten.cross_entropy_loss.default, *map(overload, SINGLE_UNLESS_SAID)}) - {None}
"""Operations that autocast tells to give single precision, where it casts no argument: casts in front give as much, or more precision."""


def write_casts(module: fx.GraphModule, autocast: Autocast | None) -> None:
    """Write the casts of a graph, and of those that it calls, in place.

    Args:
        autocast: what the graph was traced in; regions of it may say otherwise.

    Raises:
        TraceError: an operation changes its precision inside, where no cast of arguments can say it.
    """
    with fake_mode(module.graph), operations_of(autocast), _unreported_failures():
        _write_casts_of(module, autocast, {})


def _write_casts_of(module: fx.GraphModule, autocast: Autocast | None, known: dict[Hashable, dict[int, torch.dtype]]) -> None:
    """Write the casts of one graph; ``known``: the casts of calls that were run already, as repeated blocks make equal calls."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, HigherOrderOperator):
            for inner in called_graphs(module, node):
                _write_casts_of(inner, autocast_in(node, autocast), known)
            if node.target is _AUTOCAST:
                node.args = (*node.args[:2], False, *node.args[3:])
        elif autocast is not None and isinstance(node.target, OpOverload) and not is_autograd_function(node.target):
            _cast_arguments(node, autocast, known)
    module.recompile()


@contextlib.contextmanager
def _unreported_failures() -> Iterator[None]:
    """Silence PyTorch's log of fake tensors: running operations on dtypes that they refuse is expected here."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def called_graphs(module: fx.GraphModule, call: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a call of an operator of graphs is given, and no other constants."""
    names = [str(argument.target) for argument in call.args if isinstance(argument, fx.Node) and argument.op == "get_attr"]
    return [inner for name in names if isinstance(inner := operator.attrgetter(name)(module), fx.GraphModule)]


def autocast_in(call: fx.Node, around: Autocast | None) -> Autocast | None:
    """Return the autocast in the graphs of a call: that which a region turns on, None where it turns it off, else that around the call."""
    if call.target is not _AUTOCAST:
        return around
    device_type, dtype, enabled = call.args[:3]
    if not enabled:
        return None
    assert isinstance(device_type, str)
    return Autocast(device_type, dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(device_type))


class _Recorder(TorchDispatchMode):
    """Records which tensors one run of an operation casts, and to what.

    Args:
        arguments: tensors to look for, among other values.

    Attributes:
        casts: of arguments, by index.
        inner: how many other tensors were cast.
        dtypes: of the results; None where dtypes do not go together.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = {id(value): index for index, value in enumerate(arguments) if isinstance(value, Tensor)}
        self.casts: dict[int, torch.dtype] = {}
        self.inner = 0
        self.dtypes: list[torch.dtype] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is _CAST and dtype not in (None, args[0].dtype):
            if id(args[0]) in self._index:
                self.casts.setdefault(self._index[id(args[0])], dtype)
            else:
                self.inner += 1
        return func(*args, **(kwargs or {}))


def _cast_arguments(node: fx.Node, autocast: Autocast, known: dict[Hashable, dict[int, torch.dtype]]) -> None:
    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
    values = [leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    key = node.target, autocast, str(tree), tuple(map(_described, values)), tuple(_dtypes(node.meta.get("val")))
    if key not in known:
        known[key] = _casts(node, autocast, leaves, tree, values)
    _insert_casts(node, leaves, tree, known[key])


def _described(value: Any) -> str:
    """Describe an argument of a call: equal calls with arguments of one description are cast alike."""
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}" if isinstance(value, Tensor) else repr(value)


def _casts(node: fx.Node, autocast: Autocast, leaves: Sequence[Any], tree: TreeSpec, values: Sequence[Any]) -> dict[int, torch.dtype]:
    """Return the casts of arguments of a call, by index among its leaves; raise TraceError if these do not say what it computes."""
    # Each argument is a tensor of its own here, also where one value is given twice.
    fresh = [value.detach() if isinstance(value, Tensor) else value for value in values]
    if not any(may_be_cast(value) for value in fresh):
        return {}
    if any(isinstance(value, Tensor) and value.is_meta for value in fresh):
        raise TraceError(
            "the model enables torch.autocast inside its forward, which knows nothing of the meta device, where the model is",
            place=place_of(node),
            remedy="build the model on the CPU",
        )
    inside = _run(node, tree, fresh, autocast.enabled())
    own = _run(node, tree, fresh, contextlib.nullcontext()).casts
    casts = {index: dtype for index, dtype in inside.casts.items() if own.get(index) != dtype}
    if node.target in _PRODUCTS:
        casts = {index: autocast.dtype for index, value in enumerate(fresh) if may_be_cast(value)}
    expected = _dtypes(node.meta.get("val"))
    outside = _run(node, tree, _cast(fresh, casts), contextlib.nullcontext())
    if node.target in _SINGLE and outside.dtypes != expected:
        casts = {index: torch.float32 for index, value in enumerate(fresh) if may_be_cast(value)}
        outside = _run(node, tree, _cast(fresh, casts), contextlib.nullcontext())
    written = {leaves.index(each) for each in written_arguments(node)}
    same_inside = node.target in _PRODUCTS | _SINGLE or outside.inner == inside.inner
    if outside.dtypes != expected or not same_inside or not written.isdisjoint(casts):
        device_type = autocast.planned_for or autocast.device_type
        raise TraceError(
            f"{node.target} changes its precision inside under torch.autocast: no cast of its arguments says what it computes",
            place=place_of(node),
            remedy=f'let the model turn autocast off around it, torch.autocast("{device_type}", enabled=False), or choose another one',
        )
    return casts


def _cast(values: Sequence[Any], casts: Mapping[int, torch.dtype]) -> list[Any]:
    return [value.to(casts[index]) if index in casts else value for index, value in enumerate(values)]


def _run(node: fx.Node, tree: TreeSpec, values: Sequence[Any], context: contextlib.AbstractContextManager[Any]) -> _Recorder:
    """Run an operation on fake tensors. Random numbers are drawn from a copy of the generator."""
    recorder = _Recorder(values)
    args, kwargs = pytree.tree_unflatten(list(values), tree)
    assert callable(node.target)
    with torch.no_grad(), torch.random.fork_rng(devices=()), context, recorder, contextlib.suppress(RuntimeError):
        recorder.dtypes = _dtypes(node.target(*args, **kwargs))
    return recorder


def _dtypes(value: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _insert_casts(node: fx.Node, leaves: Sequence[Any], tree: TreeSpec, casts: dict[int, torch.dtype]) -> None:
    """Replace the leaves with an index in ``casts`` by conversions before the node; equal conversions are written once."""
    new_leaves = list(leaves)
    conversions: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    with node.graph.inserting_before(node):
        for index, dtype in casts.items():
            source = leaves[index]
            if (source, dtype) not in conversions:
                conversions[source, dtype] = call_like(node.graph, node, aten.to.dtype, source, dtype)
            new_leaves[index] = conversions[source, dtype]
    node.args, node.kwargs = pytree.tree_unflatten(new_leaves, tree)
