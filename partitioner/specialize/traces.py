"""The table of traces of a partitioned model: signature of a call -> the trace that serves it, made for the first call of its kind.

pm(input_ids)                                    as in the example
pm.eval(); pm(input_ids)                         in other modes
pm(input_ids, labels=labels)                     with other arguments       traced when first called so; same plan, same tensors
pm(input_ids, scale=2.0)                         with another value of an argument that is no tensor, or tensors of another dtype
with torch.autocast("cpu", torch.bfloat16): ...  in mixed precision

``find`` never traces. ``make`` looks for a trace that takes the call before it traces.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from partitioner.options.precision import check_scaler
from partitioner.runtime.arguments import BoundInputs, check_shapes
from partitioner.specialize.changes import decides, refuse_changes
from partitioner.specialize.make_trace import requiring_in_trace, trace_for, trace_of_graph, trace_of_sizes, with_requiring
from partitioner.specialize.signature import Call, Signature, call_of
from partitioner.specialize.trace import Trace, Tracing
from partitioner.tracing.inputs.batch_dims import argument_of
from partitioner.tracing.inputs.flatten import check_dense, flatten_inputs
from passes.graph.equivalence import graph_digest
from passes.ir.arguments.describe import described
from passes.ir.errors import ConfigError, PartitionWarning, TraceError, level_of_caller
from passes.ir.graph import Autocast, Input
from passes.ir.torch_private import pytree

_Modes = tuple[bool, ...]

_TRACES_ANNOUNCED = 8
"""Traces in the same modes at which a warning says that each kind of call is traced."""

_TRACES_KEPT = 32
"""Traces in the same modes that are kept, and traces for other sizes or states of autograd."""

_MATCHES_KEPT = 256
"""Signatures that are kept."""


class Served(Protocol):
    """A trace that serves calls."""

    @property
    def trace(self) -> Trace: ...

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundInputs: ...

    @property
    def binds_alike(self) -> bool:
        """Whether calls of one signature are bound alike; False if it depends on memory that tensors share."""


S = TypeVar("S", bound=Served)


@dataclasses.dataclass(frozen=True, eq=False)
class Match(Generic[S]):
    """How the calls of one signature run.

    Attributes:
        served: the trace for the sizes of the inputs.
        planned: the same for the planned sizes.
        base: the same for the gradients of the example.
        first: the inputs of the first such call, without tensors.
        places: placeholder -> index of the argument, and the dtype to convert it to.
        questions: what all ranks must agree on, with the answers of this process.
        is_decided: whether state that may change decides what the trace computes.
    """

    served: S
    planned: S
    base: S
    first: BoundInputs
    places: tuple[tuple[str, int, torch.dtype], ...]
    questions: tuple[tuple[str, object], ...]
    is_decided: bool

    def inputs(self, call: Call) -> BoundInputs:
        """Return the inputs of another call of the signature."""
        leaves, tensors = call.leaves, {}
        for placeholder, index, dtype in self.places:
            tensor = leaves[index]
            tensors[placeholder] = tensor if tensor.dtype is dtype else tensor.to(dtype)
        for question, answer in self.questions:
            self.served.trace.runtime.agree(question, answer, in_step=True)
        return BoundInputs(tensors, self.first.batch, self.first.requiring_gradient, self.first.sizes)


class Traces(Generic[S]):
    """Finds the trace for a call, and traces the model for the first call of its kind.

    Args:
        first: the trace of the model as it was partitioned.
        serve: adds what runs the calls of a trace.
    """

    def __init__(self, first: Trace, serve: Callable[[Trace], S]) -> None:
        self._first, self._serve = first, serve
        self._signature = inspect.signature(first.original.forward)
        self._is_alone = len(first.runtime.local_ranks) == first.runtime.n_ranks
        device_type = next((each.device.type for each in first.original.parameters()), "cpu")
        self._is_meta = device_type == "meta"  # then it is traced on the CPU, with the casts of the device that runs it
        self._device_type = first.runtime.devices[first.runtime.local_ranks[0]].type if self._is_meta else device_type
        self.first = serve(first)
        """As it was partitioned."""
        self._traces: dict[tuple[_Modes, Autocast | None], list[S]] = {self._key(first.tracing): [self.first]}
        self._derived: OrderedDict[tuple[S, object], S] = OrderedDict()
        self._matches: dict[Signature, Match[S]] = {}

    # -- find ----------------------------------------------------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: _Modes, *, tracked: bool) -> Call:
        """Return a call with its signature; ``tracked``: whether gradients are on."""
        return call_of(args, kwargs, modes, self._device_type, tracked=tracked)

    def find(self, call: Call) -> tuple[Match[S], BoundInputs] | None:
        """Return how a call runs, and its inputs, if there was one of its signature. Every rank must call it.

        Raises:
            ConfigError: state that decided the trace has changed; or ranks differ in their inputs.
        """
        match = None if call.signature is None else self._matches.get(call.signature)
        if match is None:
            return None
        trace = match.base.trace
        trace.state.refresh()
        if match.is_decided:
            refuse_changes(trace, tracked=call.tracked)
        return match, match.inputs(call)

    def in_modes(self, modes: _Modes) -> S:
        """Return the trace in these modes for a call as in the example."""
        return self._as_in_example(dataclasses.replace(self._first.tracing, modes=modes))

    # -- make ----------------------------------------------------------------------------------------------------------------------

    def make(self, call: Call) -> tuple[Match[S], BoundInputs]:
        """Return how a call runs, and its inputs; the model is traced if no trace takes the call. Every rank must call it.

        With one rank a process, None may stand for a tensor that the rank does not read.

        Raises:
            ConfigError: the inputs do not fit, ranks differ in them, or state that decided the trace has changed.
        """
        for leaf in call.leaves:
            if isinstance(leaf, Tensor) and leaf.is_quantized:
                check_dense("an argument", leaf)
        base = self._taking_or_traced(call)
        base.trace.state.refresh()
        text = None if self._is_alone else self._text(base)
        if text is not None:
            self._first.runtime.agree("the arguments", text, in_step=True)
        inputs = base.bind(call.args, call.kwargs)
        planned = self._for_gradients(base, inputs.requiring_gradient, tracked=call.tracked)
        sizes = inputs.sizes if planned is base else planned.bind(call.args, call.kwargs).sizes  # other traces name them otherwise
        served = self.at(planned, sizes, inputs.batch)
        if served is not planned:
            check_shapes(served.trace.graph, inputs.tensors)
        places = _places(base.trace, call, inputs)
        first = dataclasses.replace(inputs, tensors={}, written={})  # else they would be kept
        match = Match(
            served,
            planned,
            base,
            first,
            places or (),
            () if self._is_alone else _questions(base.trace, inputs, text),
            decides(base.trace.graph),
        )
        if call.signature is not None and places is not None and base.binds_alike:
            if len(self._matches) >= _MATCHES_KEPT:
                self._matches.clear()
            self._matches[call.signature] = match
        return match, inputs

    def at(self, planned: S, sizes: Mapping[str, int], rows: int) -> S:
        """Return the trace for sizes of the inputs besides the batch, by name, made when they first come.

        Args:
            rows: of the call, for the error.

        Raises:
            ConfigError: the model does not take inputs of these sizes.
        """
        if sizes == planned.trace.graph.open_sizes:
            return planned
        return self._derive(planned, tuple(sizes.values()), lambda: self._serve(trace_of_sizes(planned.trace, sizes, rows)))

    def _for_gradients(self, base: S, requiring: frozenset[str], *, tracked: bool) -> S:
        """Return the trace for a call with gradients on or off: of a model whose code asks for that, another one.

        Args:
            requiring: placeholders of the inputs that require a gradient.
            tracked: whether gradients are on.
        """
        trace = base.trace
        refuse_changes(trace, tracked=tracked)
        if not trace.graph.gradient_questions or (tracked, requiring) == (trace.tracing.with_gradients, requiring_in_trace(trace)):
            return base

        def make() -> S:
            args, kwargs = with_requiring(trace, requiring)
            other = trace_for(trace, dataclasses.replace(trace.tracing, args=args, kwargs=kwargs, with_gradients=tracked))
            is_equal = not trace.graph.constants and graph_digest(other.graph) == graph_digest(trace.graph)
            return base if is_equal else self._serve(other)

        return self._derive(base, (tracked, requiring), make)

    def _derive(self, source: S, key: object, make: Callable[[], S]) -> S:
        """Return the object that was made from a trace for a key; the last ones are kept."""
        if (source, key) not in self._derived:
            with source.trace.runtime.failing_together():
                self._derived[source, key] = make()
            if len(self._derived) > _TRACES_KEPT:
                self._derived.popitem(last=False)
                self._matches.clear()
        self._derived.move_to_end((source, key))
        return self._derived[source, key]

    def _taking_or_traced(self, call: Call) -> S:
        """Return a trace that takes a call, else a new one."""
        args, kwargs = call.args, call.kwargs
        tracing = dataclasses.replace(self._first.tracing, modes=call.modes, autocast=self._autocast())
        fits = self._fits_signature(args, kwargs)
        lackings = (False,) if self._is_alone and fits else (False, True)
        found = next(filter(None, (self._taking(tracing, args, kwargs, with_lacking=each) for each in lackings)), None)
        if found is not None:
            return found
        near = self._near(tracing, args, kwargs)
        if not fits or (near is not None and not near.trace.arguments.may_be_traced(args, kwargs)):
            return near or self._as_in_example(tracing)  # they name what differs
        try:
            return self._traced(dataclasses.replace(tracing, args=_shapes(args), kwargs=_shapes(dict(kwargs))))
        except TraceError as error:
            if near is not None:
                return near
            inputs = flatten_inputs(self._first.original, args, kwargs)
            named = {index: None for index, name in enumerate(inputs.names) if argument_of(name) in map(argument_of, tracing.batch_dims)}
            raise ConfigError(
                f"the call passes other arguments than the example, and with these {error.problem}",
                place=error.place,
                remedy="pass the arguments of the example; or call the model itself with these, to see whether it takes them"
                + dataclasses.replace(inputs, batch_dims=named).other_batch(),
            ) from error

    def _text(self, served: S) -> str | None:
        """Return the text of a trace that ranks compare; None for one of the example's arguments, in its autocast."""
        tracing = served.trace.tracing
        if self._is_of_example(served) and tracing.autocast == self._first.tracing.autocast:
            return None
        names = ", ".join(_text_of(leaf) for leaf in served.trace.graph.inputs)
        return f"{names}, in {'no autocast' if tracing.autocast is None else f'autocast {tracing.autocast.dtype}'}"

    def copy_into(self, other: Traces[S]) -> None:
        """Give a copy of the model, with tensors of its own, the same traces."""
        for known in self._traces.values():
            for served in known:
                if served is not self.first:
                    trace = served.trace
                    other.add(trace_of_graph(other.first.trace, trace.graph, trace.plan, trace.tracing))

    def _taking(self, tracing: Tracing, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_lacking: bool) -> S | None:
        """Return a trace that takes a call, among those that there are and that of the example; see ``TracedArguments.takes``."""
        known = self._traces.get(self._key(tracing), ())
        found = next((each for each in known if each.trace.arguments.takes(args, kwargs, with_lacking=with_lacking)), None)
        if found is None and self._first.arguments.takes(args, kwargs, with_lacking=with_lacking):
            return self._as_in_example(tracing)
        return found

    def _near(self, tracing: Tracing, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> S | None:
        """Return a trace of the arguments of a call but for values that are no tensors, or dtypes: it refuses the call, and names them."""
        known, lacking = (*self._traces.get(self._key(tracing), ()), self.first), not self._is_alone
        return next((each for each in known if each.trace.arguments.takes(args, kwargs, with_lacking=lacking, exactly=False)), None)

    def _autocast(self) -> Autocast | None:
        """Return the autocast around the call, else that in which the model was partitioned."""
        own, runtime = self._first.tracing.autocast, self._first.runtime
        if not torch.is_autocast_enabled(self._device_type):
            return own
        dtype = torch.get_autocast_dtype(self._device_type)
        if own is not None and own.dtype == dtype:
            return own
        if dtype == torch.float16:
            check_scaler("16-mixed", self._first.plan.grid, None if self._is_alone else runtime.n_ranks)
        return Autocast("cpu", dtype, planned_for=self._device_type) if self._is_meta else Autocast(self._device_type, dtype)

    def _as_in_example(self, tracing: Tracing) -> S:
        """Return the trace for a call as in the example."""
        return self._of_example(tracing) or self._traced(tracing)

    def _of_example(self, tracing: Tracing) -> S | None:
        """Return the trace that was made with the arguments of ``tracing``."""
        known = self._traces.get(self._key(tracing), ())
        return next(
            (each for each in known if each.trace.tracing.args is tracing.args and each.trace.tracing.kwargs is tracing.kwargs), None
        )

    def _traced(self, tracing: Tracing) -> S:
        return self.add(trace_for(self._first, tracing))

    def add(self, trace: Trace) -> S:
        """Keep a trace, and of those in the same modes the last ones; that of the example stays."""
        served, known = self._serve(trace), self._traces.setdefault(self._key(trace.tracing), [])
        known.append(served)
        if len(known) == _TRACES_ANNOUNCED:
            warnings.warn(
                f"the model was traced for {len(known)} kinds of calls, which differ in their arguments, in the values of those that are "
                f"no tensors, or in dtypes; each takes as long as the first, and the last {_TRACES_KEPT} are kept\n"
                "  remedy: pass what changes from call to call as a tensor",
                PartitionWarning,
                stacklevel=level_of_caller(),
            )
        if len(known) > _TRACES_KEPT:
            known.remove(next(each for each in known if not self._is_of_example(each)))
            self._matches.clear()
        return served

    def _is_of_example(self, served: S) -> bool:
        """Return whether a trace is for the arguments of the example."""
        first, tracing = self._first.tracing, served.trace.tracing
        return tracing.args is first.args and tracing.kwargs is first.kwargs

    def _fits_signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the model could be called so; None fits where it is the default, or in ``**kwargs``.

        A call without arguments is that of a rank whose stages read none.
        """
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return False
        parameters = self._signature.parameters
        return bool(args or kwargs) and all(value is not None or parameters[name].default is None for name, value in bound.items())

    @staticmethod
    def _key(tracing: Tracing) -> tuple[_Modes, Autocast | None]:
        return tracing.modes, tracing.autocast


def _places(trace: Trace, call: Call, inputs: BoundInputs) -> tuple[tuple[str, int, torch.dtype], ...] | None:
    """Return placeholder, index of the argument and dtype of each input; None if arguments do not identify them."""
    own = trace.arguments.leaves(call.args, call.kwargs)
    index_of = {id(leaf): index for index, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)}
    if own is None or len(index_of) < sum(isinstance(leaf, Tensor) for leaf in call.leaves):
        return None  # an argument that is passed twice
    places = []
    for leaf, value in zip(trace.graph.inputs, own, strict=True):
        if leaf.dtype is None:
            continue
        if not isinstance(value, Tensor):
            return None  # what this process lacks, others say
        if leaf.placeholder is not None and leaf.placeholder in inputs.tensors:
            places.append((leaf.placeholder, index_of[id(value)], inputs.tensors[leaf.placeholder].dtype))
    return tuple(places)


def _questions(trace: Trace, inputs: BoundInputs, text: str | None) -> tuple[tuple[str, object], ...]:
    """Return the questions on which ranks agree, as when inputs are bound anew, with the answers."""
    own = () if text is None else (("the arguments", text),)
    return (*own, *trace.arguments.questions(inputs, trace.programs.rows))


def _text_of(leaf: Input) -> str:
    """Return an argument as ranks compare it: a tensor's name and dtype, the value of another one if it is plain."""
    if leaf.dtype is not None:
        return f"{leaf.name} of {leaf.dtype}"
    return f"{leaf.name}={described(leaf.constant)}" if isinstance(leaf.constant, bool | int | float | str | None) else leaf.name


def _shapes(values: Any) -> Any:
    """Return nested values with zeros in place of tensors: a trace reads their sizes and types, and is kept for long."""
    return pytree.tree_map_only(Tensor, lambda leaf: torch.zeros_like(leaf, requires_grad=leaf.requires_grad), values)
