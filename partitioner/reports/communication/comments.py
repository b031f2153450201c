"""Comments for programs: module and source line of a computation; value, layout and reason of a communication.

    # blocks.0.projection, net.py:37
    view_5_mb0 = aten.view.default(addmm_1_mb0, [size_mb0, 6, 12])
    # linear_1 [batch, sequence, hidden] partial over tensor -> [batch, sequence, hidden]; blocks.0.projection, net.py:37
    start_all_reduce_mb0 = all_reduce([view_5_mb0], group=(0, 1), operation='sum')  # 2.25 KiB

They are stored in ``meta`` of the nodes, ``"origin"`` or ``"comment"``, and printed by ``passes.graph.program_printer``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from partitioner.reports.communication.purpose import Purpose, Purposes, dimensions_of
from partitioner.reports.communication.summary import route
from partitioner.reports.communication.value_layouts import ValueLayouts, changes_of
from partitioner.reports.sources import Explained
from passes.emit.communication_plan import Message
from passes.graph.provenance import module_path, source_line
from passes.ir.comm.primitives import COLLECTIVES, receive, send
from passes.ir.errors import first_few
from passes.ir.mesh import owning_pipelines, ranks_at_places
from passes.ir.program import Program


def comment_programs(explained: Explained, programs: Sequence[Program]) -> tuple[fx.GraphModule, ...]:
    """Comment the graphs of these programs that are not commented yet; return all of them."""
    commenter: _Commenter | None = None
    for program in programs:
        if not program.module.meta.get("is_commented"):
            commenter = commenter or _Commenter(explained)
            commenter.comment(program)
            program.module.meta["is_commented"] = True
    return tuple(program.module for program in programs)


class _Commenter:
    """Comments the programs of one model.

    Attributes:
        nodes: nodes of the whole model by name.
        pipeline: rank -> number of its pipeline.
        ranks_at: the ranks at each pipeline position.
    """

    def __init__(self, explained: Explained) -> None:
        self.explained = explained
        self.mesh = explained.mesh
        self.layouts = ValueLayouts(explained)
        self.nodes = {node.name: node for node in explained.cut.graph.graph.nodes}
        self.pipeline = owning_pipelines(self.mesh)
        self.ranks_at = ranks_at_places(self.mesh)
        self._message_comment = functools.cache(self._describe_message)

    def comment(self, program: Program) -> None:
        """Store comments in ``meta`` of the nodes of a program."""
        purposes = Purposes(self.explained.graph, program.module)
        for node in program.module.graph.nodes:
            if node.target in (send, receive):
                node.meta["comment"] = self._message_comment(self.pipeline[program.rank], replace(node.meta["message"], microbatch=None))
            elif node.target in COLLECTIVES:
                node.meta["comment"] = self._collective_comment(node, purposes.of(node))
            elif node.op == "call_function" and node.target is not operator.getitem and node.meta.get("is_of_microbatch"):
                node.meta["origin"] = _origin(node)

    def _describe_message(self, pipeline: int, message: Message) -> str:
        """Format a message: ``"gradient of add_4 [batch, hidden]: blocks.0 <- blocks.1, net.py:37"``."""
        if message.kind == "loss":
            return "the loss: all ranks return it"
        lowered = self.explained.pipelines[pipeline]
        node = next(node for node in lowered.graph.graph.nodes if node.name == message.value)
        is_gradient = message.kind == "gradient"
        layout = self.layouts.of(message.value, gradient=is_gradient)
        value = " ".join(part for part in ("gradient of" if is_gradient else "", message.value, layout) if part)
        *_, reason = route(lowered, message, node, self.ranks_at)
        source = _source(node)
        return f"{value}: {reason}" + (f", {source}" if source else "")

    def _collective_comment(self, node: fx.Node, purpose: Purpose) -> str:
        """Describe the first layout change of a collective: ``"linear_1 [batch, ffn/tensor] -> [batch, ffn]"``; else its purpose."""
        changes = changes_of(node)
        if not changes:
            over = " and ".join(dimensions_of(node.kwargs["group"], self.mesh))  # type: ignore[arg-type]
            return f"{purpose.subject}{first_few(purpose.names, 1)}, over {over}: {purpose.why}"
        change, is_gradient = changes[0]
        graph, cast = self.explained.graph, self.explained.cut.layouts.casts.get(change.value)
        name = graph.parameters.get(cast or change.value) or graph.buffers.get(change.value) or change.value
        if cast is not None and not is_gradient:
            name += f" in {str(self.nodes[change.value].meta['val'].dtype).removeprefix('torch.')}"
        value = f"{'gradient of ' if is_gradient else ''}{name}"
        more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        source = self.nodes.get(change.value)  # the name of a parameter says where it is
        origin = "" if source is None or source.op == "placeholder" or cast is not None else f"; {_origin(source)}"
        return f"{value} {self.layouts.of_change(change, gradient=is_gradient)}{more}{origin}"


def _origin(node: fx.Node) -> str:
    """Return module and source line of a node: ``"blocks.0.projection, net.py:37"``; empty for a node of the backward."""
    if not node.meta.get("nn_module_stack"):
        return ""
    parts: Sequence[str | None] = (module_path(node) or "the model itself", _source(node))
    return ", ".join(part for part in parts if part)


def _source(node: fx.Node) -> str | None:
    """Return the source line of a node, ``"net.py:12"``, the file without its folder."""
    line = source_line(node)
    return None if line is None else line.replace("\\", "/").rpartition("/")[2]
