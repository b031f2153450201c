"""The models of a sweep: built once, traced once, identified by a fingerprint of their graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from cost_models.hardware.clusters import Cluster
from partitioner.experiments.models.factory import FactoryResult, call_factory, check_factory_result, source_name
from partitioner.options.precision import autocast_of, converted_inputs, converted_model, true_dtype
from partitioner.specialize.simulate_plan import Traced
from partitioner.tracing.inputs.batch_dims import BatchDims
from partitioner.tracing.inputs.example import find_example_inputs
from partitioner.tracing.trace import trace
from passes.graph.equivalence import graph_digest
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph

ModelSource = str | nn.Module | Callable[[], Any] | tuple[Any, ...]
"""A model of a sweep: a text that ``call_factory`` takes, a function that returns ``(model, args)`` or ``(model, args, kwargs)``, such a
tuple itself, or a module whose example inputs can be inferred."""

Models = Mapping[str, ModelSource] | Sequence[ModelSource] | ModelSource
"""Models by name, a list of models that are named after their functions, files or classes, or one model."""


@dataclass(frozen=True)
class Subject:
    """A traced model.

    Attributes:
        name: its name in the sweep.
        made: the module and its inputs; ``args`` is None if they are inferred.
        graph: the traced graph.
        fingerprint: a digest of the graph, its sizes and its mode; different models have different digests.
        modules: the paths of its modules.
        batch_dims: the batch dimension of inputs by name, as ``partition`` takes them.
    """

    name: str
    made: FactoryResult
    graph: ModelGraph
    fingerprint: str
    modules: frozenset[str]
    batch_dims: BatchDims | None = None

    @property
    def traced(self) -> Traced:
        return Traced(self.made.model, self.graph, self.made.args, self.made.kwargs, self.batch_dims)


def name_models(models: Models) -> dict[str, ModelSource]:
    """Return the models by name; a model without a given name is named by ``_default_name``.

    Raises:
        ConfigError: two models have the same name, or there is no model.
    """
    if isinstance(models, Mapping):
        named = dict(models)
    else:
        listed = [models] if isinstance(models, str | nn.Module | tuple) or callable(models) else list(models)
        names = [_default_name(source) for source in listed]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"several models are called {', '.join(twice)}", remedy='name them: models={"small": ..., "large": ...}')
        named = dict(zip(names, listed, strict=True))
    if not named:
        raise ConfigError("`models` is empty", remedy='pass models={"net": "net.py:factory"}')
    return named


def _default_name(source: ModelSource) -> str:
    """Return ``"gpt"`` for ``"net.py:gpt"`` or a function ``gpt``, ``"net"`` for ``"net.py:factory"``, else the class of the model."""
    if isinstance(source, str):
        return source_name(source)
    if isinstance(source, tuple):
        return type(source[0]).__name__ if source else "()"
    return type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", type(source).__name__)


def trace_subject(
    name: str,
    source: ModelSource,
    training: bool | None,
    *,
    precision: str | None = None,
    batch_dims: BatchDims | None = None,
    hardware: Cluster | None = None,
) -> Subject:
    """Build a model and trace it, in training or evaluation mode; ``training=None`` keeps the model's mode.

    Args:
        precision, batch_dims: as ``partition`` takes them.
        hardware: to plan for; mixed precision of a model on the meta device depends on its kind.

    Raises:
        TraceError: the model cannot be traced.
        ConfigError: the source yields no model, or its inputs cannot be inferred.
    """
    made = _converted(make_model(name, source), precision)
    autocast = None if hardware is None else autocast_of(precision, made.model, hardware)
    kwargs = made.kwargs if made.args is not None else None
    graph = trace(made.model, made.args, kwargs, training, autocast=autocast, batch_dims=batch_dims)
    return Subject(
        name, made, graph, graph_digest(graph, requires_grad=True), frozenset(path for path, _ in made.model.named_modules()), batch_dims
    )


def _converted(made: FactoryResult, precision: str | None) -> FactoryResult:
    """Return a model and its inputs in the dtype of a precision, if it converts them."""
    dtype = true_dtype(precision)
    if dtype is None:
        return made
    model = converted_model(made.model, dtype)
    example = find_example_inputs(model) if made.args is None else (made.args, dict(made.kwargs))
    return FactoryResult(model, *converted_inputs(example, dtype))


def make_model(name: str, source: ModelSource) -> FactoryResult:
    """Build a model with its inputs; raise ConfigError if the source yields none."""
    if isinstance(source, str):
        return call_factory(source)
    if isinstance(source, nn.Module):
        return FactoryResult(source, None, {})
    return check_factory_result(name, source if isinstance(source, tuple) else source())
