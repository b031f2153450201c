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
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from cost_models.ops.loss_function import copies_in_loss
from cost_models.ops.work import Work
from cost_models.simulator.message_bytes import copied_bytes, moved_bytes
from cost_models.simulator.pricing import NodePrices
from cost_models.simulator.read_stage import Arguments, Given, GraphReader, Group, StageTemplate, read_stage, template_of
from cost_models.simulator.storages import Category, Held, Storage, storages_of
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
from passes.ir.tensor_spec import Size
from passes.verify.abstract_interpreter import UNKNOWN, AbstractInterpreter

Templates: TypeAlias = dict[Any, tuple[int, StageTemplate]]
"""Stages that were read, and by which rank."""


@dataclass(frozen=True)
class RankWork:
    """Steps of one rank.

    Attributes:
        rank: its number.
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
        mesh: whose dimensions collectives name in stages that are not inlined.
    """
    reader = _ProgramReader(program, batch, prices, templates, mesh)
    reader.run()
    return RankWork(program.rank, tuple(reader.steps), tuple(reader.stays), tuple(reader.trained.values()))


class _ProgramReader(GraphReader, AbstractInterpreter):
    """Step through a program: its tensors have storages, and its nodes take time."""

    tensor_type = Held
    batch: int
    sizes: tuple[int, ...]

    def __init__(self, program: Program, batch: int, prices: NodePrices, templates: Templates, mesh: Mesh) -> None:
        GraphReader.__init__(self, program.module.graph, prices, gradient_nodes(program))
        AbstractInterpreter.__init__(self, program, batch)
        self.mesh = mesh
        self.stays: list[Storage] = []
        self.trained: dict[str, tuple[int, torch.dtype]] = {}
        self._templates = templates
        self._bound: dict[str, Held] = {}
        self._groups: dict[tuple[int, Group], Group] = {}
        self._started: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._transfers: dict[fx.Node, Transfer] = {}
        self._copied_out: dict[fx.Node, int] = {}
        self._seconds = 0.0
        self._inside: list[Step] = []

    def run(self) -> None:
        """Step through the program."""
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.begin()
                self.values[node] = self.value_of(node)
            elif node.op == "call_module":
                self._module_steps(node)
            elif node.target in communication.COMMUNICATION:
                self._communication_steps(node)
            elif node.op != "output":
                self.visit(node, _section(node))

    def new(self, shape: Sequence[Size], dtype: torch.dtype) -> Held:
        return self.tensor(self.node, tuple(map(int, shape)), dtype)

    def view(self, tensor: Held, shape: Sequence[Size]) -> Held:
        return Held(tensor.storage, tuple(map(int, shape)), tensor.dtype)

    def same_size(self, one: Size, other: Size) -> bool:
        return one == other

    # -- what is there from the start ----------------------------------------------------------------------------------------------

    def input(self, node: fx.Node) -> Any:
        if node.target == "batch":
            return self.batch
        return self._stay(self.traced(node)) if isinstance(node.meta.get("val"), Tensor) else UNKNOWN

    def state(self, node: fx.Node) -> Held:
        return self._named_state(str(node.target), node.meta["val"])

    def _named_state(self, name: str, fake: Tensor) -> Held:
        """Return a parameter, buffer or constant: in one storage, however often it is read."""
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
        """Return the rows of a microbatch; those of the batch if the program's graphs are for one size, whose shapes do not need them."""
        return self.sizes[index] if index < len(self.sizes) else self.batch

    # -- modules -------------------------------------------------------------------------------------------------------------------

    def _module_steps(self, node: fx.Node) -> None:
        self.begin()
        self._seconds, self._inside = 0.0, []
        self.values[node] = self.value_of(node)
        inside = {id(storage) for step in self._inside for storage in step.dropped}
        dropped = [storage for storage in self.end(node) if id(storage) not in inside]
        own = Step("compute", node.name, _section(node), self._seconds, self.made, dropped)
        self.steps += [*self._inside, own]

    def stage(self, module: StageCall, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> Any:
        node = self.node
        bound = [each for each in module.graph.graph.nodes if each.op == "placeholder"][: len(module.bound_names)]
        state = [self._named_state(name, each.meta["val"]) for name, each in zip(module.bound_names, bound, strict=True)]
        rows = self._rows_of_call(node, placeholders, arguments)
        handed = self._handed_over(arguments)
        key = (id(module.graph), rows, handed, self._place if communicates(module) else None)
        if key not in self._templates:
            n_saved = len(arguments) - len(node.args) + 1
            self._templates[key] = self.program.rank, self._read(node, module, rows, handed, n_saved)
        rank, template = self._templates[key]
        there = functools.partial(self._group_here, rank)
        self._inside, results = template.call(node.name, _section(node), arguments, state, self._next, there)
        # A count over the batch is unknown: its graph was not traced.
        return self.traced(node) if results is UNKNOWN and isinstance(node.meta.get("val"), Tensor) else results

    def _handed_over(self, arguments: Sequence[Any]) -> Given:
        """Return, for each argument of a call, what it is in if the call alone holds that: the stage drops it after its last use."""
        released = (value for value in self._last_use.get(self.node, ()) if value is not self.node)
        releases = Counter(id(storage) for value in released for storage in storages_of(self.values[value]))
        number: dict[int, int] = {}

        def given(argument: Any) -> tuple[int, int, Category] | None:
            if not isinstance(argument, Held):
                return None
            storage = argument.storage
            if storage.stays or storage.holders > releases[id(storage)]:
                return None
            return number.setdefault(id(storage), len(number)), storage.bytes, storage.category

        return tuple(map(given, arguments))

    def _read(self, node: fx.Node, module: StageCall, rows: int, handed: Given, n_saved: int) -> StageTemplate:
        """Read a stage that is called for the first time."""
        section = node.meta.get("section")
        if not communicates(module):
            kind = section.kind if isinstance(section, Action) else None
            gives = kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
            return read_stage(module, rows, handed, self.prices, gives_gradients=gives)
        assert isinstance(section, Action)
        assert isinstance(self.program.module, ProgramModule)
        written = inlined(module, section, self.program.module, self.mesh, self.program.rank, n_saved)
        coalesce_collectives([written.graph])
        overlap_communication([written.graph])
        program = Program(self.program.kind, self.program.rank, written, self.program.stages)
        reader = _CallReader(program, rows, handed, self.prices, self._templates, self.mesh, section)
        reader.run()
        return reader.template(module.bound_names)

    @functools.cached_property
    def _place(self) -> tuple[int, ...]:
        """The rank's coordinates along the sharding dimensions: ranks with equal ones have stages that communicate alike."""
        coordinate = self.mesh.coordinate(self.program.rank)
        return tuple(coordinate[name] for name in self.mesh.cutting.names)

    def _group_here(self, rank: int, group: Group) -> Group:
        """Translate a group of ``rank`` to the group of this rank, which has the same coordinates along the sharding dimensions."""
        if rank == self.program.rank:
            return group
        if (rank, group) not in self._groups:
            along = {name: place for name, place in self.mesh.coordinate(self.program.rank).items() if name not in self.mesh.cutting.names}
            self._groups[rank, group] = tuple(self.mesh.rank({**self.mesh.coordinate(member), **along}) for member in group)
        return self._groups[rank, group]

    def _next(self, group: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Return the key of the next collective of a group: its number, which all ranks of the group count alike."""
        number = self._started[group]
        self._started[group] += 1
        return group, number

    def _rows_of_call(self, node: fx.Node, placeholders: Sequence[fx.Node], arguments: Sequence[Any]) -> int:
        """Return the number that a stage's batch symbol stands for: the argument for it if there is one, else the microbatch's rows."""
        for placeholder, given in zip(placeholders, arguments, strict=True):
            fake = placeholder.meta.get("val")
            if isinstance(fake, torch.SymInt) and fake.node.expr.is_Symbol and isinstance(given, int):
                return given
        section = node.meta.get("section")
        return self._rows_of(section.microbatch) if isinstance(section, Action) else self.batch

    def loss(self, module: LossCall, values: Sequence[Held]) -> Any:
        """Price a loss function without a graph: it reads the results, and holds copies of them until their gradients exist."""
        read = sum(value.bytes for value in values)
        dtype = next((value.dtype for value in values), torch.float32)
        gradients = tuple(self.new(values[index].shape, values[index].dtype) for index in module.differentiated)
        loss = self.new((), torch.float32)
        if any(value.shape for value in values):
            self.make(self.node, sum(copies_in_loss(gradient.dtype) * gradient.bytes for gradient in gradients))
        self._seconds = self.prices.seconds(Work(0, read + sum(gradient.bytes for gradient in gradients), 1 + len(gradients)), dtype)
        return (loss, *gradients)

    def store(self, module: StoreGradients, gradients: Any) -> None:
        for name, gradient in zip(module.names, gradients, strict=True):
            if name is not None and isinstance(gradient, Held):
                self.trained[name] = (gradient.bytes, gradient.dtype)
        for storage in storages_of(list(gradients)):
            storage.stays = True

    # -- functions -----------------------------------------------------------------------------------------------------------------

    def function(self, node: fx.Node, arguments: Sequence[Any]) -> float:
        value = self.value_of(node)
        if value is UNKNOWN and isinstance(node.meta.get("val"), Tensor | tuple):
            value = self.traced(node)
        self.values[node] = value
        assert callable(node.target)
        return self.prices.function(node.target, arguments, value, sum(storage.bytes for storage in self.made))

    # -- communication -------------------------------------------------------------------------------------------------------------

    def _communication_steps(self, node: fx.Node) -> None:
        """Append the start of a node's communication, or the wait for it and then the time of copying out of the message."""
        self.begin()
        self.values[node] = self.value_of(node)
        is_wait = node.target is communication.wait
        started = node.args[0] if is_wait else node
        assert isinstance(started, fx.Node)
        step = Step("wait" if is_wait else "start", node.name, _section(node), 0.0, self.made, self.end(node), self._transfers[started])
        self.steps.append(step)
        if is_wait:
            self._copy(node, self._copied_out.pop(started, 0))

    def send(self, value: Held, destination: int, tag: int) -> None:
        key = (self.program.rank, destination, tag)
        self._transfers[self.node] = Transfer(self.node.name, "message", key[:2], key, value.bytes, tuple(storages_of(value)))

    def receive(self, shape: Sequence[Size], dtype: torch.dtype, source: int, tag: int) -> Held:
        key, buffer = (source, self.program.rank, tag), self.tensor(self.node, tuple(map(int, shape)), dtype, "communication")
        self._transfers[self.node] = Transfer(self.node.name, "message", key[:2], key, buffer.bytes, buffers=(buffer.storage,))
        return buffer

    def collective(self, tensors: Sequence[Held], *rest: Any, **keywords: Any) -> list[Held]:
        node, group = self.node, keywords["group"]
        assert callable(node.target)
        results, size = list(tensors), 0
        if len(group) > 1:
            shapes = [tuple(map(int, result.shape)) for result in self.spec_of_collective((tensors, *rest), keywords).results]
            size = moved_bytes(node.target, tensors, shapes, rest, keywords)
            copied_in, self._copied_out[node] = copied_bytes(node.target, tensors, shapes, rest)
            self._copy(node, copied_in)
            results = [self.tensor(node, shape, tensor.dtype, "communication") for shape, tensor in zip(shapes, tensors, strict=True)]
        inputs, buffers = tuple(storages_of(list(tensors))), tuple(self.made)
        self._transfers[node] = Transfer(node.name, node.target.__name__, group, self._next(group), size, inputs, buffers)
        return results

    def wait(self, started: Any) -> Any:
        """Count received data as memory of this node, no longer as the communication buffer, which is dropped here.

        The bytes are counted once. Values that did not arrive in a buffer (a group of one rank) stay where they are.
        """
        node, source = self.node, self.node.args[0]
        assert isinstance(source, fx.Node)
        buffers = {id(storage) for storage in self._transfers[source].buffers}

        def moved_out_of_buffer(held: Held) -> Held:
            if id(held.storage) not in buffers:
                return held
            return Held(self.make(node, held.storage.bytes), held.shape, held.dtype)

        return [moved_out_of_buffer(held) for held in started] if isinstance(started, list) else moved_out_of_buffer(started)

    def _copy(self, node: fx.Node, size: int) -> None:
        """Append the time of copying so many bytes into a message, or out of one."""
        seconds = self.prices.copying(size)
        if seconds:
            self.steps.append(Step("compute", node.name, _section(node), seconds))


class _CallReader(_ProgramReader):
    """Reads a stage that communicates as an inlined program, with its arguments in storages of the caller."""

    def __init__(
        self,
        program: Program,
        rows: int,
        handed: Given,
        prices: NodePrices,
        templates: Templates,
        mesh: Mesh,
        section: Action,
    ) -> None:
        super().__init__(program, rows, prices, templates, mesh)
        self._arguments_given = Arguments(handed)
        returned: Any = self.graph.output_node().args[0]
        if section.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) and isinstance(returned[-1], tuple):
            self.mark_gradients(passed_on(node for node in returned[-1] if isinstance(node, fx.Node)))

    def template(self, names: Sequence[str]) -> StageTemplate:
        """Return a template of the call; ``names``: of bound tensors, in order."""
        results = self.arguments(self.graph.output_node().args[0])
        state = {names.index(name): held.storage for name, held in self._bound.items()}
        return template_of(self.steps, self._arguments_given.storages, state, results)

    def input(self, node: fx.Node) -> Any:
        if node.target == "batch":
            return self.batch
        value = self.traced(node)
        storage = self._arguments_given.next(node)
        return value if storage is None else Held(storage, value.shape, value.dtype, value.key)


def _section(node: fx.Node) -> str:
    return str(node.meta.get("section") or "")


# -- which nodes of a program compute gradients of parameters ----------------------------------------------------------------------


_PASS_GRADIENTS = frozenset(
    {operator.getitem, operator.add, microbatch.add_gradients, microbatch.add_gradients_in_place, communication.wait}
    | {communication.all_reduce, communication.reduce_scatter}
)
"""Operations between the computation of a gradient and its store."""


def gradient_nodes(program: Program) -> set[fx.Node]:
    """Return the nodes whose values become gradients of parameters."""
    stack: list[fx.Node] = []
    for node in program.module.graph.nodes:
        if node.op == "call_module" and isinstance(program.module.get_submodule(str(node.target)), StoreGradients | AddUnsummed):
            stack += node.all_input_nodes
    return passed_on(stack)


def passed_on(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes, and the operands whose sums, items or communicated results they are."""
    return with_ancestors(nodes, lambda node: node.all_input_nodes if node.target in _PASS_GRADIENTS else ())
