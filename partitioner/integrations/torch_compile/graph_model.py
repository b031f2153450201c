"""A graph of Dynamo as a module: tensors of the user's modules are its parameters and buffers, under their original names.

    graph of Dynamo                                      module
      L['self']._modules['fc']._parameters['weight']       parameter fc.weight
      L['self']._modules['bn']._buffers['running_mean']    buffer bn.running_mean
      L['x']                                               input x
      L['x'].size()[0]                                     read from x in forward: a trace may leave it open
      L['n'], L['self'].p: numbers                         constants

The module is only traced. Its tensors say where gradients are wanted; values are passed with each call (``functional_model``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from partitioner.integrations.torch_compile.graph_calls import GraphInterpreter, inline_calls
from passes.ir.torch_private import dynamo_source

_STEP = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")
"""One step of a source: ``['name']``, ``[0]`` or ``.name``."""

_REGISTERED = re.compile(r"\._(?:modules|parameters|buffers)\[")
"""Position at which a source goes from a module's variable into its registered tables."""


@dataclass(frozen=True)
class Argument:
    """One argument of a graph of Dynamo.

    Attributes:
        placeholder: of the graph.
        kind: a tensor of a module (``"state"``), a tensor that is passed (``"input"``), a size of one, or another number.
        name: of a tensor: in the user's module, or as the user's function calls it.
        size_of: for a size: the index of the tensor among the inputs, and the dimension.
    """

    placeholder: str
    kind: Literal["state", "input", "size", "number"]
    name: str
    size_of: tuple[int, int] | None = None


def read_arguments(graph: fx.Graph) -> tuple[Argument, ...]:
    """Return the arguments of a graph of Dynamo, in their order."""
    placeholders = graph.find_nodes(op="placeholder")
    sources = [dynamo_source(node) for node in placeholders]
    roots = _roots(sources)
    kinds = [_kind(node, source, roots) for node, source in zip(placeholders, sources, strict=True)]
    inputs = [node for node, kind in zip(placeholders, kinds, strict=True) if kind == "input"]
    arguments, names = [], set[str]()
    for node, source, kind in zip(placeholders, sources, kinds, strict=True):
        dimension = _dimension(node, inputs) if kind == "number" else None
        name = _path(source, roots) if kind == "state" else re.sub(r"\W+", "_", _path(source, ())).strip("_")
        name = _new_name(name if name and not name[0].isdigit() else node.name, names) if kind in ("state", "input") else node.name
        arguments.append(Argument(node.name, "size" if dimension is not None else kind, name, dimension))
    return tuple(arguments)


def _roots(sources: Sequence[str]) -> tuple[str, ...]:
    """Return the variables that hold modules: ``("L['self']",)``."""
    found = (_REGISTERED.search(source) for source in sources)
    return tuple(dict.fromkeys(source[: match.start()] for source, match in zip(sources, found, strict=True) if match))


def _kind(node: fx.Node, source: str, roots: Sequence[str]) -> Literal["state", "input", "number"]:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return "number"
    is_global = source.startswith("G[")
    if isinstance(value, nn.Parameter) or is_global or any(source.startswith((f"{root}.", f"{root}[")) for root in roots):
        return "number" if _is_number(node, value) else "state"
    return "number" if _is_number(node, value) else "input"


def _is_number(node: fx.Node, value: Tensor) -> bool:
    """Return whether a tensor is a Python float, which Dynamo passes as a tensor without dimensions and reads with ``item()``."""
    return value.dim() == 0 and bool(node.users) and all(user.op == "call_method" and user.target == "item" for user in node.users)


def _dimension(node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[int, int] | None:
    """Return which dimension of which input has the symbolic size that an argument is; None if none has."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.SymInt):
        return None
    for index, each in enumerate(inputs):
        for dimension, size in enumerate(each.meta["example_value"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                return index, dimension
    return None


def _path(source: str, roots: Sequence[str]) -> str:
    """Return a source as a dotted path: the name in the user's module, if that is the only one."""
    root = next((root for root in roots if source.startswith(root)), None)
    rest = source.removeprefix(root) if root is not None and len(roots) == 1 else source
    steps = ["".join(groups) for groups in _STEP.findall(rest)]
    return ".".join(step for step in steps if step not in ("_modules", "_parameters", "_buffers"))


def _new_name(name: str, names: set[str]) -> str:
    """Return the name, or one like it that is neither among ``names`` nor the path of a module in one of them; and add it."""
    taken = {other for known in names for other in (known, *_owners(known))}
    candidate, number = name, 1
    while candidate in taken or names.intersection(_owners(candidate)):
        number += 1
        candidate = f"{name}_{number}"
    names.add(candidate)
    return candidate


def _owners(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


class GraphModel(nn.Module):
    """A graph of Dynamo as a module that takes its inputs alone.

    Args:
        graph: of Dynamo.
        arguments: of the graph.
        values: of the arguments, in their order.
    """

    def __init__(self, graph: fx.GraphModule, arguments: Sequence[Argument], values: Sequence[Any]) -> None:
        super().__init__()
        named = list(zip(arguments, values, strict=True))
        self._register([(each.name, value) for each, value in named if each.kind == "state"])
        numbers = {each.placeholder: number_of(value) for each, value in named if each.kind == "number"}
        interpreter = GraphInterpreter(_traceable(graph, arguments))

        def forward(*inputs: Tensor) -> Any:
            state, given = {**dict(self.named_parameters()), **dict(self.named_buffers())}, iter(inputs)
            filled: list[Any] = []
            for each in arguments:
                if each.kind == "state":
                    filled.append(state[each.name])
                elif each.kind == "input":
                    filled.append(next(given))
                elif each.size_of is None:
                    filled.append(numbers[each.placeholder])
                else:
                    index, dimension = each.size_of
                    filled.append(inputs[index].shape[dimension])
            with fx.traceback.preserve_node_meta():  # source lines and modules are those that Dynamo has seen
                return interpreter.run(*filled)

        names = [each.name for each in arguments if each.kind == "input"]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def _register(self, state: Sequence[tuple[str, Tensor]]) -> None:
        """Register tensors with the memory of the user's; a copy where two of them share some, since a trace would take them for one."""
        storages: set[int] = set()
        for name, tensor in state:
            *path, attribute = name.split(".")
            owner: nn.Module = self
            for step in path:
                if step not in dict(owner.named_children()):
                    owner.add_module(step, nn.Module())
                owner = owner.get_submodule(step)
            address = tensor.untyped_storage().data_ptr()
            own = tensor.detach().clone() if address and address in storages else tensor.detach()
            storages.add(address)
            if isinstance(tensor, nn.Parameter) or tensor.requires_grad:
                owner.register_parameter(attribute, nn.Parameter(own, requires_grad=tensor.requires_grad))
            else:
                owner.register_buffer(attribute, own)


def number_of(value: Any) -> Any:
    """Return the Python number that an argument of a graph stands for."""
    return value.item() if isinstance(value, Tensor) else value


def _traceable(module: fx.GraphModule, arguments: Sequence[Argument]) -> fx.GraphModule:
    """Return a copy of a graph of Dynamo that takes numbers as such, and whose nodes have names of modules, without Dynamo's metadata."""
    roots = _roots([dynamo_source(node) for node in module.graph.find_nodes(op="placeholder")])
    traceable = _copy(module, roots)
    numbers = {each.placeholder for each in arguments if each.kind == "number"}
    for node in traceable.graph.find_nodes(op="placeholder"):
        for user in list(node.users) if node.name in numbers else ():
            if user.op == "call_method" and user.target == "item":
                user.replace_all_uses_with(node)
                traceable.graph.erase_node(user)
    return traceable


def _copy(module: fx.GraphModule, roots: Sequence[str]) -> fx.GraphModule:
    """Return a copy of a graph and its inner graphs: module paths as the user names them, calls of graphs inlined (``inline_calls``)."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    owner = nn.Module()
    for name, value in (*module.named_children(), *module.named_buffers(recurse=False), *module.named_parameters(recurse=False)):
        setattr(owner, name, _copy(value, roots) if isinstance(value, fx.GraphModule) else value)
    for node in graph.nodes:
        if node.op == "get_attr" and not hasattr(owner, str(node.target)):
            setattr(owner, str(node.target), getattr(module, str(node.target)))
        stack = {key: (_path(path, roots), kind) for key, (path, kind) in node.meta.get("nn_module_stack", {}).items()}
        node.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta} | ({"nn_module_stack": stack} if stack else {})
    inline_calls(graph, owner)
    return fx.GraphModule(owner, graph)
