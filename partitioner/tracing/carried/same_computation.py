"""Whether two traces of a model compute the same of its inputs and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

__all__ = ["same_computation"]


def same_computation(first: ExportedProgram, second: ExportedProgram, stand_ins: Sequence[Tensor]) -> bool:
    """Return whether two traces with fixed sizes compute the same.

    Args:
        stand_ins: constants of the second trace that stand for what the first call computed. They may stand for whatever follows from
            constants and buffers alone, as a table of positions does.
    """
    one, other = _Reader(first, ()), _Reader(second, stand_ins)
    return len(one.varying) == len(other.varying) and _Comparison(one, other).holds()


class _Reader:
    """Computation of a trace.

    Attributes:
        varying: the nodes that depend on values that differ between calls: of inputs, parameters and written buffers; and the output.
        constants: placeholder -> tensor.
        stand_ins: placeholders of stand-ins, and what is computed of them and other constants.
        varies: the nodes that depend on such values, placeholders included.
        module: the graph, with nested graphs as attributes.
    """

    def __init__(self, program: ExportedProgram, stand_ins: Sequence[Tensor]) -> None:
        signature = program.graph_signature
        written = set(signature.buffers_to_mutate.values())
        kinds = {spec.arg.name: spec for spec in signature.input_specs}
        self.module = program.graph_module
        self.constants: dict[fx.Node, Any] = {}
        self.stand_ins: set[fx.Node] = set()
        self.varying: list[fx.Node] = []
        varying: set[fx.Node] = set()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec = kinds[node.name]
                if spec.kind is InputKind.CONSTANT_TENSOR:
                    self.constants[node] = program.constants[str(spec.target)]
                    if any(self.constants[node] is each for each in stand_ins):
                        self.stand_ins.add(node)
                elif spec.kind is not InputKind.BUFFER or str(spec.target) in written:
                    varying.add(node)
            elif node.op == "output" or not varying.isdisjoint(node.all_input_nodes):
                varying.add(node)
                self.varying.append(node)
            elif not self.stand_ins.isdisjoint(node.all_input_nodes):
                self.stand_ins.add(node)
        self.varies = varying


class _Comparison:
    """Compares two traces node by node."""

    def __init__(self, one: _Reader, other: _Reader) -> None:
        self._one, self._other = one, other
        self._places = [{node: index for index, node in enumerate(each.varying)} for each in (one, other)]
        self._known: dict[tuple[fx.Node, fx.Node], bool] = {}

    def holds(self) -> bool:
        """Return whether all nodes that depend on values of a call are equal."""
        return all(self._same_node(*pair) for pair in zip(self._one.varying, self._other.varying, strict=True))

    def _same_node(self, left: fx.Node, right: fx.Node) -> bool:
        is_same_call = left.op == right.op and left.target == right.target
        return is_same_call and self._same((left.args, left.kwargs), (right.args, right.kwargs))

    def _same(self, left: Any, right: Any) -> bool:
        """Return whether two arguments, nested or not, are the same."""
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            if (left, right) not in self._known:
                self._known[left, right] = self._same_value(left, right)
            return self._known[left, right]
        if isinstance(left, dict) and isinstance(right, dict):
            return list(left) == list(right) and all(self._same(left[key], right[key]) for key in left)
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            return len(left) == len(right) and all(self._same(*pair) for pair in zip(left, right, strict=True))
        if isinstance(left, slice) and isinstance(right, slice):
            return self._same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
        return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)

    def _same_value(self, left: fx.Node, right: fx.Node) -> bool:
        """Return whether two nodes have the same value: computed at the same place, equal constants, or a stand-in."""
        one, other = self._one, self._other
        if left in one.varies or right in other.varies:
            if left.op == right.op == "placeholder":
                return left.target == right.target
            return self._places[0].get(left, -1) == self._places[1].get(right, -2)
        if right in other.stand_ins:
            return True
        if left in one.constants and right in other.constants:
            return _equal(one.constants[left], other.constants[right])
        if left.op == right.op == "get_attr":
            return _text(one.module, left) == _text(other.module, right)
        return self._same_node(left, right)


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return False
    if left.is_meta or right.is_meta:
        return left.shape == right.shape and left.dtype == right.dtype
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def _text(module: torch.nn.Module, node: fx.Node) -> str:
    """Return the text of a nested graph."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value.code if isinstance(value, fx.GraphModule) else repr(value)
