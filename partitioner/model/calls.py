"""What a call brings, and what each rank of this process gets of it.

pm(x)     args, kwargs -> one tensor an input -> a rank's rows of it, on the rank's device -> its program

A process may leave out what its stages do not read: it learns from the others how many rows the batch has.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.lowering.lowering import Lowering
from partitioner.options.batch_rows import RowParts
from partitioner.options.precision import converted_inputs
from partitioner.runtime.arguments import BoundInputs, as_traced, given_inputs, missing_inputs, to_device, values_on
from partitioner.runtime.base import Runtime
from partitioner.runtime.executor import ProgramSet
from partitioner.runtime.state.optimizers.step_count import OptimizerSteps
from partitioner.runtime.state.parameters import State
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph, without_autocast
from passes.ir.program import at_batch
from passes.ir.torch_private import pytree

__all__ = ["Calls"]

_NONE = "none"
"""What ranks tell each other where no input requires a gradient."""


class Calls:
    """Matches calls with the traced inputs, and runs programs on them.

    Args:
        original: the model; its signature says which argument has which name.
        graph: of the model.
        runtime: runs programs.
        state: what programs read, and where their gradients go.
        rows: what each process passes.
        dtype: what floating-point inputs are converted to, if anything.
    """

    def __init__(
        self, original: nn.Module, graph: ModelGraph, runtime: Runtime, state: State, rows: RowParts, dtype: torch.dtype | None = None
    ) -> None:
        self._signature = inspect.signature(original.forward)
        self._graph = graph
        self._runtime = runtime
        self._state = state
        self._rows = rows
        self._optimizer_steps = OptimizerSteps(state.named_parameters)
        self.dtype = dtype

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundInputs:
        """The tensors of one call, on which all ranks agree.

        Raises:
            ConfigError: they do not fit what was traced, or ranks differ in them.
        """
        self._check_autocast()
        args, kwargs = as_traced(self._graph, self._signature, *converted_inputs((args, dict(kwargs)), self.dtype))
        given = given_inputs(self._graph, args, kwargs, any_batch=self._graph.batch is None)
        kind = "local batch size" if self._rows.inputs == "local" else "batch size"
        passed = self._runtime.agree(kind, given.batch, in_step=True)
        wanted = given.requiring_gradient
        unsure = bool(given.lacking) and not wanted
        said = None if unsure else ", ".join(sorted(wanted)) or _NONE
        told = self._runtime.agree("inputs that require gradients", said, in_step=True)
        if passed is None:
            raise missing_inputs(given.lacking)
        requiring = wanted if not unsure or told in (None, _NONE) else frozenset(str(told).split(", "))
        return BoundInputs(given.tensors, self._rows.whole(int(passed)), requiring)

    def run(
        self, lowering: Lowering, programs: ProgramSet, inputs: BoundInputs, extra: Mapping[int, Mapping[str, Any]] | None = None
    ) -> dict[int, Any]:
        """Run the program of every rank of this process; returns each one's result.

        Args:
            extra: rank -> what its program takes besides inputs of the model.

        Raises:
            ConfigError: a rank was not given an input that it reads.
        """
        given: dict[int, dict[str, Any]] = {}
        for rank in self._runtime.local_ranks:
            names = programs.programs[rank].placeholders
            lacking = [leaf.name for leaf in self._graph.inputs if leaf.placeholder in names and leaf.placeholder not in inputs.tensors]
            if lacking:
                with self._runtime.failing_together():
                    raise missing_inputs(lacking)
            given[rank] = {
                "batch": inputs.batch // lowering.rows.count,
                **to_device(lowering.rows.of_inputs(self._graph, inputs.tensors, rank), names, self._runtime.devices[rank]),
                **values_on(extra[rank] if extra else {}, self._runtime.devices[rank]),
            }
        self._state.gradients.begin()
        with without_autocast():  # casts are operations of the programs
            if len(given) == self._runtime.n_ranks:
                results = self._runtime.run(programs, given)
            else:
                results = self._runtime.run(programs, given, self._passed(inputs, extra), self._optimizer_steps.counts())
        with self._runtime.failing_together():
            self._state.finish()
        return results

    def _passed(self, inputs: BoundInputs, extra: Mapping[int, Mapping[str, Any]] | None) -> dict[str, Tensor]:
        """What the script passes to this call that other ranks pass, too; of its own rows, that other ranks of the same rows pass."""
        (rank,) = self._runtime.local_ranks
        rows = f" of rows {self._rows.place(rank)}" if self._rows.count > 1 else ""
        names = {leaf.placeholder: leaf.name for leaf in self._graph.inputs}
        whole = rows if self._rows.inputs == "local" else ""
        found = {f"{names[placeholder]}{whole}": tensor for placeholder, tensor in inputs.tensors.items()}
        leaves = pytree.tree_leaves(extra[rank].get("target")) if extra else []
        return found | {f"target{rows}": leaf for leaf in leaves[:1] if isinstance(leaf, Tensor)}

    def _check_autocast(self) -> None:
        """Raise ConfigError for a call inside an autocast that the programs were not traced in."""
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                dtype = torch.get_autocast_dtype(device_type)
                if self._graph.autocast is None or self._graph.autocast.dtype != dtype:
                    raise ConfigError(
                        f"the call is inside torch.autocast({device_type!r}, {dtype}), which the model was not traced in",
                        remedy='partition(model, ..., precision="bf16-mixed" or "16-mixed") computes as inside of one',
                    )

    def differentiated(self, wanted: frozenset[str]) -> list[str]:
        """Return the inputs whose gradients are wanted, in the order in which programs return the gradients."""
        return [leaf.placeholder for leaf in self._graph.inputs if leaf.placeholder is not None and leaf.placeholder in wanted]

    def result(self, values: Sequence[Tensor], batch: int) -> Any:
        """Return the model's outputs in their original structure, from the computed values and the constants among its results."""
        batch = self._rows.passed(batch)
        by_node = dict(zip(self._graph.returned, values, strict=True))
        leaves = [at_batch(output.constant, batch) if output.node is None else by_node[output.node] for output in self._graph.outputs]
        return pytree.tree_unflatten(leaves, self._graph.output_tree)
