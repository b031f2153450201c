"""Read a rank's emitted program as steps on a machine: every node in order.

node of the program                        step

self.stage0_forward(x_mb0)                 compute what its graph computes, make what it returns and saves
send(h, destination=1, tag=0)              start a message; h is held until it has left
pending = all_reduce([dw], group=(0, 1))   start a collective
sums = wait(pending)                       wait for it
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from cost_models.ops.work import Work
from cost_models.simulator.functions import FUNCTIONS, collected, copied
from cost_models.simulator.pricing import NodePrices
from cost_models.simulator.read_stage import GraphReader, Group, StageTemplate, read_stage, template_of
from cost_models.simulator.storages import UNKNOWN, Held, Storage, storages_of
from cost_models.simulator.tasks import Step, Transfer
from passes.emit.coalesce_collectives import coalesce_collectives
from passes.emit.inline_stages import communicates, inlined
from passes.emit.overlap_collectives import overlap_communication
from passes.graph.dependencies import with_ancestors
from passes.graph.program_printer import ProgramModule
from passes.ir.comm import microbatch
from passes.ir.comm import primitives as communication
from passes.ir.comm.unsummed import AddUnsummed
from passes.ir.mesh import Mesh
from passes.ir.program import LossCall, Program, StageCall, StoreGradients
from passes.ir.schedule import Action, ActionKind

__all__ = ["RankWork", "Templates", "gradient_nodes", "passed_on", "read_program"]


Templates: TypeAlias = dict[Any, tuple[int, StageTemplate]]
"""Stages that were read, and by which rank."""


@dataclass(frozen=True)
class RankWork:
    """What one rank does.

    Attributes:
        rank: who.
        steps: in order.
        stays: what it holds before it starts: parameters, buffers, constants, and its inputs.
        trained: bytes and dtype of each parameter that gets a gradient.
    """

    rank: int
    steps: tuple[Step, ...]
    stays: tuple[Storage, ...]
    trained: tuple[tuple[int, torch.dtype], ...]


def read_program(program: Program, batch: int, prices: NodePrices, templates: Templates, mesh: Mesh) -> RankWork:
    """Read a program.

    Args:
        batch: rows that the program is given.
        prices: what its nodes cost.
        templates: stages that were read already, on devices of this kind.
        mesh: whose dimensions collectives name in stages that are not written out.
    """
    reader = _ProgramReader(program, batch, prices, templates, mesh)
    reader.run()
    return RankWork(program.rank, tuple(reader.steps), tuple(reader.stays), tuple(reader.trained.values()))


class _ProgramReader(GraphReader):
    def __init__(self, program: Program, batch: int, prices: NodePrices, templates: Templates, mesh: Mesh) -> None:
        super().__init__(program.module.graph, prices, gradient_nodes(program))
        self.program = program
        self.mesh = mesh
        self.batch = batch
        self.sizes: tuple[int, ...] = (batch,)
        self.stays: list[Storage] = []
        self.trained: dict[str, tuple[int, torch.dtype]] = {}
        self._templates = templates
        self._bound: dict[str, Held] = {}
        self._groups: dict[tuple[int, Group], Group] = {}
        self._pending: dict[fx.Node, tuple[Transfer, Any]] = {}
        self._copied_out: dict[fx.Node, int] = {}
        self._started: defaultdict[tuple[int, ...], int] = defaultdict(int)

    def run(self) -> None:
        """Step through the program."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self._input(node)
            elif node.op == "get_attr":
                self.values[node] = self._state(str(node.target), node.meta["val"])
            elif node.op == "call_module":
                self._module(node, self.program.module.get_submodule(str(node.target)))
            elif node.target in communication.COMMUNICATION:
                self._communicate(node)
            elif node.op != "output":
                self.visit(node, _section(node))

    # -- what is there from the start ----------------------------------------------------------------------------------------------

    def _input(self, node: fx.Node) -> Any:
        if node.target == "batch":
            return self.batch
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor):
            return UNKNOWN
        self.begin()
        value = self.traced(node)
        return self._stay(value)

    def _state(self, name: str, fake: Tensor) -> Held:
        if name not in self._bound:
            held = Held(Storage(name, 0, "parameters"), tuple(int(size) for size in fake.shape), fake.dtype)
            held.storage.bytes = held.bytes
            self._bound[name] = self._stay(held)
        return self._bound[name]

    def _stay(self, value: Held) -> Held:
        value.storage.stays = True
        self.stays.append(value.storage)
        return value

    def rows(self, node: fx.Node) -> int:
        section = node.meta.get("section")
        return self._rows_of(section.microbatch) if node.meta.get("is_of_microbatch") and isinstance(section, Action) else self.batch

    def _rows_of(self, index: int) -> int:
        """The rows of a microbatch. A program of graphs for one size alone counts none, and its shapes do not ask for them."""
        return self.sizes[index] if index < len(self.sizes) else self.batch

    # -- modules -------------------------------------------------------------------------------------------------------------------

    def _module(self, node: fx.Node, module: nn.Module) -> None:
        arguments = self.arguments(node.args)
        self.begin()
        seconds = 0.0
        if isinstance(module, StageCall):
            self._stage(node, module, arguments)
            return
        if isinstance(module, LossCall):
            seconds = self._loss(node, module, arguments)
        elif isinstance(module, AddUnsummed):
            self.values[node] = tuple(arguments[0])
        else:
            assert isinstance(module, StoreGradients)
            self._store(module, arguments[0])
            self.values[node] = None
        made = self.made
        self.steps.append(Step("compute", node.name, _section(node), seconds, made, self.end(node)))

    def _stage(self, node: fx.Node, module: StageCall, arguments: Sequence[Any]) -> None:
        n_saved = len(arguments[0]) if module.takes_tuple else 0
        if module.takes_tuple:
            arguments = (*arguments[0], *arguments[1:])
        placeholders = [each for each in module.graph.graph.nodes if each.op == "placeholder"]
        n_bound = len(module.bound_names)
        state = [self._state(name, each.meta["val"]) for name, each in zip(module.bound_names, placeholders, strict=False)]
        rows = self._rows_of_call(node, placeholders[n_bound:], arguments)
        key = (id(module.graph), rows, self._place if communicates(module) else None)
        if key not in self._templates:
            self._templates[key] = self.program.rank, self._read(node, module, rows, n_saved)
        rank, template = self._templates[key]
        there = functools.partial(self._group_here, rank)
        steps, self.values[node] = template.call(node.name, _section(node), arguments, state, self._next, there)
        if self.values[node] is UNKNOWN and isinstance(node.meta.get("val"), Tensor):
            self.values[node] = self.traced(node)  # a count over the batch, whose graph nobody traced
        dropped = {id(storage): storage for storage in self.end(node)}
        given = {id(storage) for storage in storages_of([*arguments])}
        for step in steps:  # what the caller still holds is not dropped inside
            step.dropped = [each for each in step.dropped if id(each) not in given or dropped.pop(id(each), None) is not None]
        self.steps += [*steps, Step("compute", node.name, _section(node), made=self.made, dropped=list(dropped.values()))]

    def _read(self, node: fx.Node, module: StageCall, rows: int, n_saved: int) -> StageTemplate:
        """A stage that is called for the first time."""
        section = node.meta.get("section")
        if not communicates(module):
            kind = section.kind if isinstance(section, Action) else None
            gives = kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
            return read_stage(module, rows, self.prices, gives_gradients=gives)
        assert isinstance(section, Action)
        assert isinstance(self.program.module, ProgramModule)
        written = inlined(module, section, self.program.module, self.mesh, self.program.rank, n_saved)
        coalesce_collectives([written.graph])
        overlap_communication([written.graph])
        program = Program(self.program.kind, self.program.rank, written, self.program.stages)
        reader = _CallReader(program, rows, self.prices, self._templates, self.mesh, section, n_saved)
        reader.run()
        return reader.template(module.bound_names)

    @functools.cached_property
    def _place(self) -> tuple[int, ...]:
        """Where the rank is along the mesh dimensions that cut: ranks of one place have stages that communicate alike."""
        coordinate = self.mesh.coordinate(self.program.rank)
        return tuple(coordinate[name] for name in self.mesh.cutting.names)

    def _group_here(self, rank: int, group: Group) -> Group:
        """What a group of another rank of one place is for this rank."""
        if rank == self.program.rank:
            return group
        if (rank, group) not in self._groups:
            along = {name: place for name, place in self.mesh.coordinate(self.program.rank).items() if name not in self.mesh.cutting.names}
            self._groups[rank, group] = tuple(self.mesh.rank({**self.mesh.coordinate(member), **along}) for member in group)
        return self._groups[rank, group]

    def _next(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """The key of the next collective of a group: all its ranks count alike."""
        number = self._started[group]
        self._started[group] += 1
        return group, number

    def _rows_of_call(self, node: fx.Node, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> int:
        """What the batch symbol of a stage's graph stands for: its own argument where it takes one."""
        for placeholder, given in zip(placeholders, arguments, strict=True):
            fake = placeholder.meta.get("val")
            if isinstance(fake, torch.SymInt) and fake.node.expr.is_Symbol and isinstance(given, int):
                return given
        section = node.meta.get("section")
        return self._rows_of(section.microbatch) if isinstance(section, Action) else self.batch

    def _loss(self, node: fx.Node, module: LossCall, arguments: Sequence[Any]) -> float:
        """A loss function that no graph shows: it reads its results, and holds as much again until the gradients of them are there."""
        values: Sequence[Held] = arguments[0]
        read = sum(value.bytes for value in values)
        dtype = next((value.dtype for value in values), torch.float32)
        gradients = tuple(self.tensor(node, values[index].shape, values[index].dtype) for index in module.differentiated)
        loss = self.tensor(node, (), torch.float32)
        if any(value.shape for value in values):
            self.make(node, sum(gradient.bytes for gradient in gradients))
        self.values[node] = (loss, *gradients)
        return self.prices.seconds(Work(0, read + sum(gradient.bytes for gradient in gradients), 1 + len(gradients)), dtype)

    def _store(self, module: StoreGradients, gradients: Any) -> None:
        for name, gradient in zip(module.names, gradients, strict=True):
            if name is not None and isinstance(gradient, Held):
                self.trained[name] = (gradient.bytes, gradient.dtype)
        for storage in storages_of(list(gradients)):
            storage.stays = True

    # -- functions -----------------------------------------------------------------------------------------------------------------

    def function(self, node: fx.Node, arguments: Sequence[Any]) -> float:
        function = FUNCTIONS.get(node.target)
        keywords = self.arguments(node.kwargs)
        if function is not None:
            self.values[node] = function(self, node, *arguments, **keywords)
        elif isinstance(node.meta.get("val"), Tensor | tuple):
            self.values[node] = self.traced(node)
        else:
            self.values[node] = UNKNOWN
        assert callable(node.target)
        made = sum(storage.bytes for storage in self.made)
        return self.prices.function(node.target, arguments, self.values[node], made)

    # -- communication -------------------------------------------------------------------------------------------------------------

    def _communicate(self, node: fx.Node) -> None:
        self.begin()
        if node.target is communication.wait:
            self._wait(node)
            return
        arguments, keywords = self.arguments(node.args), self.arguments(node.kwargs)
        if node.target is communication.send:
            rank, peer = self.program.rank, keywords["destination"]
            value = arguments[0]
            transfer = Transfer(node.name, "message", (rank, peer), (rank, peer, keywords["tag"]), value.bytes, tuple(storages_of(value)))
        elif node.target is communication.receive:
            rank, peer = self.program.rank, keywords["source"]
            buffer = self.tensor(node, arguments[0], arguments[1], "communication")
            key = (peer, rank, keywords["tag"])
            transfer = Transfer(node.name, "message", (peer, rank), key, buffer.bytes, buffers=(buffer.storage,))
            self._pending[node] = transfer, buffer
        else:
            transfer = self._collective(node, arguments, keywords)
        self.values[node] = self._pending[node][1] if node in self._pending else None
        made = self.made
        self.steps.append(Step("start", node.name, _section(node), 0.0, made, self.end(node), transfer))

    def _collective(self, node: fx.Node, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Transfer:
        group: tuple[int, ...] = keywords["group"]
        tensors: Sequence[Held] = arguments[0]
        assert callable(node.target)
        if len(group) == 1:
            results: list[Held] = list(tensors)
            size = 0
        else:
            shapes, size = collected(node.target, tensors, arguments[1:], keywords, group.index(self.program.rank))
            copied_in, self._copied_out[node] = copied(node.target, tensors, shapes, arguments[1:])
            self._copy(node, copied_in)
            results = [self.tensor(node, shape, tensor.dtype, "communication") for shape, tensor in zip(shapes, tensors, strict=True)]
        inputs = tuple(storages_of(list(tensors)))
        buffers = tuple(self.made)
        transfer = Transfer(node.name, node.target.__name__, group, self._next(group), size, inputs, buffers)
        self._pending[node] = transfer, results
        return transfer

    def _wait(self, node: fx.Node) -> None:
        """What has arrived is a value like others; the buffer that it came in is its memory."""
        started = node.args[0]
        assert isinstance(started, fx.Node)
        transfer, value = self._pending.pop(started)
        buffers = {id(storage) for storage in transfer.buffers}
        category = self.category(node)

        def arrived(held: Held) -> Held:
            if id(held.storage) not in buffers:
                return held
            storage = Storage(node.name, held.storage.bytes, category)
            self.made.append(storage)
            return Held(storage, held.shape, held.dtype)

        self.values[node] = [arrived(held) for held in value] if isinstance(value, list) else arrived(value)
        made = self.made
        self.steps.append(Step("wait", node.name, _section(node), 0.0, made, self.end(node), transfer))
        self._copy(node, self._copied_out.pop(started, 0))

    def _copy(self, node: fx.Node, size: int) -> None:
        """Into a message or out of it."""
        seconds = self.prices.copying(size)
        if seconds:
            self.steps.append(Step("compute", node.name, _section(node), seconds))


class _CallReader(_ProgramReader):
    """Reads a stage that is written out as a program: what it is given lies in storages of the caller.

    What a forward saved is dropped where it is last read, as it is in a program that is written out.
    """

    def __init__(
        self,
        program: Program,
        rows: int,
        prices: NodePrices,
        templates: Templates,
        mesh: Mesh,
        section: Action,
        n_saved: int,
    ) -> None:
        super().__init__(program, rows, prices, templates, mesh)
        self._n_saved = n_saved
        self._given: list[Storage | None] = []
        returned: Any = self.graph.output_node().args[0]
        if section.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) and isinstance(returned[-1], tuple):
            self.mark_gradients(passed_on(node for node in returned[-1] if isinstance(node, fx.Node)))

    def template(self, names: Sequence[str]) -> StageTemplate:
        """What was read; ``names``: of what is bound, in order."""
        results = self.arguments(self.graph.output_node().args[0])
        state = {names.index(name): held.storage for name, held in self._bound.items()}
        return template_of(self.steps, self._given, state, results)

    def _input(self, node: fx.Node) -> Any:
        if node.target == "batch":
            return self.batch
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor):
            self._given.append(None)
            return self.traced(node)
        self.begin()
        value = self.traced(node)
        is_saved = len(self._given) < self._n_saved
        storage = Storage(node.name, value.storage.bytes if is_saved else 0, "activations", stays=not is_saved, holders=1)
        self._given.append(storage)
        return Held(storage, value.shape, value.dtype, value.key)


def _section(node: fx.Node) -> str:
    return str(node.meta.get("section") or "")


# -- which nodes of a program compute gradients of parameters ----------------------------------------------------------------------


_PASS_GRADIENTS = frozenset(
    {operator.getitem, operator.add, microbatch.add_gradients, microbatch.add_gradients_in_place, communication.wait}
    | {communication.all_reduce, communication.reduce_scatter}
)
"""What stands between the computation of a gradient and its store."""


def gradient_nodes(program: Program) -> set[fx.Node]:
    """The nodes whose values become gradients of parameters."""
    stack: list[fx.Node] = []
    for node in program.module.graph.nodes:
        if node.op == "call_module" and isinstance(program.module.get_submodule(str(node.target)), StoreGradients | AddUnsummed):
            stack += node.all_input_nodes
    return passed_on(stack)


def passed_on(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes, and what they are sums, items or results of communication of."""
    return with_ancestors(nodes, lambda node: node.all_input_nodes if node.target in _PASS_GRADIENTS else ())
