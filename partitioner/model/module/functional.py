"""Call a partitioned model as a function of its parameters and buffers, which stay the caller's.

    result = f(parameters, buffers, inputs)        autograd gets the gradients of parameters and inputs, as from any operation

The caller's optimizer, hooks and accumulation see their own parameters; the partitioned model computes in the memory of these where a
rank can read it there, and with copies where it cannot (parts, other devices). ``torch.compile``'s backend calls a model so, and
``torch.func.functional_call``, after which the model has its own tensors again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.runtime.state.gather import GatheredState
from partitioner.runtime.state.hooks import has_hooks
from partitioner.runtime.state.parameters import State
from partitioner.specialize.trace import Trace
from passes.graph.aliasing import mutated_arguments
from passes.ir.errors import ConfigError, first_few
from passes.ir.torch_private import TreeSpec, tree_flatten, tree_unflatten

__all__ = ["FunctionalModel", "call_with"]


class FunctionalModel:
    """A partitioned model as a function of its parameters, buffers and inputs.

    Args:
        trace: of the partitioned model.
        run: calls it with positional inputs.
        state: the values of the first call. Processes that start with others would train other models: they raise ConfigError.
        keeps: whether the model keeps the last values that it was given; else it has its own again after each forward and backward.
    """

    def __init__(self, trace: Trace, run: Callable[[Sequence[Tensor]], Any], state: Mapping[str, Tensor], *, keeps: bool = True) -> None:
        self.trace, self._call_model, self._keeps = trace, run, keeps
        if len(trace.runtime.local_ranks) < trace.runtime.n_ranks:
            sums = [tensor.detach().double().sum().item() for tensor in state.values() if not tensor.is_complex()]
            trace.runtime.agree("values of parameters and buffers", repr(sums))
        self._state, self._gathered = trace.state, GatheredState(trace.state, trace.runtime)
        graph = trace.graph
        written = {argument.name for node in graph.computing_nodes() for argument in mutated_arguments(node)}
        self._written = tuple(name for placeholder, name in graph.buffers.items() if placeholder in written)

    def __call__(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Any:
        """Return the result of the model; buffers that it writes are updated.

        Args:
            state: original name -> parameter or buffer of the caller.
            inputs: positional inputs.
        """
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*state.values(), *inputs))):
            return self._run(state, inputs)
        trees: list[tuple[TreeSpec, tuple[Any, ...]]] = []
        outputs: tuple[Tensor, ...] = _Call.apply(self, tuple(state), trees, *state.values(), *inputs)  # type: ignore[no-untyped-call]
        ((tree, constants),) = trees
        values = iter(outputs)
        return tree_unflatten([next(values) if leaf is _TENSOR else leaf for leaf in constants], tree)

    def _run(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Any:
        with self.lent(state):
            result = self._call_model(inputs)
            with torch.no_grad():
                for name, value in self._gathered.whole(name for name in self._written if name in state).items():
                    if state[name] is not value:
                        state[name].copy_(value)
        return result

    @contextlib.contextmanager
    def lent(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the programs compute with the caller's tensors."""
        with torch.no_grad():
            values = {name: self._as_read(name, tensor.detach()) for name, tensor in state.items()}
            own = [] if self._keeps else [(held, held.data) for name in values for _, held in self._state.held(name)]
            for held, data in own:
                held.data = torch.empty_like(data)
            for name, value in values.items():
                self._state.lend(name, value, is_written=name in self._written)
            self._state.refresh()
        try:
            yield
        finally:
            for held, data in own:
                held.data = data
            if own:
                self._state.refresh()

    def _as_read(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor in the memory order of programs: tensors of a call, such as a slice of a vector, get that of parameters."""
        return tensor if self._keeps or name in self._written else tensor.contiguous()

    def run_tracked(self, state: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return the result, which autograd tracks apart from the caller's graph, and the inputs that it depends on."""
        own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        with torch.enable_grad():
            return self._run(state, own), own

    def saved_names(self, state: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the tensors whose values a backward may read: they must not change in between."""
        return [name for name, tensor in state.items() if tensor.is_floating_point() and name not in self._written]

    def differentiate(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        """Run the backward; return the gradients of the parameters under their names. Those of inputs are added to their ``.grad``."""
        pairs = [(output, grad) for output, grad in zip(outputs, gradients, strict=True) if grad is not None and output.requires_grad]
        before = [(each.parameter, each.parameter.grad) for each in self._state.stored_parameters()]
        for parameter, _ in before:
            parameter.grad = None
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        found = self._gathered.gradients()
        for parameter, gradient in before:
            parameter.grad = None if self._keeps else gradient
        return found


def call_with(trace: Trace, run: Callable[..., Any], given: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model with other tensors in place of some parameters and buffers, as ``torch.func.functional_call`` does.

    Args:
        trace: of the partitioned model.
        run: calls it with its own tensors.
        given: original name -> the tensor that takes the place of the whole parameter or buffer.

    Raises:
        ConfigError: a tensor does not fit what it takes the place of; or gradients are asked of parameters that are frozen, have hooks, or
            are not given and in parts.
    """
    chosen = _once(trace.state, given)
    if torch.is_grad_enabled():
        _check_gradients(trace.state, chosen)
        own = ((each.name, each.parameter) for each in trace.state.stored_parameters() if each.parameter.requires_grad)
        chosen |= {name: parameter for name, parameter in own if name not in chosen}
    leaves, tree = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run_with(inputs: Sequence[Tensor]) -> Any:
        by_place = dict(zip(places, inputs, strict=True))
        own_args, own_kwargs = tree_unflatten([by_place.get(place, leaf) for place, leaf in enumerate(leaves)], tree)
        return run(*own_args, **own_kwargs)

    return FunctionalModel(trace, run_with, chosen, keeps=False)(chosen, [leaves[place] for place in places])


def _once(state: State, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, those of tied parameters once; raise ConfigError for one that does not fit."""
    chosen: dict[str, Tensor] = {}
    for name, tensor in given.items():
        first = state.graph.aliases.get(name, name)
        held = state.held(first)
        whole, dtype = next(iter(state.blocks_of_ranks(first).values())).shape, held[0][1].dtype if held else tensor.dtype
        if (tuple(tensor.shape), tensor.dtype) != (tuple(whole), dtype):
            raise ConfigError(
                f"functional_call gives {name} as {tuple(tensor.shape)} {tensor.dtype}, and the model has {tuple(whole)} {dtype}",
                remedy="pass whole tensors on every rank: those of pm.full_state_dict(), or made from it",
            )
        if chosen.setdefault(first, tensor) is not tensor:
            raise ConfigError(f"functional_call gives {name} and {first}, which are tied, different tensors", remedy="give them one tensor")
    return chosen


def _check_gradients(state: State, given: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if the backward of a call with these tensors would not be that of the model."""
    stored = list(state.stored_parameters())
    frozen = [each.name for each in stored if not each.parameter.requires_grad and each.name in given and given[each.name].requires_grad]
    if frozen:
        raise ConfigError(
            f"functional_call asks for the gradient of {first_few(frozen)}, which is frozen in the partitioned model",
            remedy="partition the model with requires_grad=True there",
        )
    hooked = [each.name for each in stored if has_hooks(each.parameter)]
    if hooked:
        raise ConfigError(
            f"functional_call with gradients would call the hooks of {first_few(hooked)} with gradients of other tensors",
            remedy="remove them from pm.parameters(), or call under torch.no_grad()",
        )
    is_whole = state.all_have_all and all(len(state.held(each.name)) == 1 for each in stored)
    lacking = [name for name in state.parameter_names if state.graph.aliases.get(name, name) not in given]
    if lacking and not is_whole:
        raise ConfigError(
            f"functional_call with gradients does not give {first_few(lacking)}, of which this process has a part or nothing",
            remedy="give all parameters; or call under torch.no_grad()",
        )


_TENSOR = object()
"""Stands for a tensor among the leaves of a result."""


class _Call(torch.autograd.Function):
    """One call, as one node of the caller's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any, function: FunctionalModel, names: tuple[str, ...], trees: list[tuple[TreeSpec, tuple[Any, ...]]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        state, inputs = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        result, ctx.inputs = function.run_tracked(state, inputs)
        leaves, tree = tree_flatten(result)
        trees.append((tree, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)))
        ctx.function, ctx.names, ctx.outputs = function, names, [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        ctx.saved_names = function.saved_names(state)
        ctx.save_for_backward(*(state[name] for name in ctx.saved_names))
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach() for output in ctx.outputs)
        untracked = (detached for output, detached in zip(ctx.outputs, outputs, strict=True) if not output.requires_grad)
        ctx.mark_non_differentiable(*untracked)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                "the backward of a partitioned graph has no derivative itself (create_graph=True)",
                remedy="compile without the part that is differentiated twice, or run it without torch.compile",
            )
        # Autograd raises if a saved tensor was written since; ``.data`` of a parameter may have been replaced, or another one lent.
        with ctx.function.lent(dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))):
            found = ctx.function.differentiate(ctx.outputs, gradients)
        of_inputs = [tensor.grad for tensor in ctx.inputs]
        return None, None, None, *(found.get(name) for name in ctx.names), *of_inputs
