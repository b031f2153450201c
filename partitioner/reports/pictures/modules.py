"""Which operations are drawn as one box: those of one module, at the depth at which a picture still fits a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from passes.autograd.staged_model import LoweredStages
from passes.graph.provenance import module_path
from passes.ir.graph import ModelGraph
from passes.stages.split import StageGraph

__all__ = ["ModuleRun", "module_runs", "suitable_depth"]

_FITTING = 20
"""Boxes of one pipeline."""

_DEEPEST = 8


@dataclass(frozen=True)
class ModuleRun:
    """Operations that follow each other in one stage and one module.

    Attributes:
        stage: the stage.
        module: the path, cut off at the depth; empty for the model itself.
        operations: names of the nodes.
        parameters: placeholders that they read first.
    """

    stage: int
    module: str
    operations: tuple[str, ...]
    parameters: tuple[str, ...]


def suitable_depth(lowered: LoweredStages) -> int:
    """The deepest level of modules whose runs fit a page; 1 where none does."""
    fitting = [depth for depth in range(1, _DEEPEST + 1) if len(module_runs(lowered, depth)) <= _FITTING]
    return max(fitting, default=1)


def module_runs(lowered: LoweredStages, depth: int) -> list[ModuleRun]:
    """The runs of a pipeline, in order.

    Args:
        depth: how many parts of a module's path tell modules apart: at 2, ``blocks.0.up`` belongs to ``blocks.0``.
    """
    return [run for stage in lowered.stages for run in _runs(lowered.graph, stage, depth)]


def _runs(graph: ModelGraph, stage: StageGraph, depth: int) -> list[ModuleRun]:
    groups: list[tuple[str, list[fx.Node]]] = []
    for node in stage.module.graph.nodes:
        if node.op != "call_function" or not _is_tensor(node.meta.get("val")):
            continue
        module = ".".join(_module(node).split(".")[:depth])  # what a container holds is told apart by its number
        if groups and groups[-1][0] == module:
            groups[-1][1].append(node)
        else:
            groups.append((module, [node]))
    runs, read = [], set[str]()
    for module, nodes in groups:
        found = dict.fromkeys(source.name for node in nodes for source in node.all_input_nodes if source.name in graph.parameters)
        runs.append(ModuleRun(stage.index, module, tuple(node.name for node in nodes), tuple(name for name in found if name not in read)))
        read.update(found)
    return runs


def _module(node: fx.Node) -> str:
    """The module of a node; of what prepares a parameter for a call, that of the call."""
    while not node.meta.get("nn_module_stack") and node.users and next(iter(node.users)).op != "output":
        node = next(iter(node.users))
    return module_path(node)


def _is_tensor(value: object) -> bool:
    found: Sequence[object] = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(each, Tensor) for each in found)
