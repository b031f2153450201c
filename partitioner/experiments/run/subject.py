"""The models of a sweep: made once, traced once, known by what they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from partitioner.experiments.run.factory import Made, call_factory, checked
from partitioner.tracing.trace import trace
from passes.graph.fingerprint import target_name
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import pytree

__all__ = ["ModelSource", "Models", "Subject", "make_model", "name_models", "trace_subject"]

ModelSource = str | nn.Module | Callable[[], Any] | tuple[Any, ...]
"""A model of a sweep: ``"net.py:factory"``, a function that returns ``(model, args)`` or ``(model, args, kwargs)``, such a tuple itself, or
a module whose example inputs can be found."""

Models = Mapping[str, ModelSource] | Sequence[ModelSource] | ModelSource
"""Models by name, a list of models that have names of their own, or one."""


@dataclass(frozen=True)
class Subject:
    """A traced model.

    Attributes:
        name: in the sweep.
        made: the module and its inputs; ``args`` is None where they are found.
        graph: what it computes.
        fingerprint: a digest of the graph, its sizes and its mode: another model, another digest.
        modules: names of its modules.
    """

    name: str
    made: Made
    graph: ModelGraph
    fingerprint: str
    modules: frozenset[str]


def name_models(models: Models) -> dict[str, ModelSource]:
    """The models by name.

    Raises:
        ConfigError: two have one name, or there is none.
    """
    if isinstance(models, Mapping):
        named = dict(models)
    else:
        listed = [models] if isinstance(models, str | nn.Module | tuple) or callable(models) else list(models)
        names = [_name(source) for source in listed]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"several models are called {', '.join(twice)}", remedy='name them: models={"small": ..., "large": ...}')
        named = dict(zip(names, listed, strict=True))
    if not named:
        raise ConfigError("a sweep over no models asks for nothing", remedy='pass models={"net": "net.py:factory"}')
    return named


def _name(source: ModelSource) -> str:
    if isinstance(source, str):
        path, _, function = source.rpartition(":")
        return Path(path).stem if function in ("factory", "main") else function or source
    if isinstance(source, tuple):
        return type(source[0]).__name__ if source else "()"
    return type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", type(source).__name__)


def trace_subject(name: str, source: ModelSource, training: bool | None) -> Subject:
    """Make a model and trace it.

    Raises:
        TraceError: it cannot be made one graph.
        ConfigError: it is no model, or its inputs cannot be found.
    """
    made = make_model(name, source)
    graph = trace(made.model, made.args, made.kwargs if made.args is not None else None, training)
    return Subject(name, made, graph, _fingerprint(graph), frozenset(path for path, _ in made.model.named_modules()))


def make_model(name: str, source: ModelSource) -> Made:
    """The module and its inputs; raises ConfigError where there are none."""
    if isinstance(source, str):
        return call_factory(source)
    if isinstance(source, nn.Module):
        return Made(source, None, {})
    return checked(name, source if isinstance(source, tuple) else source())


def _fingerprint(graph: ModelGraph) -> str:
    """A digest of every call with its sizes; names of symbols do not count, for they are not the same everywhere."""
    lines = [f"{graph.batch is None} {graph.batch_size} {graph.training} {graph.outputs}"]
    lines += [f"{node.op} {node.name} {target_name(node)} {node.args} {node.kwargs} {_described(node)}" for node in graph.graph.nodes]
    text = "\n".join(lines)
    if graph.batch is not None:
        text = text.replace(str(graph.batch), "batch")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(node: fx.Node) -> str:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return ", ".join(f"{leaf.dtype} {tuple(leaf.shape)} {leaf.requires_grad}" for leaf in leaves if isinstance(leaf, Tensor))
