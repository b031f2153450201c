"""The graph module of a program: an ``fx.GraphModule`` that prints as a person would write it, and is saved whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from passes.ir.program import LossCall
from passes.lazy_graph_module import LazyGraphModule
from passes.printer import class_text, program_text

__all__ = ["ProgramModule"]


class ProgramModule(LazyGraphModule):
    """What ``fx.GraphModule`` is, with ``code`` and ``print_readable`` written by ``passes.printer``.

    Copies and pickles keep the names of the nodes and what they say of themselves (fx's own pickle traces the code again, which
    renames them); fake tensors in ``meta["val"]`` are left out of a pickle.
    """

    @property
    def code(self) -> str:
        """The imports and the ``forward`` method, as valid Python."""
        return program_text(self.graph, self.meta.get("batch_size"))

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """The program as a class. What else ``fx.GraphModule`` takes here is taken and changes nothing.

        Args:
            print_output: whether to print the text, too.
        """
        text = class_text(self.graph, type(self).__name__, self.meta.get("batch_size"))
        if print_output:
            print(text)  # noqa: T201  what the method of this name does
        return text

    def __str__(self) -> str:
        return self.print_readable(print_output=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        # Structures of results are immutable, and those of leaves warn when they are made anew.
        memo.update({id(module.tree): module.tree for module in self.children() if isinstance(module, LossCall)})
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        meta = {key: value for key, value in self.meta.items() if key == "batch_size"}
        named = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        attributes = {**dict(self.named_children()), **{name: getattr(self, name) for name in named}}
        return _restore, (_records(self.graph), attributes, type(self).__name__, meta)


Record = tuple[str, str, Any, Any, Any, dict[str, Any]]
"""A node as plain data: op, name, target, args, kwargs, meta."""


class _Reference(str):
    """Stands for a node, by name, in saved arguments."""

    __slots__ = ()


class _Operator(str):
    """Stands for an ATen operator, by name: torch pickles none."""

    __slots__ = ()

    def found(self) -> OpOverload:
        library, packet, overload = self.split(".")
        operator: OpOverload = getattr(getattr(getattr(torch.ops, library), packet), overload)
        return operator


def _records(graph: fx.Graph) -> list[Record]:
    def saved(argument: Any) -> Any:
        return fx.node.map_aggregate(argument, _stand_in)

    kept = ("section", "message", "reduces", "bytes", "comment", "origin")
    return [
        (
            node.op,
            node.name,
            _stand_in(node.target),
            saved(node.args),
            saved(node.kwargs),
            {key: node.meta[key] for key in kept if key in node.meta},
        )
        for node in graph.nodes
    ]


def _stand_in(value: Any) -> Any:
    if isinstance(value, OpOverload):
        return _Operator(str(value))
    return _Reference(value.name) if isinstance(value, fx.Node) else value


def _restore(records: list[Record], attributes: Mapping[str, nn.Module | Tensor], name: str, meta: Mapping[str, Any]) -> ProgramModule:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def found(argument: Any) -> Any:
        if isinstance(argument, _Reference):
            return nodes[argument]
        if isinstance(argument, _Operator):
            return argument.found()
        if isinstance(argument, tuple | list):
            return type(argument)(found(part) for part in argument)
        if isinstance(argument, Mapping):
            return {key: found(part) for key, part in argument.items()}
        return argument

    for op, node_name, target, args, kwargs, node_meta in records:
        node = graph.create_node(op, found(target), tuple(found(args)), found(kwargs), name=node_name)
        node.meta.update(node_meta)
        nodes[node_name] = node
    module = ProgramModule(dict(attributes), graph, class_name=name)
    module.meta.update(meta)
    return module
