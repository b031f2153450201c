"""Inline the stages of a program that communicate, so that every collective is a node of the program.

Before:                                                       After:

    f = self.stage0_forward(x_mb0)                                w1 = self.p_w1
    y_mb0 = f[0]                                                  h = aten.linear(x_mb0, w1)
    saved = f[1]                                                  h_sum = all_reduce([h], group=(0, 1))
                                                                  h_sum_parts = wait(h_sum)
    with, in the stage's own graph,                               y_mb0 = h_sum_parts[0]
    all_reduce(linear(x, w1)) -> (y, (x, w1))

Once inlined, a collective can start after its operand and be waited for before its first reader (``passes.emit.overlap_collectives``). Two
other kinds of stages are inlined: backwards whose gradients are reduced over ranks, to overlap that; and stages with sequential tiling, to
free their inputs early, which a module call would keep alive. ``vary`` and other renamings are dropped.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from passes.graph.aliasing import OWN_MEMORY
from passes.graph.program_printer import ProgramModule
from passes.graph.schemas import draws
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm import functional as collectives
from passes.ir.comm import primitives as communication
from passes.ir.comm.expert_rows import row_counts
from passes.ir.comm.index_ranges import from_text, length, put_runs, segments, take_runs
from passes.ir.comm.microbatch import microbatch_sizes, take_part
from passes.ir.mesh import Mesh
from passes.ir.program import StageCall
from passes.ir.schedule import Action, ActionKind
from passes.tiling.steps import is_streamed

Inline: TypeAlias = Literal["all", "first", "none"]
"""Inlined calls of stages that communicate: all; of equal calls, which differ in the microbatch alone, the first; or none. Calls
that communicate once a step are inlined in any case."""

TIMES = "times"
"""Metadata of a collective: how many equal calls of its stage the inlined one stands for."""


def communicates(module: nn.Module) -> bool:
    """Return whether a module of a program is a stage with collectives, or with random numbers that other ranks must draw too."""
    nodes = module.graph.graph.nodes if isinstance(module, StageCall) else ()
    return any(node.target in collectives.COLLECTIVES or (node.op == "call_function" and draws(node)) for node in nodes)


def _is_read_through(stage: StageCall) -> bool:
    """Return whether a stage must be inlined wherever it is called: it communicates, or is tiled and must free its inputs early."""
    return communicates(stage) or is_streamed(stage.graph.graph)


def inlined_calls(module: ProgramModule, rows: Sequence[int], inline: Inline = "all") -> dict[fx.Node, int]:
    """Return the calls of stages to inline, each with the number of calls that it stands for.

    These are calls of stages that communicate or are tiled, by ``inline``, and in any case backwards whose gradients are reduced.

    Args:
        rows: of each microbatch.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_module" and isinstance(_stage(module, node), StageCall)]
    found = dict.fromkeys((node for node in calls if _communicates_once(module, node)), 1)
    first: dict[tuple[Any, int], fx.Node] = {}
    for node in calls:
        if inline == "none" or node in found or not _is_read_through(_stage(module, node)):
            continue
        section = node.meta.get("section")
        key = (node.target, rows[section.microbatch]) if isinstance(section, Action) else (node, 0)
        standing = first.setdefault(key, node) if inline == "first" else node
        found[standing] = found.get(standing, 0) + 1
    return found


def _stage(module: nn.Module, call: fx.Node) -> Any:
    """Return the module that a node calls."""
    return module.get_submodule(str(call.target))


def _communicates_once(module: nn.Module, call: fx.Node) -> bool:
    """Return whether a call communicates once a step: for all microbatches, or as a backward whose gradients are reduced."""
    section = call.meta.get("section")
    is_backward = isinstance(section, Action) and section.kind is not ActionKind.FORWARD
    return _is_for_all(_stage(module, call)) or (is_backward and _is_summed(call))


def _is_for_all(stage: StageCall) -> bool:
    """Return whether a graph gathers or scatters for all microbatches: a call would wait where other stages compute."""
    return any(node.meta.get(collectives.FOR_ALL) for node in stage.graph.graph.nodes)


def _is_summed(node: fx.Node) -> bool:
    """Return whether an all_reduce takes items of a call's result."""
    return any(user.target is communication.all_reduce or (user.target is operator.getitem and _is_summed(user)) for user in node.users)


def inline_stages(module: ProgramModule, mesh: Mesh, rank: int, inline: Inline = "all") -> ProgramModule:
    """Return a program with its communicating stages inlined, and its sends named by their destinations in the mesh.

    Args:
        mesh: whose dimensions the stages' collectives name.
        rank: whose program it is.
        inline: which calls of stages; other values than ``"all"`` are for programs that are read, and do not run.
    """
    inliner = _Inliner(module, mesh, rank, inline)
    sends = any(node.target is communication.send for node in module.graph.nodes)
    return inliner.run() if sends or inliner.inlined else module


def inlined(stage: StageCall, section: Action, like: ProgramModule, mesh: Mesh, rank: int, n_saved: int) -> ProgramModule:
    """Return one call of a communicating stage as a program of its own, whose placeholders are the stage's arguments.

    Args:
        section: the action that the call belongs to.
        like: the program that calls it.
        n_saved: how many of the arguments come in one tuple.
    """
    graph = fx.Graph()
    batch = graph.placeholder("batch")
    batch.meta["val"] = next(node.meta.get("val") for node in like.graph.nodes if node.target == "batch")
    arguments = []
    for node in [node for node in stage.graph.graph.nodes if node.op == "placeholder"][len(stage.bound_names) :]:
        arguments.append(graph.placeholder(f"given_{node.name}"))
        arguments[-1].meta.update({key: node.meta[key] for key in ("val", OWN_MEMORY) if key in node.meta})
    given: tuple[Any, ...] = (tuple(arguments[:n_saved]), *arguments[n_saved:]) if stage.takes_tuple else tuple(arguments)
    call = graph.create_node("call_module", "stage", given, {}, name="call")
    call.meta["section"] = Action(section.stage, section.kind, 0)
    graph.output(call)
    module = ProgramModule({"stage": stage}, graph, class_name="Call")
    module.meta["batch_size"] = like.meta["batch_size"]
    return inline_stages(module, mesh, rank)


class _Inliner:
    """Copies a program node by node."""

    def __init__(self, module: ProgramModule, mesh: Mesh, rank: int, inline: Inline) -> None:
        self.module = module
        self.mesh = mesh
        self.rank = rank
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.bound: dict[str, fx.Node] = {}
        self._row_counts: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]] = {}
        sections = [node.meta["section"] for node in module.graph.nodes if isinstance(node.meta.get("section"), Action)]
        self.stages = {section.stage for section in sections}
        self.like: fx.Node
        traced = next((node.meta.get("val") for node in module.graph.nodes if node.target == "batch"), None)
        self.symbol = traced.node.expr if isinstance(traced, torch.SymInt) else None
        sizes = next((node for node in module.graph.nodes if node.target is microbatch_sizes), None)
        n_microbatches = 1 + max((section.microbatch for section in sections), default=0) if sizes is None else sizes.args[1]
        self.rows = microbatch_sizes(int(module.meta["batch_size"]), n_microbatches)
        self.inlined = inlined_calls(module, self.rows, inline)

    def run(self) -> ProgramModule:
        kept: dict[str, nn.Module] = {}
        for node in self.module.graph.nodes:
            self.like = node
            child = self.module.get_submodule(node.target) if node.op == "call_module" else None
            if isinstance(child, StageCall) and node in self.inlined:
                self.values[node] = self._inline(child, node)
                continue
            arguments, keywords = fx.map_arg(node.args, self.values.__getitem__), fx.map_arg(node.kwargs, self.values.__getitem__)
            if node.target is operator.getitem and not isinstance(arguments[0], fx.Node):
                self.values[node] = arguments[0][arguments[1]]
                continue
            if child is not None:
                kept[node.target] = child
            if node.op == "output":
                self.graph.output(arguments[0])
                continue
            name = node.name
            if node.target is communication.send:
                name = re.sub(r"_to_rank\d+(_\d+)?$", f"_to_rank{node.kwargs['destination']}", name)
            copy = self.graph.create_node(node.op, node.target, arguments, keywords, name=name)
            copy.meta = dict(node.meta)
            self.values[node] = copy
        self.graph.lint()
        unbound = {name: torch.empty(0, device="meta") for name in self.bound}  # ``Program.bind`` gives the tensors
        module = ProgramModule({**kept, **unbound}, self.graph, class_name=type(self.module).__name__)
        module.meta.update(self.module.meta)
        return module

    # -- one call of a stage -------------------------------------------------------------------------------------------------------

    def _inline(self, stage: StageCall, call: fx.Node) -> Any:
        """Inline a stage; return its results as nodes of the program, and tuples of these."""
        arguments: list[Any] = list(fx.map_arg(call.args, self.values.__getitem__))
        placeholders = [node for node in stage.graph.graph.nodes if node.op == "placeholder"]
        if stage.takes_tuple:
            spread = arguments[0]
            if isinstance(spread, fx.Node):
                count = len(placeholders) - len(stage.bound_names) - len(arguments) + 1
                saved = placeholders[len(stage.bound_names) :][:count]
                items = [self._call(operator.getitem, (spread, index), f"{spread.name}_{index}") for index in range(count)]
                spread = [self._describe(item, node) for item, node in zip(items, saved, strict=True)]
            arguments = [*spread, *arguments[1:]]
        state = dict(zip(placeholders, stage.bound_names, strict=False))
        values: dict[fx.Node, Any] = dict(zip(placeholders[len(state) :], arguments, strict=True))
        label = self._label(call)
        for node in stage.graph.graph.nodes:
            if node.op == "placeholder":
                continue
            for source in node.all_input_nodes:
                if source in state:
                    values[source] = self._state(state[source], source.meta.get("val"))
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            values[node] = self._node(node, values, f"{node.name}_{label}")
        raise AssertionError("a graph ends with its output")

    def _label(self, call: fx.Node) -> str:
        """Return a suffix for the names of a call's nodes: microbatch, and stage if the rank has several; else the call's name."""
        section = call.meta.get("section")
        if not isinstance(section, Action):
            return call.name
        return f"mb{section.microbatch}" if len(self.stages) == 1 else f"stage{section.stage}_mb{section.microbatch}"

    def _state(self, name: str, fake: Any) -> fx.Node:
        """Return the node of a parameter or buffer, written once, before its first use."""
        if name not in self.bound:
            self.bound[name] = self.graph.create_node("get_attr", name, name=name)
            self.bound[name].meta.update(section=self.like.meta.get("section"), val=fake)
        return self.bound[name]

    def _node(self, node: fx.Node, values: Mapping[fx.Node, Any], name: str) -> Any:
        arguments, keywords = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        write = _WRITERS.get(node.target)
        if write is not None:
            return write(self, node, arguments, name)
        assert callable(node.target)
        if draws(node):
            group = self.mesh.group(self.rank, self.mesh.cutting.names)
            return self._describe(self._call(communication.draw_alike, (node.target, group, *arguments), name, **keywords), node)
        return self._describe(self._call(node.target, arguments, name, **keywords), node)

    def _describe(self, copy: fx.Node, node: fx.Node) -> fx.Node:
        """Copy the metadata of a stage's node to its copy for one microbatch."""
        copy.meta.update({key: value for key, value in node.meta.items() if key != "section"}, is_of_microbatch=True)
        return copy

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, /, **keywords: Any) -> fx.Node:
        node = self.graph.create_node("call_function", function, arguments, keywords, name=name)
        node.meta["section"] = self.like.meta.get("section")
        return node

    # -- collectives ---------------------------------------------------------------------------------------------------------------

    def communicate(
        self,
        node: fx.Node,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        name: str,
        share: Fraction | int = 1,
        /,
        **keywords: Any,
    ) -> fx.Node:
        """Write a collective of one tensor: its start, its wait, and the getitem of its result.

        Args:
            node: the collective in the stage's graph.
            share: the fraction of the tensor that is sent, for reports and simulation.
        """
        started = self._call(function, arguments, f"start_{name}", **keywords)
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        section = self.like.meta.get("section")
        rows = self.rows[section.microbatch if isinstance(section, Action) else 0]
        started.meta["bytes"] = int(bytes_of(value, self.symbol, rows) * share)
        started.meta.update({"reason": node.name, TIMES: self.inlined[self.like]})
        started.meta.update({key: node.meta.get(key, False) for key in (collectives.AGAIN, collectives.FOR_ALL)})
        finished = self._call(communication.wait, (started,), f"wait_{name}")
        result = self._call(operator.getitem, (finished, 0), name)
        return self._describe(result, node)

    def group(self, over: str) -> tuple[int, ...]:
        return self.mesh.group(self.rank, (over,))

    def place(self, over: str) -> int:
        return self.mesh.coordinate(self.rank)[over]

    def row_counts(
        self, source: Any, sent: fx.Node, own: fx.Node, received: fx.Node, theirs: fx.Node, over: str
    ) -> tuple[fx.Node, fx.Node]:
        """Write the numbers of rows that go to each rank, and that come from each, once for all collectives that move these rows.

        Args:
            source: the counts of the stage's graph that rows are sent by: all ranks have it by this name.
        """
        if (sent, received) not in self._row_counts:
            route, group = f"{source.name}_{self._label(self.like)}", self.group(over)
            goes = self._call(row_counts, (sent, own, group, route), f"{sent.name}_numbers", sends=True)
            comes = self._call(row_counts, (received, theirs, group, route), f"{received.name}_numbers", sends=False)
            self._row_counts[sent, received] = goes, comes
        return self._row_counts[sent, received]

    def times(self, count: int, size: fx.Node | int, name: str) -> fx.Node | int:
        """Write a multiple of a size; a symbolic size gives a node."""
        return count * size if isinstance(size, int) else self._call(operator.mul, (count, size), name)

    def call(self, node: fx.Node, function: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> fx.Node:
        return self._describe(self._call(function, arguments, name), node)


_Write: TypeAlias = Callable[[_Inliner, fx.Node, tuple[Any, ...], str], Any]
"""Writes an operator of a stage: the node, its arguments in the program, its name there."""


def _all_reduce(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, over, operation = arguments
    return inliner.communicate(node, communication.all_reduce, ([x],), name, group=inliner.group(over), operation=operation)


def _along(function: Callable[..., Any]) -> _Write:
    """Return the writer of a collective along one dimension: a gather, or a reduction of which each rank gets a part."""

    def write(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
        x, dim, over, _, sizes, _ = arguments
        keywords = {"sizes": (tuple(sizes),)} if sizes else {}
        return inliner.communicate(node, function, ([x], (dim,)), name, group=inliner.group(over), **keywords)

    return write


def _all_to_all(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, split_dim, concat_dim, over, _, split, _, concat, _ = arguments
    sizes = {"split_sizes": (tuple(split),), "concat_sizes": (tuple(concat),)} if split else {}
    dims = ([x], (split_dim,), (concat_dim,))
    return inliner.communicate(node, communication.all_to_all, dims, name, group=inliner.group(over), **sizes)


def _exchange_rows(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, sent, received, own, theirs, over, back = arguments
    route, group = inliner.row_counts(node.args[1], sent, own, received, theirs, over), inliner.group(over)
    split, concat = reversed(route) if back else route
    return inliner.communicate(
        node, communication.all_to_all, ([x], (0,), (0,)), name, group=group, split_sizes=(split,), concat_sizes=(concat,)
    )


def _take(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, dim, over, count, sizes, _ = arguments
    return inliner.call(node, take_part, (x, dim, tuple(sizes) if sizes else count, inliner.place(over)), name)


def _keep_first(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, over = arguments
    return x if inliner.place(over) == 0 else inliner.call(node, torch.zeros_like, (x,), name)


def _halo_exchange(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, dim, over, owned, wanted, _, _, fill = arguments
    share = _halo_share(inliner.place(over), owned, wanted)
    halo = {"group": inliner.group(over), "owned": (tuple(owned),), "wanted": (wanted,), "fill": fill}
    return inliner.communicate(node, communication.halo_exchange, ([x], (dim,)), name, share, **halo)


def _halo_add(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, dim, over, owned, wanted, *_ = arguments
    share = _halo_share(inliner.place(over), owned, wanted, back=True)
    halo = {"group": inliner.group(over), "owned": (tuple(owned),), "wanted": (wanted,)}
    return inliner.communicate(node, communication.halo_add, ([x], (dim,)), name, share, **halo)


def _halo_share(place: int, owned: Sequence[int], wanted: str, *, back: bool = False) -> Fraction:
    """Return the fraction of a tensor's elements that a rank sends in a halo exchange, or in its backward (``back``).

    Args:
        place: the rank's position in the group.
        owned: for each rank, the elements that it owns.
        wanted: for each rank, the index ranges that it reads (text form).
        back: gradients of the elements read are sent to their owners.
    """
    read = segments(tuple(owned), wanted)
    others = [rank for rank in range(len(owned)) if rank != place]
    given = [read[place][other] if back else read[other][place] for other in others]
    whole = length(from_text(wanted)[place]) if back else owned[place]
    return Fraction(sum(copy.count for segment in given for copy in segment), whole)


def _take_runs(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, dim, over, wanted, _, _, fill = arguments
    return inliner.call(node, take_runs, (x, dim, from_text(wanted)[inliner.place(over)], fill), name)


def _put_runs(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    x, dim, over, wanted, own, _, _ = arguments
    return inliner.call(node, put_runs, (x, dim, from_text(wanted)[inliner.place(over)], own), name)


def _local_index(inliner: _Inliner, node: fx.Node, arguments: tuple[Any, ...], name: str) -> Any:
    index, over, _, size, sizes, _ = arguments
    place = inliner.place(over)
    if place == 0:
        return index
    start = sum(sizes[:place]) if sizes else inliner.times(place, size, f"{name}_start")
    return inliner.call(node, torch.ops.aten.sub.Scalar, (index, start), name)


_WRITERS: Mapping[Any, _Write] = {
    collectives.all_reduce: _all_reduce,
    collectives.vary: lambda _inliner, _node, arguments, _name: arguments[0],
    collectives.all_gather: _along(communication.all_gather),
    collectives.replicate: _along(communication.all_gather),
    collectives.take: _take,
    collectives.reduce_scatter: _along(communication.reduce_scatter),
    collectives.exchange: _all_to_all,
    collectives.exchange_rows: _exchange_rows,
    collectives.keep_first: _keep_first,
    collectives.local_index: _local_index,
    collectives.halo_exchange: _halo_exchange,
    collectives.halo_add: _halo_add,
    collectives.take_runs: _take_runs,
    collectives.put_runs: _put_runs,
}
"""How a program carries out each operator of ``passes.ir.comm.functional``."""
