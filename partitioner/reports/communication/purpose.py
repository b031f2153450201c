"""The purpose of a collective: which parameters, gradients or results it moves, over which mesh dimension, and why."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from partitioner.reports.module_names import short_name
from passes.emit.coalesce_collectives import is_held
from passes.graph.provenance import module_path
from passes.ir.comm.primitives import all_gather, all_reduce, all_to_all, halo_add, halo_exchange, reduce_scatter, wait
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.program import StoreGradients
from passes.ir.schedule import Action, ActionKind
from passes.spmd.decompose.expert_routes import ROUTE
from passes.spmd.decompose.ring_attention import RING, ZIGZAG


@dataclass(frozen=True)
class Purpose:
    """The purpose of a collective; reports give one line to all collectives of one purpose.

    Attributes:
        subject: before the names: ``"gradient of "``.
        names: parameters, modules or values.
        operation: the operation on several tensors of different shapes: ``"summed"``; empty if their one shape is reported instead.
        why: the reason, in words.
    """

    subject: str
    names: tuple[str, ...]
    operation: str
    why: str


_WORDS: Mapping[Any, tuple[str, str]] = {
    all_reduce: ("summed", "each rank has a part of the sum"),
    reduce_scatter: ("summed and cut", "each rank needs its part of the sum"),
    all_gather: ("put together", "what reads it needs it whole"),
    all_to_all: ("exchanged", "what reads it is cut over another axis"),
    halo_exchange: ("fetched", "windows reach beyond the rank's own part"),
    halo_add: ("given back", "the gradient of halo elements"),
}
"""Collective -> the operation in words; the reason, for activations and their gradients."""

_REASONS: Mapping[str, str] = {
    RING: "keys and values go round the ranks",
    ROUTE: "rows go to the rank that stores their expert, and come back",
    ZIGZAG: "each rank gets an early and a late piece of the sequence, or gives them back",
}
"""The reason of a message that is marked so."""


def dimensions_of(group: Sequence[int], mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh dimensions along which the ranks of a group differ."""
    coordinates = [mesh.coordinate(rank) for rank in group]
    return tuple(name for name in mesh.names if len({coordinate[name] for coordinate in coordinates}) > 1)


class Purposes:
    """Finds the purposes of the collectives of one program.

    Args:
        graph: the model's graph, for the original names of parameters and inputs.
        program: the program of one rank.
    """

    def __init__(self, graph: ModelGraph, program: fx.GraphModule) -> None:
        self._names = graph.parameters
        self._inputs = {leaf.placeholder: leaf.name for leaf in graph.inputs}
        self._stores = {name: module for name, module in program.named_children() if isinstance(module, StoreGradients)}

    def of(self, node: fx.Node) -> Purpose:
        """Return the purpose of a collective.

        The cases, in this order: all-reduces that the emitter wrote; stored parameters; gradients that are stored; results of the model;
        activations, by module; their gradients, by module; other values.
        """
        function: Any = node.target
        operation, reason = _WORDS[function]
        marks = set().union(*(item.meta.get("custom") or () for item in items_of(node)))
        reason = next((_REASONS[mark] for mark in _REASONS if mark in marks), reason)
        operands: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        section = node.meta.get("section")
        is_backward = isinstance(section, Action) and section.kind != ActionKind.FORWARD
        if node.meta.get("reduces") is not None:
            return self._reduced(operation, node.meta["reduces"])
        if operands and all(is_held(operand) for operand in operands):
            again = " again for the backward" if is_backward else ""
            names = tuple(short_name(self._parameter(operand)) for operand in operands)
            return Purpose("", names, operation, f"held in parts, needed whole{again}")
        items = items_of(node)
        gradients = [name for item in items if (name := self._parameter_of_gradient(item, section))]
        if function is reduce_scatter and len(gradients) == len(operands):
            return Purpose("gradient of ", tuple(gradients), operation, "each rank keeps its part")
        if section == "results":
            return Purpose("", tuple(operand.name for operand in operands), "", "all ranks return all rows")
        paths = dict.fromkeys(module_path(source) for source in (node, *items))
        modules = tuple(short_name(path) for path in paths if path)
        if modules:
            return Purpose("result of ", modules, "", reason)
        differentiated = [path for operand in operands if is_backward and (path := self._module_of_gradient(operand))]
        if differentiated:
            return Purpose("input gradient of ", tuple(differentiated), "", reason)
        if isinstance(section, Action):
            return Purpose("input gradient of " if is_backward else "result of ", (short_name(""),), "", reason)
        return Purpose("", (node.meta.get("reason") or (operands[0].name if operands else node.name),), "", reason)

    def _reduced(self, operation: str, reduces: Sequence[str]) -> Purpose:
        """Return the purpose of an all_reduce that the emitter wrote: of gradients, of the loss, or of another sum."""
        originals = [self._names.get(name) or self._inputs.get(name) for name in reduces]
        names = tuple(short_name(original or name) for original, name in zip(originals, reduces, strict=True))
        if all(name in self._names for name in reduces):
            why = "a parameter that these ranks share" if len(reduces) == 1 else "parameters that these ranks share"
        elif any(originals):
            why = "all ranks return the gradient of an input"
        elif names == ("loss_of_batch",):
            return Purpose("", ("loss",), operation, "each rank has that of its rows")
        else:
            why = "each rank has a part of it"
        return Purpose("gradient of " if any(originals) else "", names, operation, why)

    def _parameter(self, node: Any) -> str:
        """Return the original name of the parameter that a node is computed from, by operations of one operand such as casts."""
        while node.op != "get_attr":
            (node,) = node.all_input_nodes
        return self._names.get(str(node.target), str(node.target))

    def _module_of_gradient(self, gradient: fx.Node) -> str:
        """Return the module that a gradient comes from, by a breadth-first search back to the nearest node that reads a parameter."""
        seen, frontier = {gradient}, [gradient]
        while frontier:
            for node in frontier:
                parameters = [source for source in node.all_input_nodes if is_held(source)]
                if parameters:
                    return short_name(self._parameter(parameters[0]).rpartition(".")[0])
            sources = dict.fromkeys(source for node in frontier for source in node.all_input_nodes)
            frontier = [source for source in sources if source.op == "call_function" and source not in seen]
            seen.update(frontier)
        return ""

    def _parameter_of_gradient(self, gradient: fx.Node, section: Any) -> str:
        """Return the name of the parameter that a value is the gradient of; empty if it is none.

        Walk from the value to the call that stores gradients: its list has the order of ``StoreGradients.names``.
        """
        store = self._stores.get(f"stage{section.stage}_store_gradients") if isinstance(section, Action) else None
        pending, seen = [gradient], {gradient}
        while store is not None and pending:
            node = pending.pop()
            for user in node.users:
                lists = [argument for argument in user.args if isinstance(argument, list | tuple) and node in argument]
                if lists and len(lists[0]) == len(store.names):
                    name = store.names[lists[0].index(node)] or ""
                    return short_name(self._names.get(name, name))
                if user not in seen and user.op == "call_function" and isinstance(user.meta.get("val"), Tensor):
                    pending.append(user)
                    seen.add(user)
        return ""


def items_of(node: fx.Node) -> list[fx.Node]:
    """Return the getitems of the results of a collective, in order; results that no node reads have none."""
    by_index: dict[Any, fx.Node] = {}
    for user in node.users:
        if user.target is wait:
            by_index.update({item.args[1]: item for item in user.users if item.target is operator.getitem})
    return [by_index[index] for index in sorted(by_index)]
