"""Group the operations of stages into module runs, one box of a diagram each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.autograd.staged_model import SplitModel
from passes.graph.provenance import module_path
from passes.ir.graph import ModelGraph
from passes.stages.split import StageGraph

__all__ = ["ModuleRun", "module_runs", "suitable_depth"]

_MOST_RUNS, _DEEPEST = 20, 8
"""Largest number of runs of a pipeline that fit a page; largest depth that is tried."""


@dataclass(frozen=True)
class ModuleRun:
    """Consecutive operations of one stage and one module.

    Attributes:
        stage: index of the stage.
        module: the module's path, truncated to the depth; empty for the model itself.
        operations: nodes of the stage's graph.
        parameters: placeholders of parameters that no earlier run of the stage reads.
    """

    stage: int
    module: str
    operations: tuple[fx.Node, ...]
    parameters: tuple[fx.Node, ...]


def suitable_depth(lowered: SplitModel) -> int:
    """Return the largest module depth whose runs fit a page; 1 if none does."""
    fitting = [depth for depth in range(1, _DEEPEST + 1) if len(module_runs(lowered, depth)) <= _MOST_RUNS]
    return max(fitting, default=1)


def module_runs(lowered: SplitModel, depth: int) -> list[ModuleRun]:
    """Return the runs of a pipeline, in order; at depth 2, ``blocks.0.up`` belongs to module ``blocks.0``."""
    return [run for stage in lowered.stages for run in _runs(lowered.graph, stage, depth)]


def _runs(graph: ModelGraph, stage: StageGraph, depth: int) -> list[ModuleRun]:
    """Group the calls of a stage that yield tensors by module, then give each parameter to the first run that reads it."""
    calls = [node for node in stage.module.graph.nodes if node.op == "call_function" and _is_tensor(node.meta.get("val"))]
    runs, read_before = [], set[fx.Node]()
    for module, group in itertools.groupby(calls, key=lambda node: ".".join(_module(node).split(".")[:depth])):
        nodes = tuple(group)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.name in graph.parameters)
        runs.append(ModuleRun(stage.index, module, nodes, tuple(source for source in read if source not in read_before)))
        read_before.update(read)
    return runs


def _module(node: fx.Node) -> str:
    """Return the path of a node's module; a node without one, for example a cast of a parameter, takes that of its first user."""
    while not node.meta.get("nn_module_stack") and node.users and next(iter(node.users)).op != "output":
        node = next(iter(node.users))
    return module_path(node)


def _is_tensor(value: object) -> bool:
    """Return whether a node's value is a tensor, or a tuple or list with one."""
    values: Sequence[object] = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(element, Tensor) for element in values)
