"""The backend "partitioner" of ``torch.compile``.

    torch.compile(model, backend="partitioner", options={"devices": 4, "mode": "tensor"})

Dynamo calls ``partitioner_backend`` with each graph that it makes of the model: one, or the parts between graph breaks. A graph is
partitioned when it is first called, so that errors reach the user as they are; Dynamo wraps those of a backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.api import partition
from partitioner.integrations.interface import checked_options
from partitioner.integrations.torch_compile.graph_model import GraphModel, number_of, read_arguments
from partitioner.model.module.functional import FunctionalModel
from passes.ir.errors import ConfigError, level_of_caller
from passes.ir.torch_private import graph_break, is_resumed

_GIVEN = {
    "model": "it is the one that is compiled",
    "example_inputs": "they are those of the first call",
    "example_kwargs": "they are those of the first call",
    "training": "call train() or eval() of the model",
    "inputs": "every process passes the whole batch",
}
"""Arguments of ``partition`` that are no options, and their replacements."""

_MANY = 8
"""Distinct sizes and numbers after which a warning says that each of them is partitioned anew."""


def partitioner_backend(module: fx.GraphModule, _example_inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
    """Return a function that computes a graph of Dynamo, partitioned: the backend "partitioner" of ``torch.compile``.

    Args:
        module: the graph; parameters and buffers are among its arguments.
        _example_inputs: not read: the first call has values.
        keywords: ``options``: the arguments of ``partition``, except those that describe the model and its inputs.
    """
    return PartitionedGraph(module, keywords)


class PartitionedGraph:
    """A graph of Dynamo, partitioned when it is first called; again for sizes, other than of the batch, and numbers that differ.

    Args:
        module: the graph.
        keywords: of ``torch.compile``: ``options`` and ``mode``, if the user passes them.
    """

    def __init__(self, module: fx.GraphModule, keywords: Mapping[str, Any]) -> None:
        self._module = module
        self._keywords = keywords
        self._arguments = read_arguments(module.graph)
        self._partitioned: list[tuple[tuple[Any, ...], FunctionalModel]] = []  # with the numbers that are constants in it

    def __call__(self, *values: Any) -> Any:
        """Compute the graph.

        Raises:
            ConfigError: an option is unknown, or does not fit.
            PartitionError: as ``partition`` raises it.
        """
        options = _checked_options(self._keywords)
        named = list(zip(self._arguments, values, strict=True))
        state = {each.name: value for each, value in named if each.kind == "state"}
        inputs = [value for each, value in named if each.kind == "input"]
        if not state and (is_resumed(self._module) or graph_break(self._module) is not None):
            return self._module(*values)  # what stands between graph breaks and has no parameters is nothing to distribute
        numbers = tuple(number_of(value) for each, value in named if each.kind == "number")
        for known_numbers, function in self._partitioned:
            if known_numbers == numbers and _fits(function, inputs):
                return function(state, inputs)
        function = self._partition(options, values, state, inputs)
        self._partitioned.append((numbers, function))
        return function(state, inputs)

    def _partition(
        self, options: Mapping[str, Any], values: Sequence[Any], state: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> FunctionalModel:
        """Partition the graph for the sizes and numbers of a call."""
        self._warn()
        model = GraphModel(self._module, self._arguments, values)
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*model.parameters(), *inputs))
        precision = options.get("precision") or _ambient_precision()
        try:
            partitioned = partition(model, **{**options, "precision": precision}, example_inputs=tuple(inputs), training=trains)
        except ConfigError as error:
            if options.get("n_microbatches", 1) == 1 or any(each.kind == "size" for each in self._arguments):
                raise
            hint = "torch.compile(..., dynamic=True), which leaves open the batch size that is a constant in this graph"
            raise ConfigError(error.problem, place=error.place, remedy=f"{error.remedy}; or {hint}") from error
        return FunctionalModel(partitioned.traced, lambda inputs: partitioned(*inputs), state)

    def _warn(self) -> None:
        """Warn of a graph break, and of arguments that differ in each call."""
        found = graph_break(self._module)
        if found is not None and not self._partitioned:
            reason, file, line = found
            warnings.warn(
                f"the model breaks into parts at {file}:{line} ({reason}): each part is planned and run by itself\n"
                f"  remedy: torch.compile(..., fullgraph=True) refuses to, and says what to change there",
                stacklevel=level_of_caller(),
            )
        if len(self._partitioned) == _MANY:
            differing = ", ".join(each.placeholder for each in self._arguments if each.kind in ("size", "number")) or "the sizes of inputs"
            warnings.warn(
                f"the model was partitioned {_MANY} times for different values of {differing}, and is for each further one\n"
                f"  remedy: pad inputs to a few sizes; pass numbers that change in each call as tensors",
                stacklevel=level_of_caller(),
            )


def _checked_options(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options; raise ConfigError for those that ``partition`` does not take, or that do not apply here."""
    if "mode" in keywords:
        raise ConfigError(
            f"torch.compile(mode={keywords['mode']!r}) is an option of Inductor",
            remedy='pass the mode of the partition among the options: options={"mode": "tensor"}',
        )
    options = checked_options(keywords.get("options") or {}, _GIVEN, "the backend")
    if str(options.get("precision", "")).endswith("-true"):
        raise ConfigError(
            f"precision={options['precision']!r} would convert parameters that stay the model's own",
            remedy="convert the model before: model.to(torch.bfloat16)",
        )
    return options


def _ambient_precision() -> str | None:
    """Return the precision of the autocast around the call, by its name."""
    for device_type in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device_type):
            return {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}.get(torch.get_autocast_dtype(device_type))
    return None


def _fits(function: FunctionalModel, inputs: Sequence[Tensor]) -> bool:
    """Return whether inputs have the sizes of a trace, apart from the batch."""
    leaves = function.trace.graph.inputs
    return all(
        dimension == leaf.batch_dim or size == value.shape[dimension]
        for leaf, value in zip(leaves, inputs, strict=True)
        for dimension, size in enumerate(leaf.shape)
    )
