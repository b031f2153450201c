"""The result of ``partition``: a module that computes what the original computes, on all its devices."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from cost_models.formulas.step import StepFormula
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from cost_models.text_files import write_text
from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.generation.decoder import Decoder
from partitioner.model.generation.generate import generate
from partitioner.model.generation.simulate_inference import INFERENCE_EXAMPLES, INFERENCE_VALUES, InferenceTable, simulate_inference
from partitioner.model.inspected_programs import InspectedPrograms, explained, table_of_devices
from partitioner.model.module.call_checks import CallChecks
from partitioner.model.module.copies import Pickled, copied_trace, copy_tensors, fill, pickled, restored_trace, tensors_of
from partitioner.model.module.functional import call_with
from partitioner.model.module.questions import ANSWERS, refuse_call_in_ddp
from partitioner.model.module.save_pretrained import save_pretrained
from partitioner.model.module.signature import with_signature
from partitioner.model.module.structure import ModuleInPlan, RegisteredTensors, build_structure
from partitioner.model.replan import Replanned, replan
from partitioner.model.served_trace import ServedTrace
from partitioner.model.simulate import Step, simulate
from partitioner.model.steps.autograd import backward_of_inputs, outside_inference_mode, tracked_forward, tracks_gradients
from partitioner.model.steps.gradient_accumulation import Accumulation
from partitioner.model.steps.loss_in_step import LossInStep
from partitioner.model.steps.train_step import StepArguments, prepare_step
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.options.constraints import Constraints
from partitioner.options.precision import converted_inputs
from partitioner.planner.price_of_pins import Pinned, pinned
from partitioner.reports.check.check import Subject, check
from partitioner.reports.check.report import CheckReport
from partitioner.reports.communication.comments import comment_programs
from partitioner.reports.cost_formula import cost_formula
from partitioner.reports.dump_passes import dump_passes
from partitioner.reports.explain.explanation import explanation
from partitioner.reports.page.build import page_html
from partitioner.reports.sources import Explained
from partitioner.reports.tables.devices import DeviceTable
from partitioner.runtime.arguments import BoundInputs, bind_inputs, check_shapes
from partitioner.runtime.compiled.numbered_models import number_of
from partitioner.runtime.record import Recording, record
from partitioner.runtime.state.checkpoint.dtensors import DTensorState
from partitioner.runtime.state.clip_grad_norm import ModelNorm, scale_gradients
from partitioner.runtime.state.gather import GatheredState, separated
from partitioner.runtime.state.hooks import refuse_hooks
from partitioner.runtime.state.meta_init import InitFunction, initialize, seed_text
from partitioner.runtime.state.optimizers.state import full_optimizer_state_dict, load_optimizer_state_dict, sharded_optimizer_state_dict
from partitioner.runtime.state.optimizers.state_hooks import OptimizerStates, attach_hooks
from partitioner.runtime.state.optimizers.update_check import check_optimizers
from partitioner.specialize.make_trace import modes_of
from partitioner.specialize.sharded_model import ShardedModel
from partitioner.specialize.trace import Trace
from partitioner.specialize.traces import Match, Traces
from passes.emit.programs import LossReduction
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.checked_arguments import at_least, checked_arguments, more_than
from passes.ir.errors import ConfigError
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.verify.programs import verify

__all__ = ["PartitionedModel"]


class PartitionedModel(ModuleInPlan):
    """A model whose layers run on several devices; returned by ``partition``.

    Call and train it like the original, or with ``train_step``. ``graphs`` are the programs of ranks; ``plan`` says where everything runs.
    """

    def __new__(cls, trace: Trace, left: LeftAttributes | None = None) -> Self:
        """Return an instance of a class of its own: ``inspect.signature`` of its ``forward`` is that of the model."""
        return cast(Self, super().__new__(with_signature(cls, trace.original)))

    def __init__(self, trace: Trace, left: LeftAttributes | None = None) -> None:
        super().__init__()
        check_optimizers()
        self._first, self._left = trace, left or LeftAttributes(trace.original)
        self._traces = Traces(trace, lambda made: ServedTrace.of(made, self._left))
        self._is_alone = len(trace.runtime.local_ranks) == trace.runtime.n_ranks
        self._accumulation = Accumulation(trace.state.named_parameters())
        self.loss_in_step = LossInStep(self._accumulation)
        """Runs steps inside of calls, for integrations."""
        self._norm = ModelNorm(trace.original, trace.state, trace.runtime)
        self._gathered = GatheredState(trace.state, trace.runtime)
        self._dtensors = DTensorState(trace.state, trace.runtime, self._gathered, trace.plan.grid)
        self._optimizer_states = OptimizerStates(trace.state, trace.runtime)
        self._decoders: list[Decoder] = []  # none before the first generate()
        self._prices: tuple[Pinned, ...] | None = None
        self.calls = self._traces.first.calls
        """Of the modes that it was partitioned in: compiled code expects results like these."""
        self._number = number_of(self)
        self._anchor = torch.empty(0, requires_grad=any(parameter.requires_grad for _, parameter in trace.state.named_parameters()))
        source = (trace.original, trace.state, self._gathered, trace.tracing.structure, self._left)
        build_structure(self, *source, trace.tracing.modes)
        self._parts = tuple(self.modules())
        self._tensor_places = RegisteredTensors.of(self)
        self._checks = CallChecks(self, self._tensor_places, trace.state, trace.runtime)
        self._initial = frozenset({*vars(self), "_initial"})

    # -- running -------------------------------------------------------------------------------------------------------------------

    @outside_inference_mode
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original returns: same structure, same values, on every rank.

        With ``inputs="local"`` results hold this rank's rows, and a number that the model returns (its loss) is that of the whole batch.
        A loss of this rank's rows has, as in DistributedDataParallel, the gradients of the mean over ranks; the whole batch's has its own.
        """
        if torch.compiler.is_compiling():
            from partitioner.runtime.compiled.opaque_call import opaque_call  # noqa: PLC0415  it imports Dynamo, which only a compiler needs

            self._tensor_places.refuse_replaced()
            return self.calls.result_of_leaves(opaque_call(self._number, self.training, self._anchor, args, kwargs))
        if replaced := self._tensor_places.replaced():
            with self._tensor_places.registered(), self.loss_in_step.off():
                return call_with(self._served.trace, self._run_forward, replaced, args, kwargs)
        return self._run_forward(*args, **kwargs)

    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        match, inputs = self._match(args, kwargs, tracked=torch.is_grad_enabled())
        calls, programs = match.served.calls, match.served.trace.programs
        request = programs.request(inputs.batch)
        sharded = programs.sharded(request)
        differentiation = sharded.everything(inputs.requiring_gradient)
        if not (differentiation.outputs and tracks_gradients(calls, inputs)):
            return calls.result(sharded, calls.run(sharded, programs.get(request), inputs)[self._here], inputs)
        self._checks.before_backward(in_no_sync=self._accumulation.holds)
        given = (calls, self._first.runtime, programs, request, differentiation, inputs, self._accumulation)
        return calls.result(sharded, self.loss_in_step.results(match, inputs, lambda: tracked_forward(*given)), inputs)

    def train_step(
        self,
        *args: Any,
        target: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
        loss_reduction: LossReduction = "mean",
        **kwargs: Any,
    ) -> Tensor:
        """Run one forward and backward of the whole batch by the plan's schedule; gradients are added to ``.grad``.

        On the first step with a loss function, and whenever shapes change, it is proved from a trace of ``loss_fn`` that the losses of
        microbatches and of ranks add up to the loss of the batch. A mean that leaves targets out (``ignore_index``), or weighs them (by
        class, a mask), is combined by their weights.

        Args:
            args: the model's inputs: the whole batch, or this rank's rows of it with ``inputs="local"``. A rank whose stages read no
                input may pass none; a rank that computes no loss may pass no target.
            target: second argument of ``loss_fn``: tensors, in any structure, with the batch first, or where the results have it.
            loss_fn: ``loss_fn(output, target)``, a tensor of one number. None: the model returns its loss (``.loss``, or a scalar).
            loss_reduction: the reduction of ``loss_fn`` over the rows of the batch. ``"mean"`` or ``"sum"``: it is computed of each
                microbatch, on each rank that cuts the batch, and combined. ``"batch"``: a function of all rows at once (contrastive
                losses, RMSE). Then all forwards come first, every stage holds the activations of all microbatches, and
                ranks that cut the batch gather the model's outputs; with ``inputs="local"`` such a loss takes no target.
            kwargs: the model's keyword inputs.

        Returns:
            The loss of the batch, on every rank.

        Raises:
            ConfigError: inputs do not fit the trace, the loss is no tensor of one number, or contradicts ``loss_reduction``. Nothing is
                added to ``.grad`` then.
            CommunicationError: a rank could not communicate.
        """
        self._checks.before_step(self, in_no_sync=self._accumulation.holds)
        match, inputs = self._match(args, kwargs, tracked=True)
        of_parameters = "sum" if self._is_alone and not self._accumulation.holds else self._accumulation.gradients
        step = prepare_step(match, inputs, StepArguments(target, loss_fn, loss_reduction, of_parameters))
        loss, gradients = step.run()
        if gradients:
            backward_of_inputs(inputs.tensors, step.input_names, gradients)
        return loss

    def generate(self, input_ids: Tensor | Sequence[Tensor] | None = None, **kwargs: Any) -> Any:
        """Return what ``model.generate(input_ids, **kwargs)`` of transformers returns, computed by the ranks.

        Each rank caches the keys and values of its own heads, layers and rows. Prompts of any length and batches of any size are served,
        up to the number of positions of the model. Programs are lowered for lengths that are powers of two, when first needed. Of several
        requests a pipeline computes one on each of its ranks at the same time; a list of what each returns is returned.

        Args:
            input_ids: (batch, tokens), the same on every rank; of several requests a list, and ``attention_mask`` then is one, too.
            kwargs: those of ``model.generate``: ``max_new_tokens``, ``attention_mask`` (0 for padding, in front), ``do_sample``, ...

        Raises:
            AttributeError: the model has no ``generate``.
            ConfigError: an argument is not supported, or there are more tokens than positions.
        """
        return generate(self._first, self._decoders, any(part.training for part in self._parts), input_ids, kwargs)

    @property
    def _served(self) -> ServedTrace:
        """The trace in the modes that its modules have now, for a call as in the example; made when it is first used."""
        return self._traces.in_modes(modes_of(self))

    @property
    def _here(self) -> int:
        return self._first.runtime.local_ranks[0]  # the rank whose results this process returns

    def _match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, tracked: bool) -> tuple[Match[ServedTrace], BoundInputs]:
        """Return the trace that serves a call, and its inputs, after bringing the parameters up to date."""
        self._checks.before_call(tracked=tracked)
        if not self._is_alone:
            refuse_call_in_ddp(self._first)
        modes = tuple([part.training for part in self._parts])
        call = self._traces.call(args, kwargs, modes, tracked=tracked)
        return self._traces.find(call) or self._traces.make(call)

    def sharded_for(self, batch: int, *, in_parts: bool = True) -> tuple[int, ShardedModel]:
        """Return the number of microbatches of a batch of this size, and the model as it is sharded for it; see ``Programs.request``."""
        programs = self.traced.programs
        request = programs.request(batch, in_parts=in_parts)
        return request.n_microbatches, programs.sharded(request)

    @property
    def is_traced(self) -> bool:
        """Whether it has been traced in the modes that its modules have now."""
        return self._traces.has_traced(modes_of(self))

    @property
    def result_device(self) -> torch.device:
        """Device of this process's results."""
        return self._first.runtime.devices[self._first.runtime.local_ranks[0]]

    # -- inspection ----------------------------------------------------------------------------------------------------------------

    @property
    def traced(self) -> Trace:
        """The trace in the modes that its modules have now, with its plan, tensors and programs: for integrations."""
        return self._served.trace

    @property
    def plan(self) -> Plan:
        """The plan: where everything runs, and when."""
        return self.traced.plan

    @property
    def data_parallel_size(self) -> int:
        """Number of parts in which processes pass the batch: ``num_replicas`` of a ``DistributedSampler``; 1 in a single process."""
        return 1 if self.has_all_ranks else self.traced.programs.rows.count

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's part of the batch: ``rank`` of a ``DistributedSampler``."""
        return 0 if self.has_all_ranks else self.traced.programs.rows.part_index(self._here)

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The program of each rank: the training step if the model trains, else the forward."""
        explained = self.explained()
        return comment_programs(explained, explained.programs)

    @checked_arguments()
    def graph(self, rank: int) -> fx.GraphModule:
        """Return the program of one rank."""
        if not 0 <= rank < self.traced.plan.n_ranks:
            raise ConfigError(f"there is no rank {rank}", remedy=f"ranks are 0 to {self.traced.plan.n_ranks - 1}")
        return self.graphs[rank]

    def programs(self) -> tuple[Program, ...]:
        """Return the programs whose modules are ``graphs``."""
        return self.inspected().programs

    @checked_arguments()
    def dump_passes(self, folder: str | Path) -> None:
        """Trace and lower the model once more, and write the graph, or the programs, after each phase into a folder.

        The folder is created if it does not exist; ``phases.txt`` in it lists the phases, with seconds and nodes.
        """
        inspected = self.inspected()
        whole, target = inspected.sharded.whole, inspected.sharded.target(inspected.request)
        fixed_size = whole.batch_size if whole.batch is None and self.traced.graph.batch is None else None
        dump_passes(Path(folder), lambda: self.traced.cuts.traced_for(fixed_size), self.traced.plan, target)

    def inspected(self) -> InspectedPrograms:
        """Return the programs that reports describe: those of the last training step, if there was one."""
        return InspectedPrograms.of(self.traced, self._served.last_step)

    @checked_arguments()
    def verify(self) -> None:
        """Prove over all ranks that communication matches and cannot deadlock: of a training step, a forward and its backward.

        Raises:
            VerificationError: names the nodes and ranks that do not match; see ``passes.verify.programs``.
        """
        programs = self.traced.programs
        request = programs.request(self.traced.plan.batch_size)
        differentiation = programs.sharded(request).everything(frozenset())
        verify(self.programs())
        verify(programs.get(request).programs)
        if differentiation.outputs:
            verify(programs.get(request.training_forward(differentiation)).programs)
            verify(programs.get(request.backward(differentiation, differentiation.outputs)).programs)

    def check(self, *args: Any, **kwargs: Any) -> CheckReport:
        """Run the original beside this model on one batch, forward and backward, and report the first value that differs.

        Pass the whole batch on every rank, also with ``inputs="local"``. Gradients, buffers and random states are restored afterwards.
        ``bool(report)`` says whether all is equal.
        """
        planned = self.traced
        args, kwargs = converted_inputs((args, kwargs), planned.dtype)
        given = bind_inputs(planned.graph, args, kwargs, any_batch=planned.graph.batch is None)
        served = self._traces.at(self._served, given.sizes)
        check_shapes(served.trace.graph, given.tensors)
        trace = served.trace
        with_microbatches = functools.partial(self._with_microbatches, trace)
        with trace.tracing.structure.restored():
            return check(Subject(trace.original, trace.graph, trace.runtime, trace.state, with_microbatches), args, kwargs)

    @checked_arguments()
    @gc_paused()
    def explain(self, *, prices: bool = False) -> str:
        """Return the plan as text: stages, layouts, communication and why, schedule, predicted time and what bounds it, and runner-ups.

        Args:
            prices: report also the cost of each choice of the user (``mode=``, ``schedule=``, an entry of ``constraints=``). Each takes
                a search of its own, on the first call: seconds for a small model.
        """
        if prices and self._prices is None:
            problem = self.traced.assumed.problem
            self._prices = () if problem is None else pinned(problem, self.plan)
        return explanation(self.explained(), (self._prices or ()) if prices else ())

    @checked_arguments(VALUES, EXAMPLES)
    @gc_paused()
    def save_report(self, path: str | Path, cluster: Cluster | str | None = None) -> None:
        """Write all reports as one HTML file, which needs no network; the step is simulated on ``cluster``.

        The costs of the user's choices are part of it if ``explain(prices=True)`` was called before.
        """
        page = page_html(self.explained(), self._prices or (), self.device_table(), self.simulate(cluster), self.cost_formula)
        write_text(path, page, "the report")

    @checked_arguments()
    def cost_formula(self) -> StepFormula:
        """Return step time, memory and bytes moved as sympy expressions in batch, microbatches, replicas, device and links.

        ``.model`` has the FLOPs and bytes of every operation of the unpartitioned model, in batch and sequence. ``.evaluate`` takes
        arrays of values. Printed, each symbol has the plan's own value beside it. See ``cost_models.formulas.step``.
        """
        return cost_formula(self.explained(), self.traced.assumed.cluster, self.traced.assumed.optimizer)

    @checked_arguments()
    def record(self) -> AbstractContextManager[Recording]:
        """Record when ranks compute and communicate, by the names of ``simulate().timeline``, and the load of experts."""
        return record(self.traced.runtime, self.plan.grid)

    @checked_arguments(VALUES, EXAMPLES)
    def simulate(self, cluster: Cluster | str | None = None, *, step: Step = "train_step") -> Simulation:
        """Simulate one step of the programs: time, bubble, memory, communication and a timeline; see ``cost_models.simulator``.

        It runs on ``cluster``; None: the hardware that the model was planned for. ``"forward_backward"`` is ``pm(...)`` and ``backward()``.
        """
        return simulate(self.traced, self.inspected(), cluster, step)

    @checked_arguments(INFERENCE_VALUES, INFERENCE_EXAMPLES)
    def simulate_inference(
        self,
        batches: Sequence[int] = (1, 8, 64),
        prompt: int | None = None,
        new_tokens: int | None = None,
        cluster: Cluster | str | None = None,
        requests: int = 1,
    ) -> InferenceTable:
        """Simulate inference: latency and throughput of batches of several sizes, as a table.

        Of a causal language model of transformers the programs of ``generate`` are simulated: the prompt in chunks, then one token after
        the other. Of any other model the forward is.

        Args:
            batches: rows of each batch, over all devices.
            prompt, new_tokens: of each row, given and generated; None: 128, for a model that generates.
            cluster: the hardware; None: that which the model was planned for.
            requests: batches in flight, as of ``generate([...])``.

        Raises:
            ConfigError: the model is in training mode, ranks cannot share rows evenly, or there are more tokens than positions.
        """
        if any(part.training for part in self._parts):
            raise ConfigError("inference is simulated of a model in evaluation mode", remedy="pm.eval()")
        return simulate_inference(self.traced, self._decoders, batches, prompt, new_tokens, cluster, requests)

    @checked_arguments(VALUES, EXAMPLES)
    def replan(
        self,
        devices: int | Sequence[str | torch.device] | Cluster | None = None,
        mode: str | Mapping[str, int | Sequence[int]] = "auto",
        *,
        cluster: Cluster | str | None = None,
        memory_limit: int | str | None = None,
        survivors: Sequence[int | None] | None = None,
        constraints: Constraints | None = None,
    ) -> Replanned:
        """Plan for other devices, memory or hardware, and list which tensors would move. Nothing is moved or run.

        Checkpoints fit all plans. In one process, ``new.load_state_dict(pm.full_state_dict())`` and
        ``new.load_optimizer_state_dict(optimizer, pm.full_optimizer_state_dict(old_optimizer))`` continue the training; in newly started
        processes, load with ``torch.distributed.checkpoint`` what it saved of ``pm.sharded_state_dict()`` and
        ``pm.sharded_optimizer_state_dict(...)``.

        Args:
            devices: as ``partition`` takes them; None: as many as now.
            mode: of the new plan; ``"auto"``: the fastest of all.
            cluster: the hardware, if it is not the one that was planned for. If that has too few devices, this machine's are assumed.
            memory_limit: per device; None: the memory of the devices.
            survivors: for each new rank, the old rank whose memory it still has, or None for an empty one; tensors that only an unnamed
                old rank held come from a checkpoint. None: ranks keep their numbers, and additional ones are empty.
            constraints: decisions that the new plan must keep to.

        Raises:
            ConfigError: an argument does not fit.
            InfeasiblePlanError: nothing fits the memory; says what would.
        """
        return replan(self.traced, devices, mode, cluster=cluster, memory_limit=memory_limit, survivors=survivors, constraints=constraints)

    def explained(self) -> Explained:
        """Return the model, its plan and its programs as reports read them."""
        return explained(self.traced, self._served.last_step)

    @gc_paused()
    def device_table(self) -> DeviceTable:
        """Return the table that ``print`` shows: a line for each rank, of many ranks for each class of equal ones."""
        return table_of_devices(self.traced, self._served.last_step)

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module, else an attribute of the model; see ``attributes.read_attribute``."""
        if name in ANSWERS:
            return ANSWERS[name](self._first)
        if name == "save_pretrained":
            return save_pretrained(self._first, self)
        return super().__getattr__(name)

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks are in this process."""
        return self._is_alone

    def _get_name(self) -> str:
        """Return the name of the model's class, by which transformers' Trainer knows how a loss aligns labels."""
        return self._first.name

    def __repr__(self) -> str:
        return self.device_table().text()

    def _repr_html_(self) -> str:
        return self.device_table().html()

    def _with_microbatches(self, trace: Trace, count: int | None) -> PartitionedModel:
        """Return a model that shares tensors and programs, without a last step; with ``count`` microbatches unless that is None.

        ``trace``: for the sizes of the inputs that it is called with.
        """
        return PartitionedModel(trace.with_microbatches(count), self._left)

    # -- parameters ----------------------------------------------------------------------------------------------------------------

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters under their original names, in the order of the original.

        With all ranks in one process on one device, each is whole and comes once. With one rank a process, each is the rank's part of it.
        Parts of one parameter on several devices of one process all have its name.
        """
        return super().named_parameters(prefix, recurse, remove_duplicate)

    @checked_arguments()
    def named_parts(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield a rank's part of each parameter, under the original name: the tensors that it computes with. Do not change them."""
        if rank not in self.traced.runtime.local_ranks:
            ranks = ", ".join(map(str, self.traced.runtime.local_ranks))
            raise ConfigError(f"rank {rank} is not in this process", remedy=f"the ranks in this process: {ranks}")
        return self.traced.state.named_parts(rank)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield this process's parameters, and an empty one if other processes alone train some: optimizers refuse an empty list."""
        return iter([*(each for _, each in self.named_parameters(recurse=recurse)), *(self._first.stand_in if recurse else ())])

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return all parameters and buffers, whole, under the original names, on every rank.

        What some rank does not hold whole is gathered: all ranks must call it. ``sharded_state_dict`` and ``dtensor_state_dict`` do not
        gather.
        """
        refuse_hooks(self, "state_dict()")
        return super().state_dict(*args, **kwargs)

    @checked_arguments()
    def sharded_state_dict(self) -> dict[str, Tensor]:
        """Return this process's shards for ``torch.distributed.checkpoint``, which saves and loads them without gathering.

        ``dcp.save(pm.sharded_state_dict())``; and, for any plan and number of processes, ``state = pm.sharded_state_dict()``,
        ``dcp.load(state)``, ``pm.load_state_dict(state)``. An unpartitioned model loads the same checkpoint into its ``state_dict()``.
        """
        return dict(self.traced.state.sharded())

    @checked_arguments()
    def dtensor_state_dict(self) -> dict[str, Tensor]:
        """Return this process's parameters and buffers as DTensors over a ``DeviceMesh``, as FSDP2 and torchtitan have them.

        Each is on the ranks that hold the tensor, with the plan's mesh dimensions, ``Shard`` where the plan shards and ``Replicate``
        where it does not; shards that ``Shard`` does not describe are resharded by ``Shard(0)``. All ranks must call it. With all ranks
        in one process, tensors are whole, on a mesh of one rank; a process group of that rank is made if there is none.
        """
        return dict(self._dtensors.tensors())

    @checked_arguments()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values into parameters and buffers, from a full state dict or this process's part of one.

        Args:
            state_dict: original name -> tensor.
            strict: refuse names that are missing or unknown.
            assign: refused: values are copied into the present tensors.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as ``nn.Module`` does.

        Raises:
            ConfigError: an entry does not fit; nothing is loaded then.
        """
        refuse_hooks(self, "load_state_dict()")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    load_safetensors = ModuleInPlan.load_safetensors

    @checked_arguments()
    def initialize(self, init_fn: InitFunction | None = None, *, seed: int | None = None) -> None:
        """Initialize a model from the meta device, module by module: no process ever holds more than one module whole.

        The values are those of one device: of the model built on the CPU, ``torch.manual_seed(seed)``, and ``model.apply(init_fn)``. Every
        rank must call it, with the same function.

        Args:
            init_fn: sets the parameters and buffers of one module. None: calls its ``reset_parameters()``.
            seed: None: continue from the present random state.

        Raises:
            ConfigError: parameters or buffers that would be left without a value, by name.
        """
        self.traced.runtime.agree("seed", seed_text(seed))
        initialize(self.traced.original, self.traced.state, self._gathered, init_fn, seed)

    @checked_arguments()
    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer of ``pm.parameters()``, under the original names. All ranks must call it.

        Returns:
            ``"state"``: parameter -> ``exp_avg``, ``step``, ...; no entry for a parameter that has had no gradient; ``"param_groups"``:
            the options, with names of parameters.

        Raises:
            ConfigError: a parameter of the optimizer is not one of this model; or a state is neither one number for its parameter nor one
                for each element, and this process holds a part of the parameter, so that the state cannot be gathered.
        """
        attach_hooks(optimizer)
        return full_optimizer_state_dict(self.traced.state, self.traced.runtime, optimizer)

    @checked_arguments()
    def sharded_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return this process's shards of an optimizer's state, for ``torch.distributed.checkpoint`` to save and load without gathering.

        An optimizer that has not stepped gets that of its first step, all zeros, for ``dcp.load`` to fill. Groups are those of all ranks.
        """
        attach_hooks(optimizer)
        return sharded_optimizer_state_dict(self.traced.state, self.traced.runtime, optimizer)

    @checked_arguments()
    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load the state of another optimizer, of any plan or of the unpartitioned model, into one of ``pm.parameters()``.

        Args:
            optimizer: of the same kind.
            state_dict: from one of the two methods above, or ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.

        Raises:
            ConfigError: names, shapes or dtypes are not those of the model; the state is that of another kind of optimizer, or lacks a
                parameter; or parameters of one group come from groups with different options. Nothing is loaded then.
        """
        attach_hooks(optimizer)
        load_optimizer_state_dict(self.traced.state, self.traced.runtime, optimizer, state_dict)

    @checked_arguments()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Return every parameter and buffer of the original ``state_dict()``, on every rank. All ranks must call it.

        Each is contiguous and has memory of its own, also where names are tied, so that ``safetensors.torch.save_file`` saves it.
        """
        return separated(self._gathered.tensors(), (*self.parameters(), *self.buffers()))

    @checked_arguments()
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Return the gradient of every parameter of the original ``named_parameters()``, on every rank; None where there is none."""
        self._accumulation.check("full_gradients()")
        return self._gathered.gradients()

    @checked_arguments()
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication: steps inside keep each rank's part in ``.grad``, the first step outside sums them.

        Some gradients are reduced in every step: of sharded parameters (``"fsdp"``, ``"zero1"``, ``"zero2"``), since no rank has room for
        the whole; of parameters that stages share (tied embeddings), over these stages; and of stages that several ranks share round-robin
        (``{"pipeline": (2, 1)}``).
        """
        return self._accumulation.no_sync()

    @checked_arguments({"max_norm": at_least(0), "norm_type": more_than(0)})
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over the model, each parameter counted once, is at most ``max_norm``; return the old norm."""
        self._accumulation.check("clip_grad_norm_()")
        norm = self._norm.of_gradients(norm_type)
        scale_gradients(self.parameters(), norm, max_norm)
        return norm

    # -- what a plan fixes ---------------------------------------------------------------------------------------------------------

    @checked_arguments()
    def train(self, mode: bool = True) -> Self:
        """Set training mode, or evaluation mode: the next call runs the other variant of the same weights, traced when it is first used.

        ``pm.encoder.eval()`` sets the modes of a part, as on the model. Every rank must call it.
        """
        return super().train(mode)

    # -- copies --------------------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedModel:
        """Return a model of the same plan with parameters, buffers and gradients of its own. Every rank must call it."""
        copied = PartitionedModel(copied_trace(self._first))
        self._traces.copy_into(copied._traces)
        copy_tensors(self._first.state, copied._first.state)
        memo[id(self)] = copied
        memo.update({id(part): other for part, other in zip(self._parts, copied._parts, strict=True)})
        memo.update({id(old): new for old, new in zip(tensors_of(self), tensors_of(copied), strict=True)})
        copied.set_own(modes_of(self), copy.deepcopy(self.own_attributes(), memo))
        return copied

    def __copy__(self) -> PartitionedModel:
        """Return a model that shares parameters, buffers and programs."""
        copied = self._with_microbatches(self.traced, None)
        copied.set_own(modes_of(self), self.own_attributes())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model with the present values, its plan, and how it was traced; see ``partitioner.model.module.copies``."""
        return _restored, (pickled(self._first), modes_of(self), self.own_attributes())

    def own_attributes(self) -> dict[str, Any]:
        """Return attributes and hooks that were added since the model was partitioned."""
        added = {name: value for name, value in vars(self).items() if name not in self._initial}
        return added | {name: value for name, value in vars(self).items() if name.endswith("_hooks") and value}

    def set_own(self, modes: Sequence[bool], own: Mapping[str, Any]) -> None:
        """Set the modes of all modules, and attributes and hooks that were added."""
        for part, is_training in zip(self._parts, modes, strict=True):
            part.training = is_training
        vars(self).update(own)


def _restored(saved: Pickled, modes: Sequence[bool], own: Mapping[str, Any]) -> PartitionedModel:
    """Return the partitioned model of a pickle. With one rank a process, every rank must load its own."""
    pm = PartitionedModel(restored_trace(saved))
    fill(pm._first, saved)  # noqa: SLF001  of this module
    pm.set_own(modes, own)
    return pm
