"""Write the stage calls of a program: forwards, backwards, and the sums and stores of gradients of parameters and inputs.

stage1_forward_mb0 = self.stage1_forward(size_mb0, h_mb0)           one call
relu_mb0 = stage1_forward_mb0[0]                                    a value that leaves the stage
stage1_saved_mb0 = stage1_forward_mb0[1]                            what its backward reads
...
stage1_backward_mb0 = self.stage1_backward(stage1_saved_mb0, relu_gradient_mb0)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from passes.autograd.partition_joint import DifferentiatedStage
from passes.emit.communication_plan import Message, gradient_sources
from passes.emit.gradient_buckets import gradient_buckets
from passes.emit.program_builder import Emitter
from passes.graph.buffer_writes import returning_writes, writing_module
from passes.ir.comm.functional import FOR_ALL
from passes.ir.comm.microbatch import add_gradients, add_gradients_in_place, concatenate, microbatch_weights, total, weighted_total
from passes.ir.comm.primitives import all_reduce, wait
from passes.ir.program import StageCall, StoreGradients
from passes.ir.schedule import Action, ActionKind


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
        arguments: list[fx.Node] = [*self._gathered[stage.index]]
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

    def gather_parameters(self, actions: Iterable[Action | None], *, training: bool) -> None:
        """Emit the gathers of parameters that all microbatches read, of all stages of the rank, in the order of their first forwards.

        They come before what the rank computes: those of a later stage run beside the forwards of an earlier one.
        """
        for action in actions:
            if action is None or action.kind is not ActionKind.FORWARD or action.stage in self._gathered:
                continue
            self.section, stage = action, self.lowered.stages[action.stage]
            gathers = self.lowered.training[stage.index].gathers if training else stage.gathers
            self._gathered[stage.index] = []
            if gathers is not None:
                name = f"stage{stage.index}_gather_parameters"
                call = self.call_module(name, functools.partial(StageCall, gathers, stage.bound), (), name)
                results = enumerate(gathers.graph.output_node().args[0])  # type: ignore[arg-type]
                self._gathered[stage.index] = [self.item(call, index, f"stage{stage.index}_{result}") for index, result in results]

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
        if kind == "tied":  # earlier stages take part after the gradients that this one sends: waited for before, they would never come
            pending.meta[FOR_ALL] = True
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
