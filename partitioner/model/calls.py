"""Match the arguments of a call with the traced inputs, and run each rank's program on its part of them.

pm(x)     args, kwargs -> one tensor an input -> a rank's rows of it, on the rank's device -> its program

A process may leave out inputs that its stages do not read: it learns the number of rows from the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.effects.views import ViewsOfCalls
from partitioner.model.effects.written_inputs import check_writable, own_memory, write_inputs
from partitioner.options.batch_rows import RowParts
from partitioner.runtime.arguments import BoundInputs, missing_inputs, values_on
from partitioner.runtime.base import Runtime
from partitioner.runtime.executor import ProgramSet
from partitioner.runtime.state.optimizers.step_count import OptimizerSteps
from partitioner.runtime.state.parameters import State
from partitioner.specialize.arguments import TracedArguments
from partitioner.specialize.sharded_model import ShardedModel
from passes.graph.symbolic_sizes import size_of
from passes.ir.graph import Input, ModelGraph, Output, Result, without_autocast
from passes.ir.program import at_batch
from passes.ir.torch_private import pytree

_AUTOCAST = ("cpu", "cuda")


def _no_autocast() -> AbstractContextManager[None]:
    """Return a context in which no autocast is enabled: casts are operations of the programs."""
    return without_autocast() if any(map(torch.is_autocast_enabled, _AUTOCAST)) else nullcontext()


class Calls:
    """Matches calls with the traced inputs, and runs programs on them.

    Args:
        arguments: of the trace.
        graph: the trace.
        runtime: runs the programs.
        state: the parameters, buffers and gradients of this process's ranks.
        rows: cuts batches into the rows of ranks.
        left: receives what calls leave in attributes of modules.
        dtype: floating-point inputs are converted to it; None: they are not converted.
    """

    def __init__(
        self,
        arguments: TracedArguments,
        graph: ModelGraph,
        runtime: Runtime,
        state: State,
        rows: RowParts,
        left: LeftAttributes,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.arguments: TracedArguments = arguments
        self._graph = graph
        self._runtime = runtime
        self._state = state
        self._rows = rows
        self._left = left
        left.declare(graph.edits)
        self._returned = tuple(dict.fromkeys(output.node for output in graph.leaves if output.node is not None))
        self._optimizer_steps = OptimizerSteps(state.named_parameters)
        self.dtype = dtype
        self._read: dict[tuple[ProgramSet, int], tuple[Input, ...]] = {}  # the inputs that a rank's program reads
        self._sharded_views: dict[ShardedModel, ViewsOfCalls] = {}

    @functools.cached_property
    def views(self) -> ViewsOfCalls:
        """The results that are views of one tensor."""
        return ViewsOfCalls(self._graph)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundInputs:
        """Return the tensors of one call; see ``TracedArguments.bind``."""
        if self.views:
            with self._runtime.failing_together():
                for views in self._sharded_views.values():
                    views.check_copies()
        bound = self.arguments.bind(args, kwargs, self._runtime, self._rows)
        if bound.written:
            with self._runtime.failing_together():
                check_writable(self._graph, bound)
        return bound

    def run(
        self, sharded: ShardedModel, programs: ProgramSet, inputs: BoundInputs, extra: Mapping[int, Mapping[str, Any]] | None = None
    ) -> dict[int, Any]:
        """Run the program of every rank of this process; return rank -> result.

        Args:
            extra: rank -> arguments of its program besides inputs of the model, and its parts of resident inputs.

        Raises:
            ConfigError: the call lacks an input that a rank reads.
        """
        arguments = {rank: self._arguments(sharded.rows, programs, inputs, rank) for rank in self._runtime.local_ranks}
        for rank, values in (extra or {}).items():
            device = self._runtime.devices[rank]
            for name, value in values.items():
                is_function = value is None or callable(value)
                arguments[rank][name] = (
                    value.detach().to(device) if isinstance(value, Tensor) else value if is_function else values_on(value, device)
                )
        if self._state.gradients.waiting:
            self._state.gradients.begin()
        with _no_autocast():
            if len(arguments) == self._runtime.n_ranks:
                results = self._runtime.run(programs, arguments)
            else:
                results = self._runtime.run(programs, arguments, self._common_tensors(inputs, extra), self._optimizer_steps.counts())
        with self._runtime.failing_together():
            self._state.finish()
        return results

    def _arguments(self, rows: RowParts, programs: ProgramSet, inputs: BoundInputs, rank: int) -> dict[str, Any]:
        """Return the rows of the batch that a rank computes, and its part of the inputs: detached, on its device and contiguous.

        Raises:
            ConfigError: the call lacks an input that the rank reads.
        """
        if (programs, rank) not in self._read:
            names = programs.executables[rank].placeholders
            self._read[programs, rank] = tuple(leaf for leaf in self._graph.inputs if leaf.placeholder in names and not leaf.resident)
        arguments: dict[str, Any] = {"batch": inputs.batch // rows.count}
        device, lacking = self._runtime.devices[rank], list[str]()
        for leaf in self._read[programs, rank]:
            tensor = inputs.tensors.get(str(leaf.placeholder))
            if tensor is None:
                lacking.append(leaf.name)
                continue
            part = tensor if rows.count == 1 else rows.part(tensor, leaf.batch_dim, rank)
            arguments[str(leaf.placeholder)] = part.detach().to(device).contiguous()
        if lacking:
            with self._runtime.failing_together():
                raise missing_inputs(lacking)
        return arguments

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this process, each part of one that is cut."""
        return [parameter for _, parameter in self._state.named_parameters()]

    @property
    def are_parameters_frozen(self) -> bool:
        """Whether this process has a part of every parameter, and none requires a gradient."""
        has_all = all(self._state.stored.get(placeholder) for placeholder in self._graph.parameters)
        return has_all and not any(parameter.requires_grad for parameter in self.parameters)

    def named_buffers(self) -> list[tuple[str, str, Tensor]]:
        """Return placeholder, name and tensor of every buffer of this process."""
        return [each for each in self._named_state() if each[0] in self._graph.buffers]

    def named_tensors(self, inputs: BoundInputs) -> list[tuple[str, str, Tensor]]:
        """Return placeholder, name in errors and tensor of each input of a call, and of every parameter and buffer of this process."""
        names = {leaf.placeholder: leaf.name for leaf in self._graph.inputs}
        return [(key, f"input {names[key]}", tensor) for key, tensor in inputs.tensors.items()] + self._named_state()

    def _named_state(self) -> list[tuple[str, str, Tensor]]:
        names = self._graph.weights
        return [(key, names[key], tensor) for key, tensors in self._state.originals().items() for tensor in tensors]

    def discarding_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which programs add no gradients to parameters."""
        return self._state.gradients.discarding()

    def _common_tensors(self, inputs: BoundInputs, extra: Mapping[int, Mapping[str, Any]] | None) -> dict[str, Tensor]:
        """Return name -> tensor that ranks compare: ``"x"`` on all, ``"target of rows 1"`` on ranks with the second part of the batch."""
        (rank,) = self._runtime.local_ranks
        of_rows = f" of rows {self._rows.part_index(rank)}" if self._rows.count > 1 else ""
        names = {leaf.placeholder: leaf.name for leaf in self._graph.inputs}
        suffix = of_rows if self._rows.inputs == "local" else ""
        tensors = {f"{names[placeholder]}{suffix}": tensor for placeholder, tensor in inputs.tensors.items()}
        for argument, name in (("target", "target"), ("output_gradients", "gradient of the result")):
            leaves = pytree.tree_leaves(extra[rank].get(argument)) if extra else []
            tensors |= {f"{name}{of_rows}": leaf for leaf in leaves[:1] if isinstance(leaf, Tensor)}
        return tensors

    def input_gradient_names(self, wanted: frozenset[str]) -> list[str]:
        """Return the inputs whose gradients are wanted, in the order in which programs return the gradients."""
        return [leaf.placeholder for leaf in self._graph.inputs if leaf.placeholder is not None and leaf.placeholder in wanted]

    def rows_passed(self, batch: int) -> int:
        """Return the rows of a batch that this process passes, and gets results for."""
        return self._rows.rows_passed(batch)

    def result(self, sharded: ShardedModel, values: Sequence[Tensor], inputs: BoundInputs) -> Any:
        """Return the model's outputs in their original structure, from the computed values and the constants among its results.

        New values of inputs are written into the caller's tensors, and attributes of modules are set. Results that are views of one
        tensor are taken of it.
        """
        rows = self.rows_passed(inputs.batch)
        lowered = sharded.graph  # it may leave out attributes
        values_of_nodes = dict(zip(lowered.returned, own_memory(values, inputs), strict=True))
        pairs = [pair for pair in zip(self._graph.outputs, lowered.outputs, strict=True) if pair[1].node is not None]
        by_node = {str(output.node): values_of_nodes[str(own.node)] for output, own in pairs}
        self._write(by_node, inputs)
        if sharded not in self._sharded_views:
            self._sharded_views[sharded] = ViewsOfCalls(sharded.whole)
        if views := self._sharded_views[sharded]:
            names = {str(own.node): str(output.node) for output, own in zip(self._graph.outputs, sharded.whole.outputs, strict=True)}
            whole = {own: by_node[name] for own, name in names.items() if name in by_node}
            by_node = {names[own]: value for own, value in views.taken(whole, {**inputs.tensors, **inputs.written}, rows).items()}
        if self._graph.edits:
            places = enumerate(self._graph.outputs)
            is_there = {place: output for place, output in places if output.node is None or output.node in by_node}
            self._left.apply(self._graph.edits, {place: self._leaf(each, by_node, inputs, rows) for place, each in is_there.items()})
        leaves = [self._leaf(output, by_node, inputs, rows) for output in self._graph.leaves]
        return pytree.tree_unflatten(leaves, self._graph.output_tree)

    def _write(self, by_node: Mapping[str, Tensor], inputs: BoundInputs) -> None:
        """Write new values of inputs, by node, into the caller's tensors."""
        if inputs.written:
            with self._runtime.failing_together():
                write_inputs(self._graph, by_node, inputs)

    def step(
        self, sharded: ShardedModel, programs: ProgramSet, inputs: BoundInputs, extra: Mapping[int, Mapping[str, Any]]
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Run the programs of a training step and write new values of inputs; return the loss and the gradients of inputs."""
        loss, gradients, *written = self.run(sharded, programs, inputs, extra)[self._runtime.local_ranks[0]]
        for values in written:
            names = dict.fromkeys(output.node for output in self._graph.writes.values() if output.node is not None)
            with torch.no_grad():
                self._write(dict(zip(names, own_memory(values, inputs), strict=True)), inputs)
        self._leave_known(inputs)
        assert isinstance(loss, Tensor)
        return loss, gradients

    def _leave_known(self, inputs: BoundInputs) -> None:
        """Leave in attributes what no node computes, such as counts of calls and rows, and an error in place of what nodes compute."""
        outputs, rows = enumerate(self._graph.outputs), self.rows_passed(inputs.batch)
        known = {place: self._leaf(output, {}, inputs, rows) for place, output in outputs if output.node is None}
        is_known = [all(leaf.index in known for leaf in edit.leaves if isinstance(leaf, Result)) for edit in self._graph.edits]
        self._left.apply(list(itertools.compress(self._graph.edits, is_known)), known)
        why = "train_step() gives tensors in attributes to its loss function alone, and keeps none"
        unknown = [edit for edit, known_edit in zip(self._graph.edits, is_known, strict=True) if not known_edit]
        self._left.forget(unknown, why)

    @staticmethod
    def _leaf(output: Output, by_node: Mapping[str, Tensor], inputs: BoundInputs, rows: int) -> Any:
        """Return a leaf of the model's result: a constant, a computed value, or a written argument itself."""
        if output.node is None:
            return at_batch(output.constant, rows)
        given = inputs.written.get(output.argument or "")
        return by_node[output.node] if given is None else given

    def result_shapes(self, rows: int) -> list[tuple[list[int], torch.dtype]]:
        """Return sizes and dtype of each returned node, of a trace that serves this number of rows."""
        traced = {node.name: node.meta["val"] for node in self._graph.graph.nodes if node.name in self._returned}
        values = [traced[name] for name in self._returned]
        return [([at_batch(size_of(size), rows) for size in value.shape], value.dtype) for value in values]
