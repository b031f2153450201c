"""Autograd over a whole partitioned forward: ``pm(x)`` then ``.backward()``, as with any module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.model.calls import Calls
from partitioner.model.effects.written_inputs import with_copies
from partitioner.model.served_trace import ServedTrace
from partitioner.model.steps.gradient_accumulation import Accumulation
from partitioner.runtime.arguments import BoundInputs, refuse_tangents
from partitioner.runtime.executor import ProgramSet
from partitioner.runtime.state.hooks import has_hooks
from partitioner.specialize.request import Request
from partitioner.specialize.sharded_model import ShardedModel
from passes.autograd.staged_model import Differentiation
from passes.emit.communication_plan import differentiated_outputs
from passes.emit.place_on_mesh import Gradients
from passes.ir.errors import ConfigError, first_few
from passes.ir.torch_private import forward_ad_level, is_transformed, is_view, tree_leaves, version_of, will_run

Forward = Callable[[], tuple[tuple[Tensor, ...], Any]]
"""Returns the outputs, and the saved tensors."""

Backward = Callable[[Any, tuple[Tensor | None, ...], bool], tuple[Tensor | None, ...]]
"""(saved tensors, gradients of the outputs or None, whether those of parameters are wanted) -> gradients of the inputs, in order."""


_FIRST_INPUT = 4
"""The place of the first of the model's inputs among the arguments of ``_PartitionedCall.forward``."""


class _PartitionedCall(torch.autograd.Function):
    """One forward of all ranks as one node of the autograd graph. The backward programs add parameter gradients to ``.grad``."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, backward: Callable[..., Any], tracked: Sequence[bool], anchor: Tensor, *leaves: Tensor) -> Any:
        outputs, saved = forward()
        ctx.saved = saved
        ctx.run = backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output, track in zip(outputs, tracked, strict=True) if not track))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True: a partitioned model has no second derivatives, its backward programs cannot be differentiated",
                remedy="compute gradient penalties and Hessians with the model itself",
            )
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise ConfigError(
                "the backward of this call has run already: a partitioned forward keeps nothing for a second one (retain_graph=True)",
                remedy="add the losses and call backward() once, or call pm(...) again",
            )
        of_inputs = ctx.run(saved, gradients)
        n_parameters = len(ctx.needs_input_grad) - _FIRST_INPUT - len(of_inputs)
        return *(None,) * _FIRST_INPUT, *of_inputs, *(None,) * n_parameters  # programs have added the gradients of parameters


def outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs without gradients, and outside of inference mode, where it is called inside.

    What a call traces, stores or refreshes serves training, too, and autograd refuses tensors that were made in inference mode.

    Raises:
        ConfigError: it is called inside of a transform of ``torch.func``, or with tangents of forward-mode AD: programs have neither.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and forward_ad_level() >= 0:
            _refuse_tangents(args, kwargs)
        if not torch.compiler.is_compiling() and is_transformed():
            raise ConfigError(
                "torch.func (grad, vmap, jacrev, ...) cannot transform a partitioned model: it does not see what programs compute",
                remedy="call .backward() for gradients; give one batch where vmap would map over rows; or transform the model itself",
            )
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(mode=False), torch.no_grad():
            return function(*args, **kwargs)

    return run


def _refuse_tangents(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError where an argument of a method, or a parameter or buffer of its module, is a dual tensor of forward-mode AD."""
    modules = [each for each in args[:1] if isinstance(each, nn.Module)]
    state = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    refuse_tangents([*tree_leaves((args, kwargs)), *state])


@dataclass(frozen=True)
class Versions:
    """The versions, at the end of a forward, of the tensors that its backward may read: each write in place counts one up.

    Attributes:
        named: (placeholder, name for the user, tensor, version) of each input, parameter and buffer.
        saved: (tensor, version) of each saved tensor; some share memory with an input or a result.
    """

    named: tuple[tuple[str, str, Tensor, int | None], ...]
    saved: tuple[tuple[Tensor, int | None], ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, str, Tensor]], saved: Any) -> Versions:
        """Return the present versions of named tensors, and of those among nested saved values."""
        tensors = [leaf for leaf in tree_leaves(saved) if isinstance(leaf, Tensor)]
        return cls(tuple((*each, version_of(each[2])) for each in named), tuple((each, version_of(each)) for each in tensors))

    def changed(self) -> list[tuple[str, str]]:
        """Return the placeholder and the name of each named tensor that was written to since."""
        return [(placeholder, name) for placeholder, name, tensor, version in self.named if version_of(tensor) != version]

    def check(self, programs: ProgramSet) -> None:
        """Check what a backward reads before it runs.

        Raises:
            ConfigError: something that it reads was written to since the forward.
        """
        changed = self.changed()
        reads = frozenset[str]().union(*(executable.program.reads for executable in programs.executables.values()))
        names = [name for placeholder, name in changed if placeholder in reads]
        if any(version_of(tensor) != version for tensor, version in self.saved):
            is_input = [name for _, name in changed if name.startswith(_INPUT)]
            names += is_input or ["a result of the call"]
        if names:
            changes = first_few(list(dict.fromkeys(names)))
            raise ConfigError(
                f"in-place writes to {changes} after the forward of this call: its backward reads the values from before",
                remedy="call backward() first, then change it (optimizer.step(), load_state_dict(), x.mul_(2)); "
                "or change a copy: y = pm(x).clone(), pm(x.clone())",
            )


class _TakenOnce:
    """The saved values of one rank, each dropped when the backward program takes it: it is freed after its last use there."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = list(values)

    def __getitem__(self, index: int) -> Any:
        value, self._values[index] = self._values[index], None
        return value


@dataclass
class _Kept:
    """Values that a forward saves for its backward.

    Attributes:
        saved: rank -> the values that its program saved.
        versions: of what the backward reads; None once they are checked.
    """

    saved: Mapping[int, _TakenOnce]
    versions: Versions | None


_INPUT = "input "
"""The beginning of the name of an input in errors."""


def tracks_gradients(calls: Calls, inputs: BoundInputs) -> bool:
    """Return whether autograd tracks a call: gradients are on, and an input or a parameter requires one.

    A process that has no part of some parameter cannot know that all are frozen.
    """
    return torch.is_grad_enabled() and bool(inputs.requiring_gradient or not calls.are_parameters_frozen)


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """The programs of calls of one kind: a batch size, and inputs that require gradients.

    Attributes:
        served: the trace.
        request: of a forward without autograd.
        sharded: the model, sharded for the request.
        differentiation: of every result that autograd would track.
    """

    served: ServedTrace
    request: Request
    sharded: ShardedModel
    differentiation: Differentiation

    @functools.cached_property
    def forward(self) -> ProgramSet:
        """The programs of a forward without autograd."""
        return self.served.trace.programs.get(self.request)

    @functools.cached_property
    def training_forward(self) -> ProgramSet:
        """The programs of a forward that also returns what the backward takes."""
        return self.served.trace.programs.get(self.request.training_forward(self.differentiation))

    def backward(self, given: frozenset[str], gradients: Gradients) -> ProgramSet:
        """Return the programs of the backward for these results with gradients."""
        return self.served.trace.programs.get(self.request.backward(self.differentiation, given, gradients))

    @functools.cached_property
    def returned(self) -> tuple[str, ...]:
        """The results, each once."""
        return self.sharded.training(self.differentiation).returned

    @functools.cached_property
    def differentiated(self) -> tuple[str, ...]:
        """The results whose gradients the backward takes."""
        return differentiated_outputs(self.sharded.training(self.differentiation))

    @functools.cached_property
    def input_names(self) -> list[str]:
        """The inputs whose gradients the backward returns, in order."""
        return self.served.calls.input_gradient_names(self.differentiation.inputs)


def prepare_call(served: ServedTrace, inputs: BoundInputs) -> PreparedCall:
    """Find the programs of a call of this kind, else make the request of them."""
    trace = served.trace
    key = "call", inputs.batch, inputs.requiring_gradient, trace.state.gradients.trained
    if key not in served.steps:
        request = trace.programs.request(inputs.batch)
        sharded = trace.programs.sharded(request)
        served.steps[key] = PreparedCall(served, request, sharded, sharded.everything(inputs.requiring_gradient))
    prepared: PreparedCall = served.steps[key]
    return prepared


def tracked_forward(call: PreparedCall, inputs: BoundInputs, accumulation: Accumulation) -> tuple[Tensor, ...]:
    """Run the forward of one call; ``.backward()`` on its outputs runs the backward, with one rank a process in each of them.

    Args:
        accumulation: whether the backward sums gradients over ranks. After a call inside ``no_sync()`` it does not, wherever it runs.
    """
    calls, runtime, sharded = call.served.calls, call.served.trace.runtime, call.sharded
    here, in_no_sync = runtime.local_ranks[0], accumulation.holds
    read = with_copies(inputs) if inputs.written else inputs
    names, returned, differentiated = call.input_names, call.returned, call.differentiated
    metas: dict[str, Tensor] = {}

    def forward() -> tuple[tuple[Tensor, ...], Any]:
        """Run the training forward; return the model's outputs, and the values that its backward reads."""
        before = Versions.of(calls.named_buffers(), ())
        results = calls.run(sharded, call.training_forward, read)
        outputs = _writable(results[here][0])
        metas.update({name: torch.empty_like(output, device="meta") for name, output in zip(returned, outputs, strict=True)})
        saved = {rank: result[1] for rank, result in results.items()}
        own = dict(before.changed())  # of a buffer that the model writes to, the backward reads a saved value
        named = [each for each in calls.named_tensors(read) if each[0] not in own]
        return outputs, _Kept({rank: _TakenOnce(each) for rank, each in saved.items()}, Versions.of(named, saved))

    def backward(kept: _Kept, gradients: tuple[Tensor | None, ...], wants_parameters: bool) -> tuple[Tensor | None, ...]:
        """Run the backward, with zeros for outputs without a gradient; return the gradients of this process's inputs."""
        rows, graph = sharded.rows, sharded.graph
        present = {name: gradient for name, gradient in zip(returned, gradients, strict=True) if gradient is not None}
        if not present:  # a function after the call returned None
            return (None,) * len(names)
        filled = _filled(present, {name: metas[name] for name in differentiated})
        extra = {
            rank: {"saved": kept.saved[rank], "output_gradients": rows.output_gradients(graph, differentiated, filled, rank)}
            for rank in runtime.local_ranks
        }
        mode: Gradients = "keep" if in_no_sync or not wants_parameters else accumulation.gradients
        of_backward = call.backward(frozenset(present), mode)
        with runtime.failing_together():
            assert kept.versions is not None
            kept.versions.check(of_backward)
        kept.versions = None  # it holds the saved values
        with contextlib.nullcontext() if wants_parameters else calls.discarding_gradients():
            return tuple(rows.input_gradients(graph, names, calls.run(sharded, of_backward, read, extra)[here]))

    return tracked_call(calls, inputs, names, forward, backward, tuple(name in differentiated for name in returned))


def tracked_call(
    calls: Calls, inputs: BoundInputs, names: Sequence[str], forward: Forward, backward: Backward, tracked: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Run a forward as one node of the autograd graph; return its outputs.

    Args:
        names: of the inputs whose gradients ``backward`` returns, also of those that this process lacks.
        tracked: for each output, whether autograd tracks it.
    """
    # Autograd runs a function's backward only if one of its inputs requires grad, and backward(inputs=...) if one of these is among them.
    # Autograd would call hooks of parameters without a gradient: the programs call them.
    anchor = torch.empty(0, requires_grad=True)
    accumulate = torch.autograd.graph.get_gradient_edge(anchor).node

    def of_given_inputs(saved: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Run the backward; return the gradients of the inputs that this process was given."""
        wants_parameters = will_run(accumulate) or _named_as_inputs(calls.parameters)
        of_inputs = backward(saved, gradients, wants_parameters)
        return tuple(gradient for name, gradient in zip(names, of_inputs, strict=True) if name in inputs.tensors)

    leaves = [inputs.tensors[name] for name in names if name in inputs.tensors]
    leaves += [parameter for parameter in calls.parameters if parameter.requires_grad and not has_hooks(parameter)]
    outputs: tuple[Tensor, ...] = _PartitionedCall.apply(forward, of_given_inputs, tracked, anchor, *leaves)  # type: ignore[no-untyped-call]
    return outputs


def _writable(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs such that the caller may change them in place, each a tensor of its own.

    Autograd forbids that for views that a function returns: those are detached, in the same memory. Numbers are copied: Trainer scales a
    loss in place, which the backward may read.
    """
    seen: set[int] = set()
    writable = []
    for output in outputs:
        is_shared = is_view(output) or id(output) in seen
        seen.add(id(output))
        writable.append(output.clone() if output.dim() == 0 else output.detach() if is_shared else output)
    return tuple(writable)


def _filled(present: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of all results whose gradients are wanted, zeros where there is none.

    Args:
        wanted: result -> a tensor like it, on the meta device.
    """
    device = next(iter(present.values())).device
    return tuple(present[name].contiguous() if name in present else torch.zeros_like(like, device=device) for name, like in wanted.items())


def _named_as_inputs(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether the current backward is ``backward(inputs=[...])`` with these parameters among the inputs.

    Raises:
        ConfigError: it names some of them: the backward programs add the gradients of all; or it is ``torch.autograd.grad`` of them.
    """
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
    try:
        named = [will_run(node) for node in nodes]
    except RuntimeError as error:  # autograd.grad captures what would reach a parameter
        raise ConfigError(
            "torch.autograd.grad() asks for gradients of parameters: the backward programs of a partitioned model add them to .grad",
            remedy="call loss.backward() and read .grad; torch.autograd.grad(loss, x) gives gradients of inputs",
        ) from error
    if any(named) and not all(named):
        raise ConfigError(
            f"backward(inputs=...) names {sum(named)} of {len(named)} parameters, and programs compute the gradients of all",
            remedy="name all parameters, or none; parameters with requires_grad_(False) are left out",
        )
    return any(named)


def backward_of_inputs(tensors: Mapping[str, Tensor], names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
    """Continue the backward into the graph that computed the inputs: pass autograd the gradient of each input of this process."""
    pairs = [(tensors[name], grad) for name, grad in zip(names, gradients, strict=True) if grad is not None and name in tensors]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [grad.to(tensor.device) for tensor, grad in pairs])
