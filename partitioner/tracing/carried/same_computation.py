"""Whether two traces of a model compute the same of its inputs and parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from passes.graph.equivalence import by_value, call_key


def same_computation(first: ExportedProgram, second: ExportedProgram, stand_ins: Sequence[Tensor]) -> bool:
    """Return whether two traces with fixed sizes compute the same.

    Args:
        stand_ins: constants of the second trace that stand for what the first call computed. They may stand for whatever follows from
            constants and buffers alone, as a table of positions does.
    """
    one, other = _Reader(first, ()), _Reader(second, stand_ins)
    if one.calls != other.calls:
        return False
    pairs = zip(one.constants, other.constants, strict=True)
    return all(right in other.stand_ins or one.key(left) == other.key(right) for left, right in pairs)


class _Reader:
    """The computation of a trace.

    Attributes:
        calls: keys of the nodes that depend on values that differ between calls: of inputs, parameters and written buffers; and the
            output. In them all other values are equal.
        constants: these other values, as often as the calls read them.
        stand_ins: those of them that are stand-ins, or computed from stand-ins.
    """

    def __init__(self, program: ExportedProgram, stand_ins: Sequence[Tensor]) -> None:
        signature = program.graph_signature
        written = set(signature.buffers_to_mutate.values())
        kinds = {spec.arg.name: spec for spec in signature.input_specs}
        self.calls: list[Hashable] = []
        self.constants: list[fx.Node] = []
        self.stand_ins: set[fx.Node] = set()
        self._varying: dict[fx.Node, Hashable] = {}
        self._keys: dict[fx.Node, Hashable] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec = kinds[node.name]
                if spec.kind is InputKind.CONSTANT_TENSOR:
                    value = program.constants[str(spec.target)]
                    self._keys[node] = by_value(value)
                    if any(value is each for each in stand_ins):
                        self.stand_ins.add(node)
                elif spec.kind is not InputKind.BUFFER or str(spec.target) in written:
                    self._varying[node] = node.target
            elif node.op == "output" or not self._varying.keys().isdisjoint(node.all_input_nodes):
                self._varying[node] = len(self.calls)
                self.calls.append(call_key(node, self._argument))
            elif not self.stand_ins.isdisjoint(node.all_input_nodes):
                self.stand_ins.add(node)

    def _argument(self, node: fx.Node) -> Hashable:
        """Return the key of an argument of a call: the place of a value that varies; None for a constant, which is noted."""
        if node not in self._varying:
            self.constants.append(node)
        return self._varying.get(node)

    def key(self, node: fx.Node) -> Hashable:
        """Return the key of a constant: a tensor by its elements, everything else by the calls that compute it."""
        if node not in self._keys:
            self._keys[node] = call_key(node, self.key, by_value)
        return self._keys[node]
