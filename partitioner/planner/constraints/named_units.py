"""The modules and nodes that constraints on stages may name, and their units."""

from __future__ import annotations

from collections.abc import Collection

from partitioner.planner.constraints.modules import check_module
from partitioner.planner.costs.cut_points import CutPoints
from passes.graph.provenance import module_path, prefixes
from passes.ir.errors import ConfigError, Place
from passes.ir.graph import ModelGraph


class NamedUnits:
    """The modules and nodes that constraints may name."""

    def __init__(self, graph: ModelGraph, points: CutPoints, modules: Collection[str]) -> None:
        self.graph, self.points = graph, points
        self._unit_of = points.unit_of
        self.module_of = {node.name: module_path(node) for node in graph.computing_nodes()}
        parameters = (*graph.parameters.values(), *graph.buffers.values(), *graph.aliases)
        owners = [name.rpartition(".")[0] for name in parameters]
        paths = {*self.module_of.values(), *owners, *modules}
        modules_and_nodes = {"", *(prefix for path in paths for prefix in prefixes(path)), *self.module_of}
        self._known = modules_and_nodes.union(parameters)

    def check(self, name: str) -> bool:
        """Return True; raise ConfigError if no module, parameter or node has the name."""
        check_module(name, self._known, "the constraints name")
        return True

    def units(self, name: str) -> list[int]:
        """Return the units of a module or node, in order; none for a module that computes nothing."""
        self.check(name)
        nodes = [node for node, module in self.module_of.items() if node == name or is_inside(module, name)]
        return sorted({self._unit_of[node] for node in nodes if node in self._unit_of})

    def boundary(self, name: str, at_end: bool) -> int:
        """Return the boundary at the beginning or the end of a module; raise ConfigError if stages cannot be cut there."""
        units = self.units(name)
        where = "after" if at_end else "before"
        if not units:
            raise ConfigError(
                f"split_spec cuts {where} {name!r}, which computes nothing", place=Place(module=name), remedy="cut at another module"
            )
        edge_unit = self.points.units[units[-1] if at_end else units[0]]
        edge_node = edge_unit[-1] if at_end else self.points.starts[units[0]]
        boundary = units[-1] + 1 if at_end else units[0]
        if not is_inside(self.module_of[edge_node], name) and edge_node != name:
            raise ConfigError(
                f"split_spec cuts {where} {name!r}, where something crosses that cannot be sent: {', '.join(edge_unit)} stay together",
                place=Place(module=name),
                remedy="cut at another module",
            )
        if not 0 < boundary < len(self.points.units):
            raise ConfigError(
                f"split_spec cuts {where} {name!r}, where the model has nothing more", place=Place(module=name), remedy="leave it out"
            )
        return boundary


def is_inside(module: str, name: str) -> bool:
    """Return whether a module or tensor is in the module of a name, or is it; ``""`` is the whole model."""
    return name in ("", module) or module.startswith(f"{name}.")
