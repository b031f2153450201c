"""From a model, a cluster and a request to a plan.

    units, prices -> microbatch counts, by estimate -> for each schedule: cuts, clock -> the fastest that fits

The microbatch count is the first by estimate that fits memory. Schedules are then compared on the clock, each with its own best cuts;
1F1B is kept unless another is faster by more than the prices can be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cost_models.cost_model import CostModel, Roofline
from cost_models.graph_cost import GraphCost
from cost_models.hardware import Cluster
from partitioner.planner.candidates import DEFAULT_SCHEDULE, Candidate, microbatch_counts, schedules
from partitioner.planner.describe import bound_by, candidate_words, contender, next_best
from partitioner.planner.infeasible import why_infeasible
from partitioner.planner.mesh_problem import MeshProblem, Solution, policies
from partitioner.planner.model_part import whole_part
from partitioner.planner.part_graph import unfolded
from partitioner.planner.pipeline_problem import PipelineProblems
from partitioner.planner.plan_request import PlanRequest
from partitioner.planner.staged_model import StagedModel, describe_stages, stage_model
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Contender, Plan
from passes.operators import draws

__all__ = ["PlanRequest", "describe_plan", "differentiates", "make_plan", "plan_stages"]

_WORTH_LEAVING_DEFAULT = 0.1
"""How much faster, relatively, another schedule must be on the clock to be chosen over the default: the clock does not price actions."""


def make_plan(graph: ModelGraph, cluster: Cluster, request: PlanRequest, cost_model: CostModel | None = None) -> Plan:
    """Decide stages, ranks, schedule and microbatches for a model whose axes are not cut.

    Args:
        graph: the model.
        cluster: the hardware to plan for, at least as many devices as the request names.
        request: what the user said; what is None is decided here.
        cost_model: prices work and messages; None: an analytic roofline.

    Raises:
        ConfigError: the request does not fit the model, the cluster or itself.
        InfeasiblePlanError: no plan fits the memory; says what is missing and how many devices would do.
    """
    request.check(graph)
    part = whole_part(unfolded(graph), differentiate=differentiates(graph, request))
    mesh = Mesh((("pipeline", len(request.devices)),))
    return plan_stages(MeshProblem(mesh, part, cluster.first(len(request.devices)), request, cost_model or Roofline()))


def plan_stages(problem: MeshProblem) -> Plan:
    """Decide what is open on one mesh; raises as ``make_plan`` does."""
    graph, request = problem.part.graph, problem.request
    request.check(graph)
    if not problem.part.points.units:
        raise ConfigError("the model computes nothing: there is nothing to divide", remedy="pass a model that computes something")
    open_policies = policies(request, differentiate=problem.differentiate)
    problems, tried = _first_fitting(problem.problems(policy) for policy in open_policies)
    solutions = [problem.price(problems, staged) for staged in tried]
    chosen = _choose(solutions)
    others = sorted((solution for solution in solutions if solution is not chosen), key=lambda solution: solution.step_time)
    contenders = [contender(candidate_words(each.staged.candidate), each) for each in (chosen, *others)]
    return describe_plan(problem, chosen, next_best(chosen, others), contenders)


def differentiates(graph: ModelGraph, request: PlanRequest) -> bool:
    """Whether a backward is planned for."""
    return graph.training or request.optimizer != "none"


def describe_plan(problem: MeshProblem, chosen: Solution, runner_up: str, contenders: Sequence[Contender]) -> Plan:
    """The plan that a solution is.

    Args:
        runner_up: the next best, in words.
        contenders: what was worked out, the chosen one first.
    """
    graph, request, mesh = problem.part.graph, problem.request, problem.mesh
    candidate, problems = chosen.staged.candidate, chosen.problems
    return Plan(
        mesh=mesh.dimensions,
        devices=problem.devices,
        stages=describe_stages(problems, chosen.staged),
        schedule=candidate.schedule,
        n_microbatches=candidate.n_microbatches,
        recompute=problems.prices.recompute,
        batch_size=problem.batch_size,
        step_time=chosen.step_time,
        memory=tuple(chosen.staged.memory[place] for place in problem.place_of_rank),
        bound_by=bound_by(problems, chosen.staged, chosen.sums),
        runner_up=runner_up,
        notes=tuple(_notes(graph, problem.part.cost, request, chosen.staged)),
        contenders=tuple(contenders[:_MOST_CONTENDERS]),
    )


_MOST_CONTENDERS = 6
"""Plans that are told of, the chosen one among them."""


def _first_fitting(choices: Iterator[PipelineProblems]) -> tuple[PipelineProblems, list[StagedModel]]:
    """The first policy under which anything fits, and what does; raises what is wrong with the last when nothing does."""
    problems = next(choices)
    while not (tried := _tried(problems)):
        following = next(choices, None)
        if following is None:
            raise why_infeasible(problems, _plainest(problems))
        problems = following
    return problems, tried


def _tried(problems: PipelineProblems) -> list[StagedModel]:
    """Every schedule that fits, with the first microbatch count for which one does."""
    for count in microbatch_counts(problems.graph, problems.request, problems.prices):
        staged = []
        for name, stages_per_rank in schedules(problems.request):
            candidate = Candidate(name, stages_per_rank, count, problems.request.replicas)
            cuts = problems.solve(candidate)
            if cuts is not None:
                found = stage_model(problems, candidate, cuts.starts, proven=cuts.proven)
                if problems.hold(found.memory):  # the sums at the end of a step are those of all stages of a rank together
                    staged.append(found)
        if staged:
            return staged
    return []


def _choose(tried: Sequence[Solution]) -> Solution:
    """The fastest; the default schedule if it is nearly as fast."""
    fastest = min(tried, key=lambda solution: solution.step_time)
    default = next((solution for solution in tried if solution.staged.candidate.schedule == DEFAULT_SCHEDULE), fastest)
    return default if default.step_time <= fastest.step_time * (1 + _WORTH_LEAVING_DEFAULT) else fastest


def _plainest(problems: PipelineProblems) -> Candidate:
    """The candidate that an error speaks of: the default schedule, with the most microbatches that were tried."""
    name, stages_per_rank = schedules(problems.request)[0]
    count = max(microbatch_counts(problems.graph, problems.request, problems.prices))
    return Candidate(name, stages_per_rank, count, problems.request.replicas)


def _notes(graph: ModelGraph, cost: GraphCost, request: PlanRequest, chosen: StagedModel) -> Iterator[str]:
    yield from graph.notes
    if chosen.candidate.n_microbatches > 1:
        yield from graph.microbatching
    mixed = [output.name or "the result" for output in graph.outputs if output.combine == "mixed"]
    if mixed and request.n_microbatches is None and request.mode != "model":
        yield f"The batch is not cut into microbatches, because rows of the batch are mixed in {', '.join(mixed)}."
    if graph.batch is None and request.n_microbatches is None and request.mode != "model":
        yield "The batch is not cut into microbatches, because the model was traced for one batch size alone."
    if cost.unknown:
        yield f"Priced by their bytes alone, because their FLOPs are not known: {', '.join(cost.unknown)}."
    if request.replicas and any(draws(node) for node in graph.computing_nodes()):
        yield "Ranks that take microbatches in turn draw the same random numbers where their processes are seeded alike: seed each unlike."
    if not chosen.proven:
        yield "The stages share nearly full devices; these cuts fit, but better ones may exist."
