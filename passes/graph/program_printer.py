"""Print a program as readable Python.

Beyond fx's text: functions have their imported names, every action has a heading, every communication has its bytes in a comment, and
``x = None`` after a last use is left out (the executor frees values). A ``"comment"`` or an ``"origin"`` (line of the model's code) in a
node's ``meta`` is printed above it. The text is valid Python, equivalent to the graph.

    # 1B0: backward of stage 1 on microbatch 0
    stage1_backward_mb0 = self.stage1_backward(stage1_saved_mb0, linear_gradient_of_loss_mb0)
    relu_gradient_of_stage1_mb0 = stage1_backward_mb0[0]
    send_relu_gradient_from_stage1_mb0_to_rank0 = send(relu_gradient_of_stage1_mb0, destination=0, tag=0)  # 2.00 KiB
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.graph.lazy_graph_module import LazyGraphModule
from passes.ir.program import LossCall
from passes.ir.schedule import Action, ActionKind
from passes.ir.torch_private import OpOverload

_OPERATORS: Mapping[Callable[..., Any], str] = {
    operator.add: "+",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.mul: "*",
    operator.pow: "**",
    operator.sub: "-",
}

_ACTION_NAMES: Mapping[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "input gradients",
    ActionKind.BACKWARD_WEIGHT: "weight gradients",
}


def program_text(graph: fx.Graph, batch_size: int | None = None) -> str:
    """Return the imports and the ``forward`` method of a program, with the bytes of messages for a batch size."""
    return "\n".join([*_imports(graph), "", "", *_method(graph, batch_size)]) + "\n"


def class_text(graph: fx.Graph, name: str, batch_size: int | None = None) -> str:
    """Return the program as the text of a class; see ``program_text``."""
    body = (f"    {line}" if line else "" for line in _method(graph, batch_size))
    return "\n".join([*_imports(graph), "", "", f"class {name}(torch.nn.Module):", *body]) + "\n"


def _imports(graph: fx.Graph) -> list[str]:
    """Return the lines that import the functions of a program, and name the namespaces of its operators: ``aten = torch.ops.aten``."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    libraries: set[str] = set()
    for node in graph.nodes:
        if node.op == "call_function":
            libraries |= {each.namespace for each in (node.target, *node.args) if isinstance(each, OpOverload)}
            if _is_imported(node.target):
                names[node.target.__module__].add(node.target.__name__)
    imports = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    namespaces = [f"{library} = torch.ops.{library}" for library in sorted(libraries)]
    return ["import torch", "", *imports, *([""] if namespaces and imports else []), *namespaces]


def _is_imported(target: Any) -> bool:
    """Return whether the text imports a function, and calls it by its bare name."""
    has_other_syntax = target is operator.getitem or target in _OPERATORS or isinstance(target, OpOverload)
    return not has_other_syntax and not _is_in_torch(target)


def _is_in_torch(target: Any) -> bool:
    return getattr(torch, target.__name__, None) is target


def _method(graph: fx.Graph, batch_size: int | None) -> list[str]:
    """Return the lines of ``forward``: a heading above each section, origin and comment above a statement, bytes after it."""
    arguments = [node.name for node in graph.nodes if node.op == "placeholder"]
    prints_bytes = batch_size is not None and any("bytes" in node.meta for node in graph.nodes)
    lines = [f"def forward({', '.join(['self', *arguments])}):" + (f"  # bytes: for a batch of {batch_size}" if prints_bytes else "")]
    section: Action | str = ""
    origin = ""
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if (new_section := node.meta.get("section", section)) != section:
            section, origin = new_section, ""
            lines += ["", f"    # {_heading(section)}"] if len(lines) > 1 else [f"    # {_heading(section)}"]
        if node.meta.get("origin", origin) != origin:
            origin = node.meta["origin"]
            lines += [f"    # {origin}"] if origin else []
        if "comment" in node.meta:
            lines.append(f"    # {node.meta['comment']}")
            origin = ""  # print the origin of the next node again: it stands below the comment
        lines.append("    " + _statement(node) + (f"  # {_bytes(node.meta['bytes'])}" if "bytes" in node.meta else ""))
    return lines


def _heading(section: Action | str) -> str:
    if isinstance(section, Action):
        return f"{section}: {_ACTION_NAMES[section.kind]} of stage {section.stage} on microbatch {section.microbatch}"
    return section


def _bytes(size: int) -> str:
    """Format bytes: exact below a KiB, else in the unit that leaves one to four digits before the point."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.2f} {unit}"


def _statement(node: fx.Node) -> str:
    return f"return {_value(node.args[0])}" if node.op == "output" else f"{node.name} = {_call(node)}"


def _call(node: fx.Node) -> str:
    """Format a node as a Python expression."""
    if node.op == "call_module":
        return f"self.{node.target}({_arguments(node)})"
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        value, index = node.args
        return f"{_value(value)}[{_value(index)}]"
    if node.target in _OPERATORS:
        left, right = node.args
        return f"{_value(left)} {_OPERATORS[node.target]} {_value(right)}"  # type: ignore[index]
    if isinstance(node.target, OpOverload):
        return f"{node.target}({_arguments(node)})"
    assert callable(node.target)
    prefix = "torch." if _is_in_torch(node.target) else ""
    return f"{prefix}{node.target.__name__}({_arguments(node)})"


def _arguments(node: fx.Node) -> str:
    return ", ".join([*map(_value, node.args), *(f"{name}={_value(value)}" for name, value in node.kwargs.items())])


def _value(value: Any) -> str:
    """Format an argument as Python."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(_value(part) for part in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(_value(part) for part in value)}]"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return str(value) if isinstance(value, OpOverload) else repr(value)


# -- the graph module of a program -------------------------------------------------------------------------------------------------


class ProgramModule(LazyGraphModule):
    """An ``fx.GraphModule`` with ``code`` and ``print_readable`` by ``passes.graph.program_printer``.

    Copies and pickles keep names and metadata of nodes (fx's own pickle traces the code again, which renames them), but no fake tensors of
    ``meta["val"]``.
    """

    @property
    def code(self) -> str:
        """Return the imports and the ``forward`` method, as valid Python."""
        return program_text(self.graph, self.meta.get("batch_size"))

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """Return the program as the text of a class. Further arguments of ``fx.GraphModule.print_readable`` are ignored.

        Args:
            print_output: whether to print the text as well.
        """
        text = class_text(self.graph, type(self).__name__, self.meta.get("batch_size"))
        if print_output:
            print(text)  # noqa: T201  what the method of this name does
        return text

    def __str__(self) -> str:
        return self.print_readable(print_output=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        # Share the immutable TreeSpecs: copying the spec of a leaf warns.
        memo.update({id(module.tree): module.tree for module in self.children() if isinstance(module, LossCall)})
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        meta = {key: value for key, value in self.meta.items() if key == "batch_size"}
        tensors = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        attributes = {**dict(self.named_children()), **{name: getattr(self, name) for name in tensors}}
        return _restore, (_records(self.graph), attributes, type(self).__name__, meta)


Record = tuple[str, str, Any, Any, Any, dict[str, Any]]
"""A node as plain data: op, name, target, args, kwargs, meta."""


class _NodeName(str):
    """A node in pickled arguments, by its name."""

    __slots__ = ()


class _OperatorName(str):
    """An operator in pickled arguments, by its name: torch cannot pickle operators."""

    __slots__ = ()

    def operator(self) -> OpOverload:
        library, packet, overload = self.split(".")
        overload_object: OpOverload = getattr(getattr(getattr(torch.ops, library), packet), overload)
        return overload_object


def _records(graph: fx.Graph) -> list[Record]:
    """Return the nodes of a graph as plain data, for pickling."""
    meta_keys = ("section", "message", "reduces", "bytes", "comment", "origin")
    return [
        (
            node.op,
            node.name,
            _pickled(node.target),
            fx.node.map_aggregate(node.args, _pickled),
            fx.node.map_aggregate(node.kwargs, _pickled),
            {key: node.meta[key] for key in meta_keys if key in node.meta},
        )
        for node in graph.nodes
    ]


def _pickled(value: Any) -> Any:
    """Return the pickled form of a leaf of arguments: nodes and operators as their names."""
    if isinstance(value, OpOverload):
        return _OperatorName(str(value))
    return _NodeName(value.name) if isinstance(value, fx.Node) else value


def _restore(records: list[Record], attributes: Mapping[str, nn.Module | Tensor], name: str, meta: Mapping[str, Any]) -> ProgramModule:
    """Rebuild a module from pickled records of its nodes, in which names stand for nodes and operators."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def unpickled(leaf: Any) -> Any:
        if isinstance(leaf, _NodeName):
            return nodes[leaf]
        return leaf.operator() if isinstance(leaf, _OperatorName) else leaf

    for op, node_name, target, args, kwargs, node_meta in records:
        arguments, keywords = fx.node.map_aggregate((args, kwargs), unpickled)
        node = graph.create_node(op, unpickled(target), arguments, keywords, name=node_name)
        node.meta.update(node_meta)
        nodes[node_name] = node
    module = ProgramModule(dict(attributes), graph, class_name=name)
    module.meta.update(meta)
    return module
