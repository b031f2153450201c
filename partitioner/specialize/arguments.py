"""Match the arguments of calls with the inputs of a trace.

pm(x)     args, kwargs -> one value a traced input -> tensors, rows of the batch, inputs that require a gradient; agreed by all ranks

A process may leave out inputs that its stages do not read: it learns the number of rows from the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner.options.batch_rows import RowParts
from partitioner.options.precision import converted_inputs
from partitioner.runtime.arguments import (
    BoundInputs,
    GivenInputs,
    as_traced,
    given_inputs,
    is_as_traced,
    may_be_traced,
    missing_inputs,
    refuse_tangents,
    reorder_keywords,
)
from partitioner.runtime.base import Runtime
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import pytree

_NONE = "none"
"""The text on which ranks agree where no input requires a gradient."""


class TracedArguments:
    """The arguments that a model was traced with.

    Args:
        original: the model; the signature of its ``forward`` says which argument has which name.
        graph: its trace.
        dtype: floating-point inputs are converted to it; None: they are not converted.
    """

    def __init__(self, original: nn.Module, graph: ModelGraph, dtype: torch.dtype | None = None) -> None:
        self._signature, self._graph, self._dtype = inspect.signature(original.forward), graph, dtype
        self._forward = f"{type(original).__name__}.forward"

    def takes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_lacking: bool = False, exactly: bool = True) -> bool:
        """Return whether a call passes the arguments that were traced.

        Args:
            with_lacking: whether None may stand for a tensor: a rank may leave out what its stages do not read.
            exactly: whether values that are no tensors, and dtypes, are those that were traced; False: names and structure are enough,
                and tensors where there were tensors.
        """
        leaves = self.leaves(args, kwargs)
        return leaves is not None and all(
            (isinstance(value, Tensor) == (leaf.dtype is not None) or (with_lacking and value is None))
            and (not exactly or is_as_traced(self._graph, leaf, value, self._dtype))
            for leaf, value in zip(self._graph.inputs, leaves, strict=True)
        )

    def may_be_traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the model is traced anew for a call that passes other values or dtypes than those of the trace."""
        pairs = zip(self._graph.inputs, self.leaves(args, kwargs) or (), strict=True)
        return all(is_as_traced(self._graph, leaf, value, self._dtype) or may_be_traced(leaf, value) for leaf, value in pairs)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return the arguments of a call, one for each traced input; None if it has another structure."""
        args, kwargs = self.as_traced(args, kwargs)
        given, tree = pytree.tree_flatten((args, reorder_keywords(self._graph, dict(kwargs))))
        return given if tree == self._graph.input_tree else None

    def as_traced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with the arguments of the trace, positional or by keyword as there; unchanged if it cannot match."""
        args, kwargs = as_traced(self._graph, self._signature, args, dict(kwargs))
        return args, dict(kwargs)

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GivenInputs:
        """Return the inputs that a call gives.

        Raises:
            ConfigError: they do not fit the trace.
        """
        refuse_tangents(pytree.tree_leaves((args, kwargs)))
        if args or kwargs:  # a rank whose stages read no input may pass none
            self._check_signature(args, kwargs)
        args, kwargs = as_traced(self._graph, self._signature, *converted_inputs((args, dict(kwargs)), self._dtype))
        return given_inputs(self._graph, args, kwargs, any_batch=self._graph.batch is None)

    def _check_signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigError if ``forward`` of the model has no such arguments, or needs others besides."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"the call does not fit {self._forward}: {error}", remedy=f"pass arguments that fit forward{self._signature}"
            ) from error

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], runtime: Runtime, rows: RowParts) -> BoundInputs:
        """Return the tensors of one call. Ranks agree on the size of the batch and on the inputs that require gradients.

        Raises:
            ConfigError: the inputs do not fit the trace, or ranks differ in them.
        """
        own = self.leaves(args, kwargs) if self._graph.writes else None
        given = self.given(args, kwargs)
        question = "local batch size" if rows.inputs == "local" else "batch size"
        rows_passed = runtime.agree(question, given.batch, in_step=True)
        requiring = given.requiring_gradient
        is_unsure = bool(given.lacking) and not requiring  # an input that this process lacks may require a gradient
        answer = None if is_unsure else ", ".join(sorted(requiring)) or _NONE
        agreed = runtime.agree("inputs that require gradients", answer, in_step=True)
        if rows_passed is None:
            raise missing_inputs(given.lacking)
        if is_unsure and agreed not in (None, _NONE):
            requiring = frozenset(str(agreed).split(", "))
        batch, sizes = rows.batch_size(int(rows_passed)), self._agreed_sizes(given.sizes, runtime)
        return BoundInputs(given.tensors, batch, requiring, sizes, self._written(own or ()))

    def questions(self, inputs: BoundInputs, rows: RowParts) -> tuple[tuple[str, object], ...]:
        """Return the questions that ``bind`` asks all ranks for a call with all inputs, with the answers of this process."""
        batch = "local batch size" if rows.inputs == "local" else "batch size"
        requiring = ", ".join(sorted(inputs.requiring_gradient)) or _NONE
        sizes = ((f"{name} of the inputs", size) for name, size in inputs.sizes.items())
        return ((batch, rows.rows_passed(inputs.batch)), ("inputs that require gradients", requiring), *sizes)

    def _written(self, leaves: Sequence[Any]) -> dict[str, Tensor]:
        """Return placeholder -> tensor of those arguments that forward writes; ``leaves``: all arguments, one for each traced input."""
        pairs = zip(self._graph.inputs, leaves, strict=False)
        written = self._graph.writes
        return {leaf.placeholder: value for leaf, value in pairs if leaf.placeholder in written and isinstance(value, Tensor)}

    def _agreed_sizes(self, given: Mapping[str, int], runtime: Runtime) -> Mapping[str, int]:
        """Return the sizes of the inputs besides the batch; a process that lacks inputs learns them from the others."""
        agreed = {name: runtime.agree(f"{name} of the inputs", given.get(name), in_step=True) for name in self._graph.open_sizes}
        return {name: size if agreed[name] is None else int(str(agreed[name])) for name, size in self._graph.open_sizes.items()}
