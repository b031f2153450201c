"""Find the module, the line of the user's code and the checkpoint that a node comes from.

A model computes nodes under ``torch.utils.checkpoint``. They have marks in ``meta["custom"]``, which passes copy:

    linear = ...    {"checkpoint": "x"}                            recomputed in the backward, together with all that has this mark
    relu = ...      {"checkpoint": "x", "checkpoint_saves": True}  saved: a policy of selective checkpointing says so
    linear_1 = ...  {"checkpoint": "linear"}
"""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import fx

from passes.ir.errors import Place
from passes.ir.torch_private import OpOverload

_CHECKPOINT, _SAVES = "checkpoint", "checkpoint_saves"

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


def prefixes(path: str) -> list[str]:
    """Return all prefixes of a path; of ``"a.b.c"``: ``"a"``, ``"a.b"``, ``"a.b.c"``."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def source_name(name: str, known: Collection[str]) -> str | None:
    """Return the node of ``known`` that a rewrite gave a node for: of ``dropout_1_mask``, ``dropout_1``; None if there is none."""
    words = name.split("_")
    return next((prefix for count in range(len(words), 0, -1) if (prefix := "_".join(words[:count])) in known), None)


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


def mark_checkpoint(node: fx.Node, name: str) -> None:
    """Mark a node as computed in a checkpoint; of nested ones, in the outermost."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _CHECKPOINT: name}


def mark_saved(node: fx.Node) -> None:
    """Mark the value of a node as saved by the policy of its checkpoint."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _SAVES: True}


def checkpoint_of(node: fx.Node) -> str | None:
    """Return the name of the checkpoint that computes a node; None outside of all."""
    name: str | None = node.meta.get("custom", {}).get(_CHECKPOINT)
    return name


def is_saved_by_checkpoint(node: fx.Node) -> bool:
    """Return whether the policy of its checkpoint saves the value of a node."""
    return _SAVES in node.meta.get("custom", {})


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
