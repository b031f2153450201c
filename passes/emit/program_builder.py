"""Build one rank's fx graph: microbatches of inputs, values and their messages, sizes.

One emitter writes one rank's graph. It knows where each value of each microbatch is: computed here, or still to be received.

What nodes say of themselves beside fx's own ``meta``:

    "section"   the action that they belong to, or words: "gradients of parameters"
    "message"   on a receive, its wait and a send: what is communicated
    "reduces"   on an all_reduce: the parameters or the input whose gradients it sums
    "dtype"     on the loss of the batch: in which it is sent
    "bytes"     on a receive, a send and an all_reduce: how much, at the batch size that the model was traced with

Stage calls of a program: forwards, backwards, and what becomes of the gradients of parameters and inputs.

stage1_forward_mb0 = self.stage1_forward(size_mb0, h_mb0)           one call
relu_mb0 = stage1_forward_mb0[0]                                    a value that leaves the stage
stage1_saved_mb0 = stage1_forward_mb0[1]                            what its backward reads
...
stage1_backward_mb0 = self.stage1_backward(stage1_saved_mb0, relu_gradient_mb0)
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.autograd.partition_joint import DifferentiatedStage
from passes.autograd.staged_model import SplitModel
from passes.emit.communication_plan import Item, Message, gradient_sources
from passes.emit.gradient_buckets import gradient_buckets
from passes.graph.buffer_writes import returning_writes, writing_module
from passes.graph.program_printer import ProgramModule
from passes.graph.symbolic_sizes import bytes_of, emit_size, size_of
from passes.ir.comm.microbatch import (
    add_gradients,
    add_gradients_in_place,
    concatenate,
    microbatch_sizes,
    microbatch_weights,
    split_batch,
    total,
    weighted_total,
)
from passes.ir.comm.primitives import all_reduce, receive, send, wait
from passes.ir.graph import Input, Total
from passes.ir.program import StageCall, StoreGradients
from passes.ir.schedule import Action, ActionKind
from passes.stages.split import StageGraph

__all__ = ["Emitter", "StageEmitter"]


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


# -- stage calls of a program ------------------------------------------------------------------------------------------------------


class StageEmitter(Emitter):
    """Writes the calls of a rank's stages; keeps their saved values and gradients until they are used."""

    saved: dict[tuple[int, int], fx.Node]

    def prepare(self, device: torch.device, stored: frozenset[str] | None = None) -> None:
        """Set what the rank's calls need.

        Args:
            device: where the rank runs, for the zeros that it adds to sums.
            stored: the parameters and inputs whose gradients are kept; None: all.
        """
        self.device = device
        self._stored = stored
        self.saved = {}
        self.kept: dict[tuple[int, int], fx.Node] = {}
        self.gradients: dict[int, fx.Node] = {}
        self._n_added: dict[int, int] = {}
        self._input_gradients: dict[tuple[str, int], list[fx.Node]] = {}
        self.value_gradients: dict[tuple[str, int, int], fx.Node] = {}  # value, microbatch, consuming stage (-1: the loss or the caller)
        self._new_values: dict[tuple[int, str], list[fx.Node]] = {}
        self._gathered: dict[int, list[fx.Node]] = {}

    # -- forward -------------------------------------------------------------------------------------------------------------------

    def value(self, name: str, microbatch: int) -> fx.Node:
        """Return a value between stages: computed by this rank or received."""
        if (name, microbatch) in self.values:
            return self.values[name, microbatch]
        source = self.lowered.rank_of(self.lowered.producer(name), microbatch)
        return self.arrive(Message("activation", name, microbatch, -1, source, self.rank))

    def forward(self, action: Action, *, training: bool) -> None:
        """Emit one stage forward; in training also save the values that its backward reads."""
        stage, microbatch = self.lowered.stages[action.stage], action.microbatch
        arguments: list[fx.Node] = [*self._gathered_parameters(stage, training=training)]
        arguments += [self.size(microbatch)] if stage.has_batch else []
        arguments += [self.model_input(name, microbatch) for name in stage.model_inputs]
        arguments += [self.value(name, microbatch) for name in stage.values]
        graph = self.lowered.training[stage.index].forward if training else stage.module
        written: tuple[str, ...] = ()
        if self.n_microbatches > 1:
            graph, written = returning_writes(graph, self.lowered.graph_of(self.rank).updates)
        prefix = f"stage{stage.index}"
        call = self.call_module(
            f"{prefix}_forward", lambda: StageCall(graph, stage.bound), tuple(arguments), f"{prefix}_forward_mb{microbatch}"
        )
        for index, name in enumerate(stage.outputs):
            self.values[name, microbatch] = self.item(call, index, f"{name}_mb{microbatch}")
        if training:
            self.saved[stage.index, microbatch] = self.item(call, len(stage.outputs), f"{prefix}_saved_mb{microbatch}")
        for index, name in enumerate(written, len(stage.outputs) + training):
            value = self.item(call, index, f"{name}_new_mb{microbatch}")
            self._new_values.setdefault((stage.index, name), []).append(value)
        if written and len(self._new_values[stage.index, written[0]]) == self._n_forwards(stage.index):
            self._write_buffers(stage.index, written)

    def _gathered_parameters(self, stage: StageGraph, *, training: bool) -> list[fx.Node]:
        """Return the parameters that a stage's forward takes gathered: gathered before its first microbatch."""
        gathers = self.lowered.training[stage.index].gathers if training else stage.gathers
        if gathers is None:
            return []
        if stage.index not in self._gathered:
            name = f"stage{stage.index}_gather_parameters"
            call = self.call_module(name, lambda: StageCall(gathers, stage.bound), (), name)
            results = gathers.graph.output_node().args[0]
            items = enumerate(results)  # type: ignore[arg-type]
            self._gathered[stage.index] = [self.item(call, index, f"stage{stage.index}_{result}") for index, result in items]
        return self._gathered[stage.index]

    def _n_forwards(self, stage: int) -> int:
        """Return the number of microbatches that the rank runs at a stage."""
        return sum(self.lowered.rank_of(stage, number) == self.rank for number in range(self.n_microbatches))

    def _write_buffers(self, stage: int, names: Sequence[str]) -> None:
        """Write to a stage's buffers the values that one forward of the whole batch would give them."""
        graph = self.lowered.graph_of(self.rank)
        values = []
        for name in names:
            parts, combine = self._new_values[stage, name], graph.updates[name]
            if combine == "mean":
                weights = self.call(microbatch_weights, (self.sizes(), "mean"), f"{name}_weights")
                values.append(self.call(weighted_total, (parts, weights), f"{name}_new"))
            else:
                values.append(self.call(total, (parts,), f"{name}_new") if combine == "sum" else parts[-1])
        target = f"stage{stage}_write_buffers"
        module = writing_module({name: self._model_nodes[name] for name in names})
        self.call_module(target, lambda: StageCall(module, names), tuple(values), target)

    # -- backward ------------------------------------------------------------------------------------------------------------------

    def backward(self, action: Action) -> None:
        """Emit one stage backward, whole or either half."""
        stage = self.lowered.training[action.stage]
        if stage.backward is None:
            return
        prefix, microbatch = f"stage{action.stage}", action.microbatch
        key = (action.stage, microbatch)
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            if stage.parameters_with_gradient:
                assert stage.backward_weight is not None
                graph = stage.backward_weight
                call = self.call_module(
                    f"{prefix}_backward_weight",
                    lambda: StageCall(graph, stage.weight_bound, takes_tuple=True),
                    (self.kept[key],),
                    f"{prefix}_backward_weight_mb{microbatch}",
                )
                self._accumulate(action, self.item(call, 0, f"{prefix}_parameter_gradients_mb{microbatch}"))
            return
        half = action.kind is ActionKind.BACKWARD_INPUT
        graph = stage.backward_input if half and stage.backward_input is not None else stage.backward
        given = [self._gradient(name, microbatch) for name in stage.outputs_with_gradient]
        name = f"{prefix}_backward_input" if half else f"{prefix}_backward"
        call = self.call_module(
            name, lambda: StageCall(graph, stage.backward_bound, takes_tuple=True), (self.saved[key], *given), f"{name}_mb{microbatch}"
        )
        self._name_argument_gradients(stage, action, call)
        rest = len(stage.arguments_with_gradient)
        if half:
            self.kept[key] = self.item(call, rest, f"{prefix}_kept_mb{microbatch}")
        elif stage.parameters_with_gradient:
            self._accumulate(action, self.item(call, rest, f"{prefix}_parameter_gradients_mb{microbatch}"))

    def _name_argument_gradients(self, stage: DifferentiatedStage, action: Action, call: fx.Node) -> None:
        """Name the gradients of the stage's arguments."""
        for index, name in enumerate(stage.arguments_with_gradient):
            node = self.item(call, index, f"{name}_gradient_of_stage{action.stage}_mb{action.microbatch}")
            if name in self.lowered.stages[action.stage].model_inputs:
                self._input_gradients.setdefault((name, action.microbatch), []).append(node)
            else:
                self.value_gradients[name, action.microbatch, action.stage] = node

    def _gradient(self, name: str, microbatch: int) -> fx.Node:
        """Return the gradient of one of the rank's values: the sum over its readers."""
        parts = []
        for consumer in gradient_sources(self.lowered, name):
            source = self.lowered.rank_of(consumer, microbatch)
            if source == self.rank:
                parts.append(self.value_gradients[name, microbatch, consumer])
            else:
                parts.append(self.arrive(Message("gradient", name, microbatch, consumer, source, self.rank)))
        return self._sum(parts, f"{name}_gradient_mb{microbatch}")

    def _sum(self, parts: Sequence[fx.Node], name: str) -> fx.Node:
        result = parts[0]
        for part in parts[1:]:
            result = self.call(operator.add, (result, part), name)
        return result

    # -- gradients of parameters and inputs ----------------------------------------------------------------------------------------

    def _accumulate(self, action: Action, gradients: fx.Node) -> None:
        """Add a microbatch's gradients to the stage's sum, in place; the first addition takes new memory for ``stage.received``."""
        stage = action.stage
        count = self._n_added.get(stage, 0)
        self._n_added[stage] = count + 1
        if count:
            name, pair = f"accumulate_gradients_stage{stage}_mb{action.microbatch}", (self.gradients[stage], gradients)
            new = self.lowered.training[stage].received if count == 1 else ()
            gradients = self.call(add_gradients, (*pair, new), name) if new else self.call(add_gradients_in_place, pair, name)
        self.gradients[stage] = gradients

    def scatter_gradients(self, action: Action) -> None:
        """Scatter the sum of a stage's gradients if the action was the last that adds to it."""
        stage = action.stage
        scatters = None if action.kind is ActionKind.FORWARD else self.lowered.training[stage].scatters
        if scatters is None or self._n_added.get(stage) != self._n_forwards(stage):
            return
        name = f"stage{stage}_scatter_gradients"
        call = self.call_module(name, lambda: StageCall(scatters, (), takes_tuple=True), (self.gradients[stage],), name)
        self.gradients[stage] = self.item(call, 0, f"stage{stage}_scattered_gradients")

    def store_gradients(self) -> None:
        """Sum the gradients of parameters that several ranks hold, and add everything to ``.grad``."""
        shared = {name: ranks for name, ranks in self.lowered.shared_parameters.items() if self._is_stored(name)}
        for stage in self.lowered.training:
            index = self.lowered.training.index(stage)
            if index not in self.gradients:
                continue
            names = [name if self._is_stored(name) and name not in shared else None for name in stage.parameters_with_gradient]
            if any(names):
                target = f"stage{index}_store_gradients"
                self.call_module(target, functools.partial(StoreGradients, names), (self.gradients[index],), target)
        reduced = self.lowered.graph_of(self.rank).part.reduced
        for group, over in sorted({(ranks, reduced.get(name, ())) for name, ranks in shared.items()}):
            if self.rank not in group:
                continue
            together = [name for name in shared if (shared[name], reduced.get(name, ())) == (group, over)]
            kind = "replicated" if group in self.lowered.stage_ranks else "tied"
            label = "_".join(["ranks", *map(str, group), *over])
            owns = {name: self._own_gradient(name) for name in together}  # all at once: then each is let go of when it is summed
            for number, bucket in enumerate(gradient_buckets([self.bytes_over_batch(name, None) for name in together])):
                gradients = {together[index]: owns[together[index]] for index in sorted(bucket)}
                self._store_shared(gradients, group, kind, f"{label}_{number}" if number else label)

    def _is_stored(self, name: str) -> bool:
        return self._stored is None or name in self._stored

    def _store_shared(self, gradients: Mapping[str, fx.Node], group: tuple[int, ...], kind: str, label: str) -> None:
        names = tuple(gradients)
        pending = self.call(all_reduce, (list(gradients.values()),), f"all_reduce_{kind}_{label}", group=group)
        pending.meta["reduces"] = names
        pending.meta["bytes"] = sum(self.bytes_over_batch(name, None) for name in names)
        sums = self.call(wait, (pending,), f"{kind}_gradients_{label}")
        target = f"store_{kind}_gradients_{label}"
        self.call_module(target, lambda: StoreGradients(names), (sums,), target).meta["is_summed"] = True

    def _own_gradient(self, name: str) -> fx.Node:
        """Return the sum of the gradients that this rank's stages give a parameter; zeros if they give none."""
        parts = []
        for index, gradients in self.gradients.items():
            stage = self.lowered.training[index]
            if name in stage.parameters_with_gradient:
                parts.append(self.item(gradients, stage.parameters_with_gradient.index(name), f"{name}_gradient_stage{index}"))
        return self._sum(parts, f"{name}_gradient") if parts else self._no_gradient(name, None)

    def input_gradients(self) -> tuple[fx.Node | None, ...]:
        """Return each differentiated model input's gradient over the batch, summed over all ranks, on every rank."""
        assert self.lowered.differentiation is not None
        results: list[fx.Node | None] = []
        for leaf in self.lowered.graph.inputs:
            name = leaf.placeholder
            if name is None or name not in self.lowered.differentiation.inputs:
                continue
            if not (self._is_stored(name) and any(name in stage.arguments_with_gradient for stage in self.lowered.training)):
                results.append(None)
                continue
            own = self._own_input_gradient(name, leaf.batch_dim)
            pending = self.call(all_reduce, ([own],), f"all_reduce_{name}_gradient", group=tuple(range(self.lowered.n_ranks)))
            pending.meta["reduces"] = (name,)
            pending.meta["bytes"] = self.bytes_over_batch(name, leaf.batch_dim)
            summed = self.call(wait, (pending,), f"{name}_gradient_parts")
            results.append(self.item(summed, 0, f"{name}_gradient"))
        return tuple(results)

    def _own_input_gradient(self, name: str, batch_dim: int | None) -> fx.Node:
        found = {
            microbatch: self._sum(self._input_gradients[name, microbatch], f"{name}_gradient_mb{microbatch}")
            for microbatch in range(self.n_microbatches)
            if (name, microbatch) in self._input_gradients
        }
        if not found and batch_dim is None:
            return self._no_gradient(name, None)
        if batch_dim is None:
            return self.call(total, (list(found.values()),), f"{name}_gradient_here")
        parts = [found[number] if number in found else self._no_gradient(name, number) for number in range(self.n_microbatches)]
        return self.call(concatenate, (parts, batch_dim), f"{name}_gradient_here")

    def _no_gradient(self, name: str, microbatch: int | None) -> fx.Node:
        """Return zeros for the rows of another rank's microbatch, or (None) for a whole value without a gradient here."""
        fake, label = self.fake(name), f"{name}_no_gradient" if microbatch is None else f"{name}_no_gradient_mb{microbatch}"
        return self.call(torch.zeros, (self.shape(fake, microbatch),), label, dtype=fake.dtype, device=self.device)
