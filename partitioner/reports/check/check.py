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

from partitioner.reports.check.by_definition import differences_by_definition, draws_anything
from partitioner.reports.check.compare import Comparison, compare, largest_magnitude
from partitioner.reports.check.mesh_walk import walk_mesh
from partitioner.reports.check.node_walk import NodeWalk, walk_nodes
from partitioner.reports.check.original import SEED, Gradients, ModelCall, fresh_call, run_original
from partitioner.reports.check.report import CheckReport, Difference, Part
from partitioner.runtime.arguments import BoundInputs, bind_inputs
from partitioner.runtime.base import Runtime
from partitioner.runtime.state.parameters import State
from partitioner.specialize.sharded_model import ShardedModel
from passes.graph.provenance import place_of
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan
from passes.ir.torch_private import pytree
from passes.stages.split import stage_of_nodes


class Partitioned(Protocol):
    """The interface that a check needs of a partitioned model."""

    @property
    def plan(self) -> Plan: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def full_gradients(self) -> dict[str, Tensor | None]: ...

    def sharded_for(self, batch: int, *, in_parts: bool = True) -> tuple[int, ShardedModel]: ...


@dataclass(frozen=True)
class Subject:
    """A partitioned model, and the model and plan that it was made from.

    Attributes:
        original: the unpartitioned model; a check does not change it.
        graph: the graph of the original.
        runtime: the runtime of the partitioned model.
        state: parameters, buffers and gradients of the partitioned model.
        with_microbatches: returns the partitioned model with this number of microbatches a step (None: as planned); tensors are shared.
    """

    original: nn.Module
    graph: ModelGraph
    runtime: Runtime
    state: State
    with_microbatches: Callable[[int | None], Partitioned]


def check(subject: Subject, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CheckReport:
    """Compare a partitioned model with its original; restore gradients, buffers and random number generators at the end.

    Args:
        args: positional inputs of one call, whole batch. Gradients of inputs that require them are compared, too.
        kwargs: keyword inputs of that call.

    Raises:
        ConfigError: the inputs do not fit, or the original cannot be copied.
    """
    inputs = bind_inputs(subject.graph, args, kwargs, any_batch=subject.graph.batch is None)
    partitioned = subject.with_microbatches(None)
    n_microbatches, _ = partitioned.sharded_for(inputs.batch)
    notes = differences_by_definition(subject.graph, n_microbatches)
    if notes:
        partitioned, n_microbatches = subject.with_microbatches(1), 1
    in_processes = len(subject.runtime.local_ranks) < subject.runtime.n_ranks
    title = _title(partitioned.plan, inputs.batch, n_microbatches)
    if in_processes and draws_anything(subject.graph):
        reason = "each process draws its own random numbers: nothing can be compared; check in one process, or with training=False"
        return CheckReport(title, (), None, None, (*notes, reason))
    on_meta = any(parameter.is_meta for parameter in subject.original.parameters())
    if in_processes:
        notes += ("values of nodes are compared where all ranks are in one process",)
    elif on_meta:
        notes += ("values of nodes are not compared: the model was traced on the meta device",)
    with _restoring_state(subject):
        run = _Check(subject, partitioned, args, kwargs, inputs.batch)
        run.run()
        walk = None if in_processes or on_meta else _walk(run, inputs, n_microbatches)
    values = () if walk is None else (Part("values of nodes", walk.comparisons),)
    first_value = None if walk is None else walk.first
    return CheckReport(title, (*run.parts, *values), first_value, run.first_gradient(), notes)


def _title(plan: Plan, batch: int, n_microbatches: int) -> str:
    microbatches = f"{n_microbatches} microbatches" if n_microbatches > 1 else "1 microbatch"
    return f"the original beside {plan.schedule} on {plan.n_ranks} ranks, a batch of {batch} in {microbatches}"


def _walk(run: _Check, inputs: BoundInputs, n_microbatches: int) -> NodeWalk:
    """Compare node by node: the model's graph on the whole batch with the graphs of the stages."""
    _, whole = run.subject.with_microbatches(1).sharded_for(inputs.batch, in_parts=False)
    _, sharded = run.partitioned.sharded_for(inputs.batch, in_parts=False)
    originals = run.graph.weights
    tensors = {**{name: run.tensors[original] for name, original in originals.items()}, **run.graph.constants}
    if sharded.cut.is_cut:
        return walk_mesh(sharded.cut, sharded.stages, tensors, inputs.tensors, inputs.batch)
    differentiation = sharded.everything(inputs.requiring_gradient)
    lowered = sharded.training(differentiation) if differentiation.outputs else sharded.stages
    return walk_nodes(whole.graph, lowered, tensors, inputs.tensors, microbatch_sizes(inputs.batch, n_microbatches))


def _full_tensors(subject: Subject) -> dict[str, Tensor]:
    """Return every parameter and buffer of the graph, whole, by original name, collected from the ranks that own them."""
    state = subject.state
    names = dict.fromkeys((*subject.graph.parameters.values(), *subject.graph.buffers.values()))
    collected = subject.runtime.collect({key: tensor.detach() for name in names for key, tensor in state.owned(name)})
    return {name: tensor for name in names if (tensor := state.whole(name, collected)) is not None}


@contextlib.contextmanager
def _restoring_state(subject: Subject) -> Iterator[None]:
    """Freeze the parameters that the original freezes; at the end restore ``requires_grad``, gradients, buffers and generators."""
    parameters = [(parameter, parameter.grad, parameter.requires_grad) for _, parameter in subject.state.named_parameters()]
    buffers = [(buffer, buffer.clone()) for _, buffer in subject.state.named_buffers()]
    for name, parameter in subject.state.named_parameters():
        parameter.requires_grad_(subject.original.get_parameter(name).requires_grad)
    devices = sorted({device.index or 0 for device in subject.runtime.devices if device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), subject.state.gradients.without_hooks():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, gradient, required in parameters:
                parameter.grad = gradient
                parameter.requires_grad_(required)


def _least_precise(graph: ModelGraph) -> torch.dtype | None:
    """Return the floating-point dtype of the graph's values with the largest epsilon: it bounds how exact any result is."""
    dtypes = {value.dtype for node in graph.computing_nodes() if isinstance(value := node.meta.get("val"), Tensor)}
    return max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps, default=None)


class _Check:
    """Collects in ``parts`` the comparisons of outputs, buffers, loss and gradients."""

    def __init__(self, subject: Subject, partitioned: Partitioned, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int) -> None:
        self.subject = subject
        self.graph = subject.graph
        self.partitioned = partitioned
        self.args, self.kwargs = args, kwargs
        self.tensors = _full_tensors(subject)
        self.buffers = [(buffer, buffer.clone()) for _, buffer in subject.state.named_buffers()]
        self.reference = run_original(subject.original, self.graph, self.tensors, args, kwargs, batch)
        self.parts: list[Part] = []
        is_cut = partitioned.plan.grid.cutting.size > 1
        # Sharded sums are added in another order: they agree only up to the rounding of the least precise value.
        self.computed_in = _least_precise(self.graph) if is_cut or self.graph.autocast is not None else None

    def run(self) -> None:
        """Compare results, buffers and gradients of a call and of a training step."""
        call = self._restart()
        result = self.partitioned(*call.args, **call.kwargs)
        self.parts.append(Part("outputs", tuple(self._compare_outputs(pytree.tree_leaves(result)))))
        self.parts.append(Part("buffers", tuple(self._compare_buffers())))
        objective, gradients, own_gradients = self.reference.objective, self.reference.gradients, self.reference.own_gradients
        if objective is None or gradients is None:
            return
        objective(result, objective.target).backward()
        self._compare_gradients("backward()", gradients, call)
        call = self._restart()
        loss_fn, target = (objective, objective.target) if own_gradients is None else (None, None)
        loss = self.partitioned.train_step(*call.args, target=target, loss_fn=loss_fn, **call.kwargs)
        expected = own_gradients or gradients
        scale, computed_in = (objective.scale, objective.computed_in) if own_gradients is None else (0.0, None)
        self.parts.append(Part("loss", (compare("loss", expected.loss, loss.detach(), scale=scale, computed_in=computed_in),)))
        self._compare_gradients("train_step", expected, call)

    def _restart(self) -> ModelCall:
        """Reset gradients, buffers and the seed for another call of the partitioned model; return fresh copies of its arguments."""
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for _, parameter in self.subject.state.named_parameters():
            parameter.grad = None
        call = fresh_call(self.graph, self.args, self.kwargs)
        torch.manual_seed(SEED)
        return call

    def _compare_outputs(self, leaves: Sequence[Any]) -> Iterator[Comparison]:
        for output, reference, actual in zip(self.graph.leaves, self.reference.outputs, leaves, strict=True):
            if isinstance(reference, Tensor):
                yield compare(f"output {output.name}".strip(), reference, actual, computed_in=self.computed_in)

    def _compare_buffers(self) -> Iterator[Comparison]:
        tensors = _full_tensors(self.subject)
        for name in self.graph.buffers.values():
            if name in self.reference.buffers:
                yield compare(f"buffer {name}", self.reference.buffers[name], tensors[name], computed_in=self.computed_in)

    def _compare_gradients(self, how: str, expected: Gradients, call: ModelCall) -> None:
        """Add a part that compares the gradients of parameters, in the order of the backward, and those of inputs.

        Args:
            how: what computed the gradients, ``"backward()"`` or ``"train_step"``.
            call: the call whose inputs hold the gradients.
        """
        actual = self.partitioned.full_gradients()
        magnitudes = [largest_magnitude(gradient) for gradient in expected.parameters.values() if gradient is not None]
        scale = 1e-3 * max(magnitudes, default=0.0)
        names = sorted(expected.parameters, key=lambda name: -self._last_read(name))
        of_parameters = (
            compare(f"gradient of {name}", expected.parameters[name], actual[name], scale=scale, computed_in=self.computed_in)
            for name in names
        )
        of_inputs = (
            compare(f"gradient of input {name}", gradient, call.requiring[name].grad, computed_in=self.computed_in)
            for name, gradient in expected.inputs.items()
        )
        self.parts.append(Part(f"gradients, {how}", (*of_parameters, *of_inputs)))

    def _readers(self, name: str) -> list[fx.Node]:
        """Return the nodes that read a parameter (``"head.weight"``) or an input (``"input x"``), in graph order."""
        inputs = {leaf.placeholder: f"input {leaf.name}" for leaf in self.graph.inputs if leaf.placeholder}
        names = {**self.graph.parameters, **inputs}
        placeholders = [node for node in self.graph.graph.nodes if names.get(node.name) == name]
        return [user for node in placeholders for user in node.users if user.op != "output"]

    def _last_read(self, name: str) -> int:
        """Return the graph position of the last node that reads a parameter: the backward computes that node's gradients first."""
        position = {node: index for index, node in enumerate(self.graph.graph.nodes)}
        return max((position[node] for node in self._readers(name)), default=-1)

    def first_gradient(self) -> Difference | None:
        """Return where the first differing gradient comes from: the last node that reads its parameter or input."""
        plan = self.partitioned.plan
        differing = [comparison for part in self.parts if part.name.startswith("gradients") for comparison in part.differing]
        for comparison in differing:
            readers = self._readers(comparison.what.removeprefix("gradient of "))
            if readers:
                node = readers[-1]
                stage = stage_of_nodes(self.graph, plan.first_nodes).get(node.name, 0)
                return Difference(node.name, place_of(node), stage, plan.stage_ranks[stage][0], comparison)
        return None
