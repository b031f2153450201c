"""From a program's graph to a Python generator: the one executor of every program, schedule and runtime.

The graph is written as straight-line Python, node by node, in order; a ``wait`` that is not ready yields what it waits for:

    def run(transport, batch, x):
        sizes = microbatch_sizes(batch, 2)
        receive_h_mb0 = transport.receive((sizes[0], 16), float32, source=0, tag=0)
        while not transport.ready(receive_h_mb0):
            yield receive_h_mb0
        h_mb0 = transport.wait(receive_h_mb0)
        receive_h_mb0 = None
        ...

A call that draws random numbers says whose they are, so that every rank draws those of one device (``random_stream``):

        transport.begin_draw((0, 3))
        stage3_forward_mb0 = stage3_forward(...)
        transport.end_draws((0, 3))

A value is dropped after its last use, so that memory is that of the schedule. The function of a stage takes its arguments out of a list:
where the program reads one for the last time, the stage alone holds it, and drops it after its last use there. A backward frees saved
activations while it computes gradients.

        stage1_backward_mb0 = [*saved_mb0, gradient_mb0]
        saved_mb0 = gradient_mb0 = None
        stage1_backward_mb0 = stage1_backward(stage1_backward_mb0)

The embedded runtime runs the generators of all ranks alternately, switching where one waits; under torchrun ``wait`` blocks and the
generator never yields.

ATen operations are called by their fastest Python function: ``torch.ops.aten.mm.default(x, y)`` looks its arguments up in a schema at
every call; ``torch.mm(x, y)`` reaches the same operation through generated code, about 2 microseconds sooner. A stage of a small model
makes hundreds of such calls. A test calls each function and checks which operation is dispatched.
"""

from __future__ import annotations

import functools
import math
import operator
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from partitioner.runtime.collectives.random_stream import ProgramDraws
from partitioner.runtime.collectives.transport import CollectiveTransport
from partitioner.runtime.recording.recorder import active_recorders, in_profiler_ranges
from passes.emit.random_state import drawing_calls
from passes.graph.dependencies import last_uses
from passes.graph.provenance import place_of
from passes.ir.comm.primitives import COMMUNICATION, draw_alike, share_random_state, wait
from passes.ir.errors import ConfigError
from passes.ir.program import Program, StageCall

Run = Generator[Any, None, Any]
"""A running program: yields at each message that it waits for, and returns its results."""


class Executable:
    """A program ready to run: its stages must be bound, and the tensors that its graph names be attributes of its module.

    Attributes:
        program: what it runs.
        placeholders: of the program.
        source: the Python text of it.
    """

    def __init__(self, program: Program) -> None:
        writer = _Writer(program.module)
        self.program, self.placeholders = program, program.placeholders
        self.source = writer.generator()
        self._run: Callable[..., Run] = writer.compile(self.source, self._title)
        self._recorded: Callable[..., Run] | None = None

    def start(self, transport: CollectiveTransport, inputs: Mapping[str, Any]) -> Run:
        """Return the running program: a generator that yields its waits and returns the program's result.

        Args:
            inputs: a value for each placeholder of the program.
        """
        values = [inputs[name] for name in self.placeholders]
        recorder, is_profiled = active_recorders(self.program.rank)
        if recorder is None:
            return self._run(transport, *values)
        if self._recorded is None:
            writer = _Writer(self.program.module, recorded=True)
            self._recorded = writer.compile(writer.generator(), f"recorded {self._title}")
        run = self._recorded(transport, *values, recorder)
        return in_profiler_ranges(run, f"{self.program.kind} of rank {self.program.rank}", recorder) if is_profiled else run

    def failed_node(self, error: BaseException) -> fx.Node | None:
        """Return the node whose operation raised an error inside of PyTorch; None if other code did, such as a hook."""
        found: fx.Node | None = None
        for frame, line in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            written = self._written(file)
            if written is not None:
                graph, source = written
                name = source.splitlines()[line - 1].split()[0]
                found = next((node for node in graph.nodes if node.name == name), None)
            elif not file.startswith(_CODE_OF_TORCH):
                found = None
        return found

    @property
    def _title(self) -> str:
        """The name of the program in tracebacks."""
        return f"program of rank {self.program.rank}"

    def _written(self, file: str) -> tuple[fx.Graph, str] | None:
        """Return the graph, and its text, that has this name in tracebacks; None for other code."""
        title, module = file[1:-1], self.program.module
        if title in (self._title, f"recorded {self._title}"):
            return module.graph, _Writer(module, recorded=title != self._title).generator()
        stage = dict(module.named_children()).get(title)
        return (stage.graph.graph, _Writer(stage.graph).function()) if isinstance(stage, StageCall) else None


@dataclass(frozen=True, eq=False)
class ProgramSet:
    """The programs of all ranks, and those of this process ready to run.

    Attributes:
        programs: one a rank.
        executables: rank of this process -> its program.
    """

    programs: tuple[Program, ...]
    executables: Mapping[int, Executable]

    @functools.cached_property
    def draws(self) -> ProgramDraws:
        """The random numbers that the programs draw."""
        return ProgramDraws(self.programs)


_CODE_OF_TORCH = ("<eval_with_key>", str(Path(torch.__file__).parent))
"""Beginnings of the names of files in tracebacks: graphs that ``torch.fx`` writes, and PyTorch."""


class _Writer:
    """Writes a graph as Python text, one line a node.

    Args:
        module: whose graph it is.
        recorded: add calls of a recorder (``partitioner.runtime.recording.recorder``), which is then the last argument.
    """

    def __init__(self, module: fx.GraphModule, *, recorded: bool = False) -> None:
        self.module = module
        self.recorded = recorded
        self.names: dict[str, Any] = {}
        self._draws = dict(drawing_calls(module))
        self._last_draws = {draws: node for node, draws in self._draws.items() if draws is not None}
        self._last_use = last_uses(module.graph)
        self._calls: dict[str, str] = {}
        used = {node.name for node in module.graph.nodes}
        self._transport, self._recorder = _unused("transport", used), _unused("recorder", used)
        self._bound, self._given = _unused("bound", used), _unused("arguments", used)

    def generator(self) -> str:
        """Return the text of a generator function ``run(transport, *placeholders)``."""
        return "\n".join([*self._lines(self._transport), "    yield", ""])  # it is a generator only if it yields somewhere

    def function(self) -> str:
        """Return the text of the function of a stage, ``run(bound, arguments)``: it empties the list of its arguments."""
        return "\n".join([*self._lines(is_stage=True), ""])

    def compile(self, source: str, title: str) -> Callable[..., Any]:
        """Compile the text of a function ``run``; ``title`` stands for its file in tracebacks."""
        scope = dict(self.names)
        exec(compile(source, f"<{title}>", "exec"), scope)  # noqa: S102  the text is written above, from a verified graph
        run: Callable[..., Any] = scope["run"]
        return run

    def _lines(self, *first: str, is_stage: bool = False) -> list[str]:
        """Return the lines of the function, whose arguments are ``first``, the placeholders, and a recorder if there is one."""
        placeholders = [node.name for node in self.module.graph.nodes if node.op == "placeholder"]
        last = [self._recorder] if self.recorded else []
        if is_stage:
            lines = [f"def run({', '.join([self._bound, self._given, *last])}):"]
            lines += [f"    [{', '.join(placeholders)}] = [*{self._bound}, *{self._given}]", f"    {self._given}.clear()"]
        else:
            lines = [f"def run({', '.join([*first, *placeholders, *last])}):"]
        section = ""
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                continue
            node_section = str(node.meta.get("section") or "")
            if self.recorded and node.op != "output" and node_section != section:
                section = node_section
                lines.append(f"    {self._recorder}.begin({section!r})")
            recorded = self._add_recording(node, self._statement(node))
            lines += [f"    {line}" for line in self._add_draws(node, recorded)]
            if node.op != "output":
                lines += [f"    {line}" for line in _dropping(self._dropped_after(node))]
        return lines

    def _dropped_after(self, node: fx.Node) -> list[fx.Node]:
        """Return the values that are dropped after a node: those that it reads last, but for the arguments of a stage, dropped before."""
        dropped = self._last_use.get(node, [])
        return [value for value in dropped if value is node] if self._calls_stage(node) else dropped

    def _calls_stage(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.module.get_submodule(str(node.target)), StageCall)

    def _add_recording(self, node: fx.Node, lines: list[str]) -> list[str]:
        """Add calls of the recorder around the lines of a node."""
        if not self.recorded:
            return lines
        if node.op == "output":
            return [f"{self._recorder}.end()", *lines]
        if node.target is wait:
            name, *loop, take = repr(str(node.args[0])), *lines
            return [f"{self._recorder}.wait({name})", *loop, f"{self._recorder}.take({name})", take, f"{self._recorder}.arrived({name})"]
        if node.target in COMMUNICATION:
            return [f"{self._recorder}.start({node.name!r})", *lines, f"{self._recorder}.started()"]
        return lines

    def _add_draws(self, node: fx.Node, lines: list[str]) -> list[str]:
        """Add the lines that say whose random numbers a node draws."""
        if node not in self._draws:
            return lines
        draws = self._draws[node]
        is_last = draws is not None and self._last_draws[draws] is node
        return [f"{self._transport}.begin_draw({draws})", *lines, *([f"{self._transport}.end_draws({draws})"] if is_last else [])]

    def _statement(self, node: fx.Node) -> list[str]:
        """Return the lines that compute a node."""
        if node.op == "output":
            return [f"return {self._value(node.args[0])}"]
        if self._calls_stage(node):
            return self._stage_call(node)
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            return [f"{node.name} = {self._object(node.target, module.forward)}({self._arguments(node)})"]
        if node.op == "get_attr":
            attribute = operator.attrgetter(str(node.target))(self.module)
            return [f"{node.name} = {self._object(node.target, attribute)}"]
        if node.target is operator.getitem:
            value, index = node.args
            return [f"{node.name} = {self._value(value)}[{self._value(index)}]"]
        if node.target is wait:
            pending = self._value(node.args[0])
            return [
                f"while not {self._transport}.ready({pending}):",
                f"    yield {pending}",
                f"{node.name} = {self._transport}.wait({pending})",
            ]
        assert callable(node.target)
        if node.target in COMMUNICATION or node.target in (draw_alike, share_random_state):
            return [f"{node.name} = {self._transport}.{node.target.__name__}({self._arguments(node)})"]
        function = quick_call(node)
        return [f"{node.name} = {self._object(getattr(function, '__name__', node.name), function)}({self._arguments(node)})"]

    def _stage_call(self, node: fx.Node) -> list[str]:
        """Return the lines that call a stage: its graph is compiled, and takes its bound tensors and a list of its arguments."""
        target = str(node.target)
        module = self.module.get_submodule(target)
        assert isinstance(module, StageCall)
        if target not in self._calls:
            writer = _Writer(module.graph)
            function = functools.partial(writer.compile(writer.function(), target), module.bound)
            self._calls[target] = self._object(target, function)
        star = "*" if module.takes_tuple else ""  # it unpacks a tuple of saved values
        return [
            f"{node.name} = [{star}{self._arguments(node)}]",
            *_dropping(value for value in self._last_use.get(node, []) if value is not node),
            f"{node.name} = {self._calls[target]}({node.name})",
        ]

    def _arguments(self, node: fx.Node) -> str:
        keywords = [f"{name}={self._value(value)}" for name, value in node.kwargs.items()]
        return ", ".join([*(self._value(value) for value in node.args), *keywords])

    def _value(self, value: Any) -> str:
        """Return the text of an argument; objects without a literal get a name."""
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, tuple) and len(value) > 64 and all(type(part) is int for part in value):
            return self._object("numbers", value)  # ranks of a large group: they would take longer to parse than the rest
        if isinstance(value, tuple):
            return f"({''.join(self._value(part) + ', ' for part in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._value(part) for part in value)}]"
        if isinstance(value, slice):
            return f"slice({self._value(value.start)}, {self._value(value.stop)}, {self._value(value.step)})"
        if value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self._object(str(value), value)

    def _object(self, hint: Any, value: Any) -> str:
        """Return the name of an object in the generated text: the hint, made an identifier and unique."""
        base = "_" + "".join(letter if letter.isalnum() else "_" for letter in str(hint))
        name, count = base, 0
        while self.names.get(name, value) is not value:
            count += 1
            name = f"{base}_{count}"
        self.names[name] = value
        return name


def _unused(name: str, names: Collection[str]) -> str:
    """Return a name for an argument of the function, other than those of the graph's nodes."""
    return name if name not in names else _unused(f"_{name}", names)


def _dropping(values: Iterable[fx.Node]) -> list[str]:
    """Return the line that drops values, if there are any."""
    names = [value.name for value in values]
    return [f"{' = '.join(names)} = None"] if names else []


aten = torch.ops.aten

_OF_TORCH = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.pow.Tensor_Scalar, aten.rsqrt.default),
    *(aten.exp.default, aten.cos.default, aten.sin.default, aten.tanh.default, aten.sigmoid.default, aten.relu.default, aten.where.self),
    *(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.convolution.default, aten.embedding.default),
    *(aten.native_batch_norm.default, aten.native_group_norm.default, aten.native_layer_norm.default),
    *(aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.cat.default, aten.stack.default, aten.clone.default),
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.reshape.default),
    *(aten.select.int, aten.unbind.int, aten.unsqueeze.default),
)
"""Operations that ``torch`` has a function of the same name for."""

BINDINGS: Mapping[Any, Callable[..., Any]] = {
    **{operation: getattr(torch, operation.overloadpacket.__name__) for operation in _OF_TORCH},
    aten.expand.default: Tensor.expand,
    aten.gelu.default: torch.nn.functional.gelu,
    aten.view.default: Tensor.view,
}
"""Operation -> a public function that dispatches to it when called with the same arguments."""

_KEYWORDS = frozenset({"dtype", "memory_format"})
"""Keywords that these functions take with the same meaning as the operations."""


def quick_call(node: fx.Node) -> Callable[..., Any]:
    """Return the function to call for a node: that of ``BINDINGS`` if it takes the same arguments, else the node's target."""
    assert callable(node.target)
    takes_arguments = node.kwargs.keys() <= _KEYWORDS and bool(node.args)
    return BINDINGS.get(node.target, node.target) if takes_arguments else node.target


_OUT_OF_MEMORY = "allocate memory"
"""A part of the text of PyTorch's error for memory of the host, by which frameworks recognize it."""


def raise_with_place(executable: Executable, error: Exception) -> NoReturn:
    """Raise ConfigError with place and rank from the error of an operation of the model; raise any other error unchanged.

    Unchanged are errors of a user's hook, and subclasses of RuntimeError, by which callers recognize exhausted memory and broken devices.
    """
    node = None
    if type(error) in (RuntimeError, IndexError) and _OUT_OF_MEMORY not in str(error):
        node = executable.failed_node(error)
    if node is None:
        raise error
    raise ConfigError(
        f"rank {executable.program.rank} cannot compute {node.name}: {error}",
        place=place_of(node),
        remedy="check the values of the inputs, such as indices beyond the table of an embedding; to compare, call the model with them",
    ) from error
