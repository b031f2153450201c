"""Run the original beside the partitioned model, forward and backward, and compare everything that comes out.

original       x -> outputs -> dot product with fixed weights -> gradients
partitioned    x -> outputs -> the same                       -> gradients      pm(...), then .backward()
               x ------------> the same --------------------> gradients         train_step
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from partitioner.lowering.lowering import Lowering
from partitioner.reports.check.by_definition import differences_by_definition, draws_anything
from partitioner.reports.check.compare import Comparison, compare, largest_magnitude
from partitioner.reports.check.mesh_walk import walk_mesh
from partitioner.reports.check.node_walk import NodeWalk, walk_nodes
from partitioner.reports.check.original import Gradients, ModelCall, fresh_call, run_original
from partitioner.reports.check.report import CheckReport, Difference, Part
from partitioner.runtime.arguments import BoundInputs, bind_inputs
from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from passes.graph.provenance import place_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.ir.torch_private import pytree
from passes.stages.split import stage_of_nodes

__all__ = ["Partitioned", "Subject", "check"]

SEED = 2024
"""Of the random numbers that both models draw."""


class Partitioned(Protocol):
    """What is checked of a partitioned model."""

    @property
    def plan(self) -> Plan: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def full_gradients(self) -> dict[str, Tensor | None]: ...

    def lowering_for(self, batch: int, *, in_parts: bool = True) -> tuple[int, Lowering]: ...


@dataclass(frozen=True)
class Subject:
    """A partitioned model and what it was made from.

    Attributes:
        original: the model; it stays as it is.
        graph: its graph.
        runtime: where the partitioned model runs.
        state: its tensors.
        with_microbatches: the same model, sharing its tensors, with so many microbatches a step (None: as planned).
    """

    original: nn.Module
    graph: ModelGraph
    runtime: Runtime
    state: State
    with_microbatches: Callable[[int | None], Partitioned]


def check(subject: Subject, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CheckReport:
    """Compare, leaving gradients, buffers and random numbers as they were.

    Args:
        args: inputs of one call, whole batch. Gradients of those that require them are compared, too.
        kwargs: its keyword inputs.

    Raises:
        ConfigError: the inputs do not fit, or the original cannot be copied.
    """
    inputs = bind_inputs(subject.graph, args, kwargs, any_batch=subject.graph.batch is None)
    partitioned = subject.with_microbatches(None)
    count, _ = partitioned.lowering_for(inputs.batch)
    notes = differences_by_definition(subject.graph, count)
    if notes:
        partitioned, count = subject.with_microbatches(1), 1
    elsewhere = not subject.runtime.backward_anywhere
    if elsewhere and draws_anything(subject.graph):
        reason = "each process draws its own random numbers: nothing can be compared; check in one process, or with training=False"
        return CheckReport(_title(partitioned.plan, inputs.batch, count), (), None, None, (*notes, reason))
    on_meta = any(parameter.is_meta for parameter in subject.original.parameters())
    if elsewhere:
        notes += ("values of nodes are compared where all ranks are in one process",)
    elif on_meta:
        notes += ("values of nodes are not compared: the model was traced on the meta device",)
    with _undisturbed(subject):
        run = _Check(subject, partitioned, args, kwargs, inputs.batch)
        run.run()
        walk = None if elsewhere or on_meta else _walk(run, inputs, count)
    values = () if walk is None else (Part("values of nodes", walk.comparisons),)
    first = None if walk is None else walk.first
    return CheckReport(_title(partitioned.plan, inputs.batch, count), (*run.parts, *values), first, run.first_gradient(), notes)


def _title(plan: Plan, batch: int, count: int) -> str:
    cut = f"{count} microbatches" if count > 1 else "1 microbatch"
    return f"the original beside {plan.schedule} on {plan.n_ranks} ranks, a batch of {batch} in {cut}"


def _walk(run: _Check, inputs: BoundInputs, count: int) -> NodeWalk:
    """Node by node: the graph of the whole batch beside the stages."""
    _, whole = run.subject.with_microbatches(1).lowering_for(inputs.batch, in_parts=False)
    _, lowering = run.partitioned.lowering_for(inputs.batch, in_parts=False)
    tensors = {
        **{name: run.tensors[original] for name, original in (*run.graph.parameters.items(), *run.graph.buffers.items())},
        **run.graph.constants,
    }
    if lowering.cut.is_cut:
        return walk_mesh(lowering.cut, lowering.stages, tensors, inputs.tensors, inputs.batch, SEED)
    differentiation = lowering.everything(inputs.requiring_gradient)
    lowered = lowering.training(differentiation) if differentiation.outputs else lowering.stages
    return walk_nodes(whole.graph, lowered, tensors, inputs.tensors, microbatch_sizes(inputs.batch, count), SEED)


def _full_tensors(subject: Subject) -> dict[str, Tensor]:
    """Every parameter and buffer of the graph, by original name, from the rank that speaks for it."""
    state = subject.state
    names = dict.fromkeys((*subject.graph.parameters.values(), *subject.graph.buffers.values()))
    found = subject.runtime.collect({key: tensor.detach() for name in names for key, tensor in state.owned(name)})
    return {name: tensor for name in names if (tensor := state.whole(name, found)) is not None}


@contextlib.contextmanager
def _undisturbed(subject: Subject) -> Iterator[None]:
    """Let parameters be frozen as in the original; at the end put back that, gradients, buffers and random number generators."""
    named = list(subject.state.named_parameters())
    parameters = [parameter for _, parameter in named]
    gradients = [parameter.grad for parameter in parameters]
    requiring = [parameter.requires_grad for parameter in parameters]
    for name, parameter in named:
        parameter.requires_grad_(subject.original.get_parameter(name).requires_grad)
    buffers = [buffer for _, buffer in subject.state.named_buffers()]
    values = [buffer.clone() for buffer in buffers]
    devices = sorted({device.index or 0 for device in subject.runtime.devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), subject.state.gradients.without_hooks():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)
            for parameter, gradient, required in zip(parameters, gradients, requiring, strict=True):
                parameter.grad = gradient
                parameter.requires_grad_(required)


def _roughest(graph: ModelGraph) -> torch.dtype | None:
    """The least precise dtype that a model computes in. Cut, it adds in another order, and a value is as exact as the worst behind it."""
    dtypes = {value.dtype for node in graph.computing_nodes() if isinstance(value := node.meta.get("val"), Tensor)}
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps, default=None)


class _Check:
    """One check: what is compared, in order."""

    def __init__(self, subject: Subject, partitioned: Partitioned, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: int) -> None:
        self.subject = subject
        self.graph = subject.graph
        self.partitioned = partitioned
        self.args, self.kwargs = args, kwargs
        self.rows = rows
        self.tensors = _full_tensors(subject)
        self.buffers = [(buffer, buffer.clone()) for _, buffer in subject.state.named_buffers()]
        self.reference = run_original(subject.original, self.graph, self.tensors, args, kwargs, rows, SEED)
        self.parts: list[Part] = []
        is_cut = partitioned.plan.grid.cutting.size > 1
        self.roughest = _roughest(self.graph) if is_cut or self.graph.autocast is not None else None

    def run(self) -> None:
        """Compare results, buffers and gradients of a call and of a training step."""
        call = self._restart()
        result = self.partitioned(*call.args, **call.kwargs)
        self.parts.append(Part("outputs", tuple(self._outputs(pytree.tree_leaves(result)))))
        self.parts.append(Part("buffers", tuple(self._buffers())))
        objective, gradients, own = self.reference.objective, self.reference.gradients, self.reference.own_gradients
        if objective is None or gradients is None:
            return
        if self.subject.runtime.backward_anywhere:
            objective(result, objective.target).backward()
            self._gradients("backward()", gradients, call)
        call = self._restart()
        loss_fn, target = (objective, objective.target) if own is None else (None, None)
        loss = self.partitioned.train_step(*call.args, target=target, loss_fn=loss_fn, **call.kwargs)
        expected = gradients if own is None else own
        scale, computed_in = (objective.scale, objective.computed_in) if own is None else (0.0, None)
        self.parts.append(Part("loss", (compare("loss", expected.loss, loss.detach(), scale=scale, computed_in=computed_in),)))
        self._gradients("train_step", expected, call)

    def _restart(self) -> ModelCall:
        """No gradients, the buffers and random numbers of the start, and tensors of its own for one more call."""
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for _, parameter in self.subject.state.named_parameters():
            parameter.grad = None
        call = fresh_call(self.graph, self.args, self.kwargs)
        torch.manual_seed(SEED)
        return call

    def _outputs(self, leaves: Sequence[Any]) -> Iterator[Comparison]:
        for output, reference, found in zip(self.graph.outputs, self.reference.outputs, leaves, strict=True):
            if isinstance(reference, Tensor):
                yield compare(f"output {output.name}".strip(), reference, found, computed_in=self.roughest)

    def _buffers(self) -> Iterator[Comparison]:
        found = _full_tensors(self.subject)
        for name in self.graph.buffers.values():
            if name in self.reference.buffers:
                yield compare(f"buffer {name}", self.reference.buffers[name], found[name], computed_in=self.roughest)

    def _gradients(self, how: str, expected: Gradients, call: ModelCall) -> None:
        """Those of parameters in the order of the backward, and those of inputs."""
        found = self.partitioned.full_gradients()
        known = [gradient for gradient in expected.parameters.values() if gradient is not None]
        scale = 1e-3 * max((largest_magnitude(gradient) for gradient in known), default=0.0)
        names = sorted(expected.parameters, key=lambda name: -self._last_read(name))
        of_parameters = (
            compare(f"gradient of {name}", expected.parameters[name], found[name], scale=scale, computed_in=self.roughest) for name in names
        )
        of_inputs = (
            compare(f"gradient of input {name}", gradient, call.requiring[name].grad, computed_in=self.roughest)
            for name, gradient in expected.inputs.items()
        )
        self.parts.append(Part(f"gradients, {how}", (*of_parameters, *of_inputs)))

    # -- where it differs ----------------------------------------------------------------------------------------------------------

    def _readers(self, name: str) -> list[fx.Node]:
        """The nodes that read a parameter or an input, in graph order."""
        named = {**self.graph.parameters, **{leaf.placeholder: f"input {leaf.name}" for leaf in self.graph.inputs if leaf.placeholder}}
        nodes = [node for node in self.graph.graph.nodes if named.get(node.name) == name]
        return [user for node in nodes for user in node.users if user.op != "output"]

    def _last_read(self, name: str) -> int:
        """Position of the last node that reads it: the backward meets that one first."""
        position = {node: index for index, node in enumerate(self.graph.graph.nodes)}
        return max((position[node] for node in self._readers(name)), default=-1)

    def first_gradient(self) -> Difference | None:
        """The node that reads the first parameter whose gradient differs."""
        for part in self.parts:
            for comparison in part.differing if part.name.startswith("gradients") else ():
                readers = self._readers(comparison.what.removeprefix("gradient of "))
                if readers:
                    stages = stage_of_nodes(self.graph, self.partitioned.plan.first_nodes)
                    stage = stages.get(readers[-1].name, 0)
                    rank = self.partitioned.plan.stage_ranks[stage][0]
                    return Difference(readers[-1].name, place_of(readers[-1]), stage, rank, comparison)
        return None
