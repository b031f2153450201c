"""The diagram of a partitioned model: a lane for each rank with its modules as boxes; values, messages and collectives as arrows.

Boxes and values are read from the stages, communication from the programs that run. All gradient reductions of a rank end in one box below
its modules.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from cost_models.hardware.units import format_bytes
from partitioner.reports.communication.purpose import dimensions_of
from partitioner.reports.communication.value_layouts import changes_of
from partitioner.reports.pictures.diagram import Arrow, Box, Diagram, Lane
from partitioner.reports.sources import Explained
from partitioner.reports.tables.devices import headline
from passes.autograd.staged_model import SplitModel
from passes.emit.communication_plan import Message
from passes.emit.inline_stages import TIMES
from passes.graph.provenance import module_path
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.primitives import COLLECTIVES, send
from passes.ir.graph import ModelGraph
from passes.ir.mesh import owning_pipelines, pipelines
from passes.stages.split import StageGraph

_LANES = 8
"""Ranks that are drawn by default: the first ones, or of many ranks the first of each class of equal ones."""

_SIGNS = {"activation": "\u2193", "gradient": "\u2191"}
"""Kinds of messages that are drawn, and the signs of their bytes."""


def partition_diagram(explained: Explained, depth: int | None = None, ranks: Sequence[int] | None = None) -> Diagram:
    """Return the diagram of a partitioned model.

    Args:
        depth: module depth of the boxes, as in ``named_modules``; None: the deepest that fits a page.
        ranks: the ranks to draw; None: the first eight, of many ranks those of different classes.
    """
    mesh = explained.mesh
    depth = depth or suitable_depth(explained.lowered)
    shown = tuple(of_class.program.rank for of_class in explained.classes[:_LANES]) if ranks is None else tuple(ranks)
    builder = _Builder(explained, depth, shown)
    for rank in shown:
        builder.add_boxes(rank)
    builder.add_data()
    for rank in shown:
        builder.add_communication(rank)
    title = headline(explained.name, explained.plan, training=explained.graph.training)
    title += "" if len(shown) == mesh.size else f" - {len(shown)} of {mesh.size} ranks"
    return Diagram(title, tuple(map(builder.lane, shown)), tuple(builder.boxes), builder.arrows())


class _Builder:
    """Collects the boxes and arrows of a diagram.

    Attributes:
        shown: rank -> index of its lane.
        place: rank -> number of its pipeline, position in it.
        producer: (rank, value) -> key of the box that computes the value there.
        reader: (rank, value) -> keys of the boxes that read it there.
        data: (source, target) for each pair of boxes of one rank that a value connects, as keys of a dict.
        messages: (source, target) -> the messages between boxes of two ranks, with their bytes.
        collectives: (source, target) -> words such as ``"all_reduce over tensor"`` -> the bytes of each of these collectives.
    """

    def __init__(self, explained: Explained, depth: int, shown: Sequence[int]) -> None:
        self.explained = explained
        self.mesh = explained.mesh
        self.depth = depth
        self.shown = {rank: lane for lane, rank in enumerate(shown)}
        self.boxes: list[Box] = []
        ranks = pipelines(self.mesh)
        self.programs = {of_class.program.rank: of_class.program for of_class in explained.classes}
        self.place = {rank: (number, ranks[number].index(rank)) for rank, number in owning_pipelines(self.mesh).items()}
        self.producer: dict[tuple[int, str], str] = {}
        self.reader: dict[tuple[int, str], list[str]] = defaultdict(list)
        self.data: dict[tuple[str, str], None] = {}
        self.messages: defaultdict[tuple[str, str], list[tuple[Message, int]]] = defaultdict(list)
        self.collectives: defaultdict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))

    def lane(self, rank: int) -> Lane:
        mesh, plan = self.mesh, self.explained.plan
        where = ", ".join(f"{name} {index}" for name, index in mesh.coordinate(rank).items()) if len(mesh.names) > 1 else ""
        return Lane(f"rank {rank}", "  ".join(part for part in (plan.devices[rank], where) if part))

    def add_boxes(self, rank: int) -> None:
        """Add a box for each module run of the rank's stages; record which values it computes and reads."""
        number, place = self.place[rank]
        lowered = self.explained.pipelines[number]
        counts: defaultdict[int, int] = defaultdict(int)
        for run in module_runs(lowered, self.depth):
            if place not in lowered.stage_ranks[run.stage]:
                continue
            key = f"{rank}:{run.stage}:{counts[run.stage]}"
            counts[run.stage] += 1
            self.boxes.append(self._box(rank, key, run))
            for node in run.operations:
                self.producer.setdefault((rank, node.name), key)
                for source in node.all_input_nodes:
                    if key not in self.reader[rank, source.name]:
                        self.reader[rank, source.name].append(key)

    def _box(self, rank: int, key: str, run: ModuleRun) -> Box:
        """Label a module run with its module and the bytes of its parameters, or with its operations if it has none."""
        operations = list(dict.fromkeys(map(_operation, run.operations)))
        stored = [node for node in run.parameters if rank in self.explained.blocks.get(node.name, {})]
        size = sum(bytes_of(node.meta["val"], None, 1) for node in stored)
        names = [self.explained.graph.parameters[node.name] for node in run.parameters]
        label = run.module or ", ".join(operations[:2])
        detail = (format_bytes(size) if size else ", ".join(operations[:3])) if run.module else ""
        tooltip = "\n".join([run.module or "the model itself", f"stage {run.stage}", ", ".join(operations), *names])
        return Box(key, self.shown[rank], run.stage, label, detail, tooltip)

    def add_data(self) -> None:
        """Connect the boxes of each rank: each that computes a value with those that read it."""
        for (rank, value), source in self.producer.items():
            for target in self.reader.get((rank, value), ()):
                if target != source:
                    self.data[source, target] = None

    def add_communication(self, rank: int) -> None:
        """Add the messages that a rank sends and its collectives."""
        program = self.programs.get(rank) or self.explained.programs[rank]
        for node in program.module.graph.nodes:
            if node.target is send:
                self._add_message(rank, int(node.kwargs["destination"]), node.meta["message"], int(node.meta["bytes"]))
            elif node.target in COLLECTIVES and len(node.kwargs["group"]) > 1:
                self._add_collective(rank, node)

    def _add_message(self, rank: int, destination: int, message: Message, size: int) -> None:
        """Add a message to the arrow from the value's box to its first reader; a gradient goes against that arrow."""
        if destination not in self.shown or message.kind not in _SIGNS:
            return
        producing_rank, reading_rank = (destination, rank) if message.kind == "gradient" else (rank, destination)
        source = self.producer.get((producing_rank, message.value))
        targets = self.reader.get((reading_rank, message.value), ())
        if source is not None and targets:
            self.messages[source, targets[0]].append((message, size))

    def _add_collective(self, rank: int, node: fx.Node) -> None:
        """Add a collective to the arrow from the rank to the next rank of the group; the last rank of the group has none."""
        group = [member for member in node.kwargs["group"] if member in self.shown]  # type: ignore[union-attr]
        if rank not in group[:-1]:
            return
        source = self._collective_box(rank, node)
        if source is None:
            return
        function: Any = node.target
        over = " and ".join(dimensions_of(node.kwargs["group"], self.mesh))  # type: ignore[arg-type]
        next_rank = group[group.index(rank) + 1]
        target = f"{next_rank}:{source.partition(':')[2]}"  # the same box on the next rank
        self.collectives[source, target][f"{function.__name__} over {over}"] += [int(node.meta.get("bytes", 0))] * node.meta.get(TIMES, 1)

    def _collective_box(self, rank: int, node: fx.Node) -> str | None:
        """Return the box of the communicated value: that of its module, or the gradient box of the rank; None if neither is drawn."""
        reduces = node.meta.get("reduces")
        if reduces is not None and any(name in self.explained.graph.parameters for name in reduces):
            return self._gradient_box(rank, node.kwargs["group"])  # type: ignore[arg-type]
        for change, _ in changes_of(node):
            readers = self.reader.get((rank, change.value), ())
            box = self.producer.get((rank, change.value)) or (readers[0] if readers else None)
            if box is not None:
                return box
        return None

    def _gradient_box(self, rank: int, group: Sequence[int]) -> str:
        """Return the box of a rank's reduced gradients, below its modules; add one for each drawn rank of the group if missing."""
        for member in group:
            key = f"{member}:gradients"
            if member in self.shown and all(box.key != key for box in self.boxes):
                self.boxes.append(Box(key, self.shown[member], None, "gradients", "of shared parameters", "sums over ranks"))
        return f"{rank}:gradients"

    def arrows(self) -> tuple[Arrow, ...]:
        """Return the arrows of values that stay on a rank, of messages and of collectives."""
        arrows = [Arrow(source, target, "data") for source, target in self.data]
        for (source, target), messages in self.messages.items():
            sizes = {kind: sum(size for message, size in messages if message.kind == kind) for kind in _SIGNS}
            label = "  ".join(f"{_SIGNS[kind]} {format_bytes(size)}" for kind, size in sizes.items() if size)
            names = dict.fromkeys(message.value for message, _ in messages)
            arrows.append(Arrow(source, target, "message", label, f"{', '.join(names)}, in a step"))
        return (*arrows, *self._collective_arrows())

    def _collective_arrows(self) -> list[Arrow]:
        """Return one arrow for all collectives between two boxes; in a chain of boxes only the first arrow has a label."""
        keys = {box.key for box in self.boxes}
        arrows: list[Arrow] = []
        for (source, target), sizes in self.collectives.items():
            if target not in keys:
                continue
            names = [words.partition(" ")[0] for words in sizes]
            short = names[0] if len(names) == 1 else f"{len(names)} kinds"
            if all(name.startswith("halo_") for name in names):
                short = "halo"
            total = format_bytes(sum(map(sum, sizes.values())))
            label = f"{short} {total}" if all(arrow.target != source for arrow in arrows) else ""
            tooltip = "\n".join(f"{words}: {len(each)} a step, {format_bytes(sum(each))}" for words, each in sizes.items())
            arrows.append(Arrow(source, target, "collective", label, tooltip))
        return arrows


def _operation(node: fx.Node) -> str:
    """Return ``"linear"`` for ``aten.linear.default``."""
    return str(node.target).removeprefix("aten.").split(".")[0] if "." in str(node.target) else getattr(node.target, "__name__", node.name)


_MOST_RUNS, _DEEPEST = 20, 8
"""Largest number of runs of a pipeline that fit a page; largest depth that is tried."""


@dataclass(frozen=True)
class ModuleRun:
    """Consecutive operations of one stage and one module.

    Attributes:
        stage: index of the stage.
        module: the module's path, truncated to the depth; empty for the model itself.
        operations: nodes of the stage's graph.
        parameters: placeholders of parameters that no earlier run of the stage reads.
    """

    stage: int
    module: str
    operations: tuple[fx.Node, ...]
    parameters: tuple[fx.Node, ...]


def suitable_depth(lowered: SplitModel) -> int:
    """Return the largest module depth whose runs fit a page; 1 if none does."""
    fitting = [depth for depth in range(1, _DEEPEST + 1) if len(module_runs(lowered, depth)) <= _MOST_RUNS]
    return max(fitting, default=1)


def module_runs(lowered: SplitModel, depth: int) -> list[ModuleRun]:
    """Return the runs of a pipeline, in order; at depth 2, ``blocks.0.up`` belongs to module ``blocks.0``."""
    return [run for stage in lowered.stages for run in _runs(lowered.graph, stage, depth)]


def _runs(graph: ModelGraph, stage: StageGraph, depth: int) -> list[ModuleRun]:
    """Group the calls of a stage that yield tensors by module, then give each parameter to the first run that reads it."""
    calls = [node for node in stage.module.graph.nodes if node.op == "call_function" and _is_tensor(node.meta.get("val"))]
    runs, read_before = [], set[fx.Node]()
    for module, group in itertools.groupby(calls, key=lambda node: ".".join(_module(node).split(".")[:depth])):
        nodes = tuple(group)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source.name in graph.parameters)
        runs.append(ModuleRun(stage.index, module, nodes, tuple(source for source in read if source not in read_before)))
        read_before.update(read)
    return runs


def _module(node: fx.Node) -> str:
    """Return the path of a node's module; a node without one, for example a cast of a parameter, takes that of its first user."""
    while not node.meta.get("nn_module_stack") and node.users and next(iter(node.users)).op != "output":
        node = next(iter(node.users))
    return module_path(node)


def _is_tensor(value: object) -> bool:
    """Return whether a node's value is a tensor, or a tuple or list with one."""
    values: Sequence[object] = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(element, Tensor) for element in values)
