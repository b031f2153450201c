"""Build one rank's fx graph: microbatches of inputs, values and their messages, sizes.

One emitter writes one rank's graph. It knows where each value of each microbatch is: computed here, or still to be received.

What nodes say of themselves beside fx's own ``meta``:

    "section"   the action that they belong to, or words: "gradients of parameters"
    "message"   on a receive, its wait and a send: what is communicated
    "reduces"   on an all_reduce: the parameters or the input whose gradients it sums
    "dtype"     on the loss of the batch: in which it is sent
    "bytes"     on a receive, a send and an all_reduce: how much, at the batch size that the model was traced with
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.autograd.staged_model import SplitModel
from passes.emit.communication_plan import Item, Message
from passes.graph.program_printer import ProgramModule
from passes.graph.symbolic_sizes import bytes_of, emit_size, size_of
from passes.ir.comm.microbatch import microbatch_sizes, split_batch
from passes.ir.comm.primitives import receive, send, wait
from passes.ir.graph import Input, Total
from passes.ir.program import StageCall
from passes.ir.schedule import Action

Arrivals = Mapping[tuple[int, int], Sequence[Message]]


class Emitter:
    """Writes the program of one rank.

    Args:
        lowered: the stages.
        rank: whose program it is.
        n_microbatches: microbatches of the batch.
        tags: the tag of every message of the program set.
        extra: arguments of the program besides the batch size and the model's inputs.
        loss_dtype: dtype in which the loss is sent to the other ranks.
    """

    def __init__(
        self,
        lowered: SplitModel,
        rank: int,
        n_microbatches: int,
        tags: Mapping[Message, int],
        extra: Sequence[str] = (),
        loss_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.lowered = lowered
        self.rank = rank
        self.n_microbatches = n_microbatches
        self.tags = tags
        self.loss_dtype = loss_dtype
        self.graph = fx.Graph()
        self.modules: dict[str, nn.Module] = {}
        self.values: dict[tuple[str, int | None], fx.Node] = {}
        self.section: Action | str = ""
        self._model_nodes = _nodes(lowered, rank)
        self._inputs = {leaf.placeholder: leaf for leaf in lowered.graph.inputs if leaf.placeholder is not None}
        self.inputs = {name: self._placeholder(name) for name in ("batch", *_model_inputs(lowered, rank), *extra)}
        self.batch = self.inputs["batch"]
        self._totals = {total.placeholder: total for total in lowered.graph.totals}
        self._pending: dict[Message, fx.Node] = {}
        self._received: dict[Message, fx.Node] = {}
        self._posted: defaultdict[int, int] = defaultdict(int)
        self._sizes: fx.Node | None = None
        self._size_nodes: dict[int, fx.Node] = {}
        self._input_parts: dict[str, fx.Node] = {}
        self._arrivals = _arrivals(tags)
        self.targets: fx.Node
        self.weights: fx.Node

    # -- nodes ---------------------------------------------------------------------------------------------------------------------

    def _placeholder(self, name: str) -> fx.Node:
        node = self._in_section(self.graph.placeholder(name))
        if name == "batch":
            traced = self._model_nodes.get("batch")
            node.meta["val"] = traced.meta["val"] if traced is not None else self.traced_batch
        elif name in self._inputs:
            node.meta["val"] = self.fake_over_batch(name, self._inputs[name].batch_dim)
        return node

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, /, **keywords: Any) -> fx.Node:
        return self._in_section(self.graph.create_node("call_function", function, arguments, keywords, name=name))

    def call_module(self, target: str, module: Callable[[], nn.Module], arguments: tuple[Any, ...], name: str) -> fx.Node:
        """Call a module of the program, made on first use."""
        if target not in self.modules:
            self.modules[target] = module()
        return self._in_section(self.graph.create_node("call_module", target, arguments, {}, name=name))

    def _in_section(self, node: fx.Node) -> fx.Node:
        node.meta["section"] = self.section
        return node

    def item(self, value: fx.Node, index: int, name: str) -> fx.Node:
        return self.call(operator.getitem, (value, index), name)

    @property
    def collected(self) -> tuple[int, ...]:
        """The microbatches whose results the rank collects."""
        return tuple(number for number in range(self.n_microbatches) if self.lowered.rank_of(-1, number) == self.rank)

    @property
    def traced_batch(self) -> int:
        """The size of the batch that was traced: of all microbatches where the graph is fixed to the size of one."""
        size = self.lowered.graph.batch_size
        return size if self.lowered.graph.batch is not None else size * self.n_microbatches

    # -- microbatches --------------------------------------------------------------------------------------------------------------

    def sizes(self) -> fx.Node:
        """Return the sizes of all microbatches."""
        if self._sizes is None:
            self._sizes = self.call(microbatch_sizes, (self.batch, self.n_microbatches), "sizes")
        return self._sizes

    def size(self, microbatch: int) -> fx.Node:
        if microbatch not in self._size_nodes:
            self._size_nodes[microbatch] = self.item(self.sizes(), microbatch, f"size_mb{microbatch}")
        return self._size_nodes[microbatch]

    def model_input(self, name: str, microbatch: int) -> fx.Node:
        """Return an input of the model: its rows, the whole if it has no batch, or a number counted over the batch."""
        if name in self._totals:
            return self._total(self._totals[name])
        leaf: Input = self._inputs[name]
        key = (name, microbatch if leaf.batch_dim is not None else None)
        if key not in self.values:
            if name not in self._input_parts:
                node = self.inputs[name]
                cut = leaf.batch_dim is not None
                self._input_parts[name] = self.call(split_batch, (node, self.sizes(), leaf.batch_dim), f"{name}_parts") if cut else node
            parts = self._input_parts[name]
            self.values[key] = parts if leaf.batch_dim is None else self.item(parts, microbatch, f"{name}_mb{microbatch}")
        return self.values[key]

    def _total(self, total: Total) -> fx.Node:
        key = (total.placeholder, None)
        if key not in self.values:
            arguments = tuple(self.inputs[name] for name in total.arguments if name in self.inputs)
            bound = [name for name in total.arguments if name not in self.inputs]
            module = f"count_{total.placeholder}"
            self.values[key] = self.call_module(module, lambda: StageCall(total.module, bound), arguments, total.placeholder)
            self.values[key].meta["val"] = self.fake(total.placeholder)
        return self.values[key]

    def shape(self, value: Tensor, microbatch: int | None) -> tuple[fx.Node | int, ...]:
        """Return the shape of a traced value for one microbatch (None: for the whole batch)."""
        symbol = self.lowered.graph.batch
        expressions = [size_of(size) for size in value.shape]
        if all(isinstance(expression, int) for expression in expressions):
            return tuple(expressions)
        batch = self.batch if microbatch is None else self.size(microbatch)
        return tuple(emit_size(self.graph, expression, symbol, batch) for expression in expressions)

    def fake(self, value: str) -> Tensor:
        """Return the fake tensor of a node of the model."""
        fake = self._model_nodes[value].meta["val"]
        assert isinstance(fake, Tensor)
        return fake

    def fake_over_batch(self, value: str, batch_dim: int | None) -> Tensor:
        """Return a fake tensor of a node of the model over the batch."""
        fake = self.fake(value)
        fixed = self.lowered.graph.batch is None and batch_dim is not None
        return fake.new_empty(self._over_batch(tuple(fake.shape), batch_dim)) if fixed else fake

    def bytes_over_batch(self, value: str, batch_dim: int | None) -> int:
        """Return the bytes of a node of the model over the traced batch."""
        parts = self.n_microbatches if self.lowered.graph.batch is None and batch_dim is not None else 1
        return parts * bytes_of(self.fake(value), self.lowered.graph.batch, self.traced_batch)

    # -- messages ------------------------------------------------------------------------------------------------------------------

    def post(self, items: Sequence[Item]) -> None:
        """Post the receives of the messages that items need, and of all messages sent before them on the same channels."""
        for item in items:
            for message in item.needs:
                arrivals = self._arrivals[message.source, self.rank]
                while message not in self._pending:
                    following = arrivals[self._posted[message.source]]
                    self._posted[message.source] += 1
                    self._pending[following] = self._receive(following)

    def _receive(self, message: Message) -> fx.Node:
        if message.kind == "loss":
            shape: tuple[fx.Node | int, ...] = ()
            dtype = self.loss_dtype
        else:
            fake = self.fake(message.value)
            shape, dtype = self.shape(fake, message.microbatch), fake.dtype
            if message.kind == "output" and message.microbatch is None:
                output = next(output for output in self.lowered.graph.outputs if output.node == message.value)
                shape = self._over_batch(shape, output.batch_dim)
        node = self.call(receive, (shape, dtype), f"receive_{_label(message)}", source=message.source, tag=self.tags[message])
        return self._describe_message(node, message)

    def _over_batch(self, shape: tuple[Any, ...], batch_dim: int | None) -> tuple[Any, ...]:
        """Return the shape over the batch where the graph is traced at the size of a microbatch."""
        if self.lowered.graph.batch is not None or batch_dim is None:
            return shape
        return tuple(size * self.n_microbatches if dim == batch_dim else size for dim, size in enumerate(shape))

    def _describe_message(self, node: fx.Node, message: Message) -> fx.Node:
        node.meta["message"] = message
        if message.kind == "loss":
            node.meta["bytes"] = self.loss_dtype.itemsize
        else:
            batch = self.traced_batch
            size = batch if message.microbatch is None else microbatch_sizes(batch, self.n_microbatches)[message.microbatch]
            node.meta["bytes"] = bytes_of(self.fake(message.value), self.lowered.graph.batch, size)
        return node

    def arrive(self, message: Message) -> fx.Node:
        """Return the received value of a message; its wait is written once."""
        if message not in self._received:
            node = self.call(wait, (self._pending[message],), _label(message))
            node.meta["message"] = message
            self._received[message] = node
        return self._received[message]

    def send(self, message: Message, value: fx.Node) -> None:
        name = f"send_{_label(message)}_to_rank{message.destination}"
        node = self.call(send, (value,), name, destination=message.destination, tag=self.tags[message])
        self._describe_message(node, message)

    def finish(self, result: Any, name: str) -> ProgramModule:
        """Close the graph."""
        self.graph.output(result)
        self.graph.lint()
        module = ProgramModule(self.modules, self.graph, class_name=name)
        module.meta["batch_size"] = self.traced_batch
        return module


def _nodes(lowered: SplitModel, rank: int) -> dict[str, fx.Node]:
    """Return the nodes of a rank's graph by name; where stages have graphs of their own, results as the last stage has them.

    Every rank receives the results.
    """
    found = {node.name: node for node in lowered.graph_of(rank).graph.nodes}
    if lowered.parts:
        found.update((node.name, node) for node in lowered.graph.graph.nodes if node.name in lowered.returned)
    return found


def _model_inputs(lowered: SplitModel, rank: int) -> list[str]:
    """Return the model inputs that a rank reads, in the model's order: those of its stages, and those of counts over the batch.

    A count over the batch (``lowered.graph.totals``) is computed by the program from inputs, so it is no input itself.
    """
    read = {name for stage in lowered.stages_of(rank) for name in stage.model_inputs}
    totals = {total.placeholder: total for total in lowered.graph.totals}
    read |= {argument for name in read if name in totals for argument in totals[name].arguments}
    wanted = (leaf.placeholder for leaf in lowered.graph.inputs if leaf.placeholder is not None)
    return [name for name in wanted if name in read and name not in totals]


def _arrivals(tags: Mapping[Message, int]) -> Arrivals:
    channels: defaultdict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in sorted(tags, key=tags.__getitem__):
        channels[message.source, message.destination].append(message)
    return channels


def _label(message: Message) -> str:
    label = message.value
    if message.kind == "gradient":
        label += "_gradient"
        label += "_from_loss" if message.consumer == -1 else f"_from_stage{message.consumer}"
    if message.microbatch is not None:
        label += f"_mb{message.microbatch}"
    return label
