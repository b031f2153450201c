"""Call a partitioned model as a function of its parameters and buffers, which stay the caller's.

    result = f(parameters, buffers, inputs)        autograd gets the gradients of parameters and inputs, as from any operation

The caller's optimizer, hooks and accumulation see their own parameters; the partitioned model computes in the memory of these where a
rank can read it there, and with copies where it cannot (parts, other devices). ``torch.compile``'s backend calls a model so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from partitioner.runtime.state.gather import GatheredState
from partitioner.specialize.trace import Trace
from passes.graph.aliasing import mutated_arguments
from passes.ir.errors import ConfigError
from passes.ir.torch_private import TreeSpec, tree_flatten, tree_unflatten


class FunctionalModel:
    """A partitioned model as a function of its parameters, buffers and inputs.

    Args:
        trace: of the partitioned model.
        run: calls it with positional inputs.
        state: the values of the first call. Processes that start with others would train other models: they raise ConfigError.
    """

    def __init__(self, trace: Trace, run: Callable[[Sequence[Tensor]], Any], state: Mapping[str, Tensor]) -> None:
        self.trace, self._call_model = trace, run
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
        self.lend(state)
        result = self._call_model(inputs)
        with torch.no_grad():
            for name, value in self._gathered.whole(name for name in self._written if name in state).items():
                if state[name] is not value:
                    state[name].copy_(value)
        return result

    def lend(self, state: Mapping[str, Tensor]) -> None:
        """Let the programs compute with the caller's tensors."""
        with torch.no_grad():
            for name, tensor in state.items():
                self._state.lend(name, tensor.detach(), is_written=name in self._written)
            self._state.refresh()

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
        parameters = [each.parameter for each in self._state.stored_parameters()]
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        found = self._gathered.gradients()
        for parameter in parameters:
            parameter.grad = None
        return found


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
        ctx.function.lend(dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True)))
        found = ctx.function.differentiate(ctx.outputs, gradients)
        of_inputs = [tensor.grad for tensor in ctx.inputs]
        return None, None, None, *(found.get(name) for name in ctx.names), *of_inputs
