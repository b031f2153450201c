"""Find the module and the line of the user's code that a node comes from."""

from __future__ import annotations

import re

from torch import fx

from passes.ir.errors import Place
from passes.ir.torch_private import OpOverload

__all__ = ["complete_provenance", "module_path", "place_of", "source_line"]

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that computes a node; empty for the model itself.

    A trace marks the second call of a module as ``path@1``: the mark is removed.
    """
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return re.sub(r"@\d+", "", str(path))


def source_line(node: fx.Node) -> str | None:
    """Return ``file.py:12``: the innermost stack frame outside of PyTorch, else the innermost one; None without a stack trace."""
    frames = [frame for frame in _FRAME.findall(node.meta.get("stack_trace") or "") if not frame[0].startswith("<")]
    if not frames:
        return None
    outside = [frame for frame in frames if "/torch/" not in frame[0].replace("\\", "/")]
    file, line = (outside or frames)[-1]
    return f"{file}:{line}"


def place_of(node: fx.Node) -> Place:
    """Return module, operation and source line of a node, for errors."""
    target = node.target
    operation = str(target) if isinstance(target, str | OpOverload) else getattr(target, "__name__", str(target))
    return Place(module=module_path(node), operation=operation, source=source_line(node))


def complete_provenance(graph: fx.Graph) -> None:
    """Give nodes without provenance (arithmetic on sizes) that of their first user that has one, else that of the preceding node."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "nn_module_stack" not in node.meta:
            user = next((user for user in node.users if "nn_module_stack" in user.meta), None)
            if user is not None:
                _copy_provenance(user, node)
    for node in graph.nodes:
        if node.op == "call_function" and "nn_module_stack" not in node.meta:
            _copy_provenance(node.prev, node)


def _copy_provenance(source: fx.Node, node: fx.Node) -> None:
    node.meta["nn_module_stack"] = source.meta.get("nn_module_stack", {})
    node.meta.setdefault("stack_trace", source.meta.get("stack_trace"))
