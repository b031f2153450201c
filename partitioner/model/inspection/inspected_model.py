"""Plan, programs, predictions and reports, as methods of a partitioned model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from torch import fx

from cost_models.formulas.step import StepFormula
from cost_models.hardware.clusters import Cluster
from cost_models.simulator.result import Simulation
from cost_models.text_files import write_text
from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.generation.decoder import Decoder
from partitioner.model.inspection.simulate import Step, machine_of, simulate
from partitioner.model.inspection.simulate_inference import INFERENCE_EXAMPLES, INFERENCE_VALUES, InferenceTable, simulate_inference
from partitioner.model.module.model_state import ModelState
from partitioner.model.served_trace import ServedTrace
from partitioner.options.arguments import EXAMPLES, VALUES
from partitioner.reports.communication.comments import comment_programs
from partitioner.reports.cost_formula import cost_formula
from partitioner.reports.dump_passes import dump_passes
from partitioner.reports.explain.explanation import explanation
from partitioner.reports.page.build import page_html
from partitioner.reports.sources import Explained, InspectedPrograms
from partitioner.reports.tables.devices import DeviceTable, device_table
from partitioner.runtime.record import Recording, record
from partitioner.specialize.make_trace import modes_of
from partitioner.specialize.request import Request
from partitioner.specialize.sharded_model import ShardedModel, schedule_of_step
from partitioner.specialize.trace import Trace
from partitioner.specialize.traces import Traces
from passes.emit.programs import LossForm
from passes.graph.lazy_graph_module import gc_paused
from passes.ir.arguments.checked import checked_arguments
from passes.ir.errors import ConfigError
from passes.ir.plan import Plan
from passes.ir.program import Program
from passes.verify.programs import verify


class InspectedModel(ModelState):
    """A model whose plan and programs can be read, checked, simulated and drawn.

    Args:
        trace: the model as it was partitioned.
        left: what calls leave in attributes of modules; None: nothing yet.
    """

    def __init__(self, trace: Trace, left: LeftAttributes | None = None) -> None:
        super().__init__(trace)
        self._left = left or LeftAttributes(trace.original)
        self._traces = Traces(trace, lambda made: ServedTrace.of(made, self._left))
        self._decoders: list[Decoder] = []  # none before the first generate()

    @property
    def traced(self) -> Trace:
        """The trace in the modes that its modules have now, with its plan, tensors and programs: for integrations."""
        return self._served.trace

    @property
    def plan(self) -> Plan:
        """The plan: where everything runs, and when."""
        return self.traced.plan

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

    @checked_arguments()
    @gc_paused()
    def explain(self) -> str:
        """Return the plan as text: stages, layouts, communication and why, schedule, predicted time and what bounds it, and runner-ups.

        After ``simulate()`` on the hardware of the plan, the simulated step is shown, and a simulated peak above the memory limit.
        """
        _, simulation = self.traced.last_reports.get(("simulated", self._served.last_step), ((), None))
        return explanation(self.explained(), simulation)

    @checked_arguments(VALUES, EXAMPLES)
    @gc_paused()
    def save_report(self, path: str | Path, cluster: Cluster | str | None = None) -> None:
        """Write all reports as one HTML file, which needs no network; the step is simulated on ``cluster``."""
        page = page_html(self.explained(), self.device_table(), self.simulate(cluster), self.cost_formula)
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
        """Record when ranks compute and communicate, by the names of ``simulate().timeline``."""
        return record(self.traced.runtime)

    @checked_arguments(VALUES, EXAMPLES)
    def simulate(self, cluster: Cluster | str | None = None, *, step: Step = "train_step") -> Simulation:
        """Simulate one step of the programs: time, bubble, memory, communication and a timeline; see ``cost_models.simulator``.

        It runs on ``cluster``; None: the hardware that the model was planned for. ``"forward_backward"`` is ``pm(...)`` and ``backward()``.
        """
        simulation = simulate(self.traced, self.inspected(), cluster, step)
        if step == "train_step" and machine_of(self.traced, cluster) == self.traced.assumed.cluster:
            self.traced.last_reports["simulated", self._served.last_step] = (), simulation
        return simulation

    @checked_arguments(INFERENCE_VALUES, INFERENCE_EXAMPLES)
    def simulate_inference(
        self,
        batches: Sequence[int] = (1, 8, 64),
        prompt: int | None = None,
        new_tokens: int | None = None,
        cluster: Cluster | str | None = None,
    ) -> InferenceTable:
        """Simulate inference: latency and throughput of batches of several sizes, as a table.

        Of a causal language model of transformers the programs of ``generate`` are simulated: the prompt in chunks, then one token after
        the other. Of any other model the forward is.

        Args:
            batches: rows of each batch, over all devices.
            prompt, new_tokens: of each row, given and generated; None: 128, for a model that generates.
            cluster: the hardware; None: that which the model was planned for.

        Raises:
            ConfigError: the model is in training mode, ranks cannot share rows evenly, or there are more tokens than positions.
        """
        if any(part.training for part in self._parts):
            raise ConfigError("inference is simulated of a model in evaluation mode", remedy="pm.eval()")
        return simulate_inference(self.traced, self._decoders, batches, prompt, new_tokens, cluster)

    def explained(self) -> Explained:
        """Return the model, its plan and its programs as reports read them."""
        return _explained(self.traced, self._served.last_step)

    @gc_paused()
    def device_table(self) -> DeviceTable:
        """Return the table that ``print`` shows: a line for each rank, of many ranks for each class of equal ones."""
        sources = self.explained()
        return sources.once("devices", lambda: device_table(sources))

    def __repr__(self) -> str:
        return self.device_table().text()

    def _repr_html_(self) -> str:
        return self.device_table().html()

    def sharded_for(self, batch: int, *, in_parts: bool = True) -> tuple[int, ShardedModel]:
        """Return the number of microbatches of a batch of this size, and the model as it is sharded for it; see ``Programs.request``."""
        programs = self.traced.programs
        request = programs.request(batch, in_parts=in_parts)
        return request.n_microbatches, programs.sharded(request)

    @property
    def _served(self) -> ServedTrace:
        """The trace in the modes that its modules have now, for a call as in the example; made when it is first used."""
        return self._traces.in_modes(modes_of(self))


def _explained(trace: Trace, last_step: Request | None) -> Explained:
    """Return a model and its plan as reports read them, with the programs of the last training step."""

    def make() -> Explained:
        trains = trace.graph.training and bool(trained)
        schedule = schedule_of_step(trace.plan, trace.plan.n_microbatches, (last_step and last_step.loss) or LossForm())
        parts = (trace.name, trace.plan, trace.graph, trace.cuts.plan_cut, trace.state.blocks)
        limits, planned_for = trace.assumed.limits, trace.assumed.planned_for(trace.plan)
        return Explained(*parts, lambda: InspectedPrograms.of(trace, last_step), schedule if trains else None, limits, planned_for)

    trained = trace.state.gradients.trained
    return trace.reported(("explained", last_step, trained), (trace.cuts, trace.state), make)
