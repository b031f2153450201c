"""Plan one mesh, for a model, a cluster and a request.

    units, costs -> candidates: policy, microbatches, schedule -> for each that may be best: cuts, simulated step -> the fastest that fits

It is the search of ``mode="auto"`` (``best_first``) with the mesh given.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence

from cost_models.cost_model import CostModel, Roofline
from cost_models.graph_cost import GraphCost
from cost_models.hardware.clusters import Cluster
from partitioner.options.batch_statistics import microbatch_effects, why_uncut
from partitioner.options.constraints import TENSOR
from partitioner.planner.constraints.device_map import placement_notes
from partitioner.planner.constraints.named_units import NamedUnits
from partitioner.planner.costs.memory.named_regions import patterns_without_effect
from partitioner.planner.pipeline.candidate import StagedModel, describe_stages
from partitioner.planner.pipeline.candidates import Candidate, may_cut_batch, microbatch_choices, schedules
from partitioner.planner.pipeline.problem import PipelineProblems
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.best_first import Option, PlanSearch
from partitioner.planner.search.deadline import Deadline
from partitioner.planner.search.describe import bound_by, compared, contender, recomputed_regions, searched_words
from partitioner.planner.search.infeasible import nothing_fits, nothing_of_trial, too_many_stages, why_infeasible
from partitioner.planner.search.mesh_problem import MeshProblem, Solution
from partitioner.planner.search.space import candidates_of
from partitioner.planner.sharding.mesh_cut import MeshCut
from partitioner.planner.sharding.shared_models import SharedModels
from passes.graph.provenance import source_name
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Plan, Prediction

__all__ = ["PlanRequest", "Sharding", "describe", "make_plan", "plan_shardings"]


def make_plan(
    graph: ModelGraph,
    cluster: Cluster,
    request: PlanRequest,
    cost_model: CostModel | None = None,
    models: SharedModels | None = None,
    deadline: Deadline | None = None,
) -> Plan:
    """Decide stages, ranks, schedule and microbatches for a model whose axes are not sharded.

    Args:
        cluster: the hardware to plan for, at least as many devices as the request names.
        request: the user's choices; those that are None are decided here.
        cost_model: prices work and messages; None: an analytic roofline.
        models: what plans of one graph share.
        deadline: of the search; None: it begins now.

    Raises:
        ConfigError: the request does not fit the model, the cluster or itself.
        InfeasiblePlanError: no plan fits the memory; says what is missing and how many devices would do.
    """
    request.check(graph)
    prices = cost_model or Roofline()
    part = (models or SharedModels()).whole(graph, prices)
    mesh = Mesh((("pipeline", len(request.devices)),))
    problem = MeshProblem(mesh, part, cluster.first(len(request.devices)), request, prices)
    return plan_shardings([Sharding(problem, None)], deadline=deadline)[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Sharding:
    """A mesh with one choice of the axes that it shards.

    Attributes:
        cut: the sharded model; None if no axes are sharded.
        axes: the axes named for it, in words; empty if the planner chose them.
        is_of_mode: whether it is what the requested mode means; others are priced, but not taken.
    """

    problem: MeshProblem
    cut: MeshCut | None
    axes: str = ""
    is_of_mode: bool = True


def plan_shardings(
    shardings: Sequence[Sharding],
    contenders: Sequence[Sharding] = (),
    may_take: Callable[[float], bool] = lambda _seconds: True,
    n_left_out: int = 0,
    bound_left_out: float = math.inf,
    deadline: Deadline | None = None,
) -> tuple[Plan, MeshCut | None]:
    """Return the best plan of a mesh over several shardings, with its sharded model; raises as ``make_plan`` does.

    Args:
        shardings: the planner's own; of equal plans, that of the first is taken.
        contenders: with other axes. All are priced: the reported gap holds for them, too.
        may_take: whether a contender of the mode may be taken if its step takes so many seconds.
        n_left_out: how many other choices of axes were not priced.
        bound_left_out: lower bound of their step seconds.
        deadline: of the search; None: it begins now.
    """
    every = [*shardings, *contenders]
    deadline = deadline or Deadline.after(shardings[0].problem.request.time_limit)
    search = taken = _search(every, deadline)
    if search.best is None:
        refusals = (sharding.problem.refusal for sharding in shardings)
        raise next((refusal for refusal in refusals if refusal is not None), None) or _nothing_fits(shardings[0].problem)
    fastest, solution = search.best
    of_mode = [sharding for sharding in every if sharding.is_of_mode]
    if all(sharding.problem is not fastest.problem for sharding in of_mode):
        taken = _search(of_mode, deadline, is_optional=True)
    if taken.best is not None and taken.best[0].axes and not may_take(taken.best[1].step_time):
        taken = _search([sharding for sharding in shardings if sharding.is_of_mode] or shardings, deadline, is_optional=True)
    taken = taken if taken.best is not None else search
    assert taken.best is not None

    def group(option: Option) -> Hashable:
        extra_axes, attention = (False, "") if option.cut is None else (option.cut.extra_axes, option.cut.attention)
        return bool(option.axes), extra_axes, attention, option.candidate.schedule

    plan = describe(taken, group)
    bound = min(search.bound, solution.step_time, bound_left_out)
    gap = max(0.0, 1 - bound / plan.step_time) if plan.step_time else 0.0
    axes_gap = max(0.0, 1 - solution.step_time / plan.step_time) if plan.step_time else 0.0
    faster = f"{_with_axes(fastest)}: {100 * axes_gap:.2g} % less" if axes_gap else ""
    searched = searched_words(len(search.solutions), 1, 1, gap, n_choices=len(every), n_left_out=n_left_out, faster=faster)
    return plan.predicted(searched=searched, gap=gap, axes_gap=axes_gap if contenders else None), taken.best[0].cut


def _with_axes(option: Option) -> str:
    """Describe a candidate with the axes of its tensor dimension, where another has other axes."""
    cut = option.cut
    if option.axes or cut is None or TENSOR not in cut.assigned:
        return option.words
    return f"{option.words}, {', '.join(dict.fromkeys(cut.names[axis].partition('[')[0] for axis in cut.assigned[TENSOR]))} over {TENSOR}"


def _search(shardings: Sequence[Sharding], deadline: Deadline, *, is_optional: bool = False) -> PlanSearch:
    """Search all plans of some shardings of a mesh; ``is_optional``: it may end without one, as another search has one."""
    search = PlanSearch(deadline=deadline, is_optional=is_optional)
    for sharding in shardings:
        problem = sharding.problem
        problem.request.check(problem.part.graph)
        if not problem.part.points.units:
            raise ConfigError("the model computes nothing: there is nothing to divide", remedy="pass a model that computes something")
        counts = _counts(problem)
        _check_constraints(problem, counts[0])
        search.add_mesh(problem, sharding.cut, candidates_of(problem, counts), sharding.axes)
    search.run()
    search.prove()
    return search


def _counts(problem: MeshProblem) -> list[int]:
    """Return the microbatch counts to choose from on a mesh that the user named."""
    if problem.request.mode == "model" or problem.n_places == 1:
        return [problem.request.n_microbatches or 1]
    return microbatch_choices(problem.part.graph, problem.request, problem.n_places)


def _check_constraints(problem: MeshProblem, count: int) -> None:
    """Raise ConfigError if every schedule has too many stages for the model, or constraints do not fit one that has not."""
    problems = problem.problems(problem.policies[0])
    candidates = [Candidate(*names, count, problem.request.replicas) for names in schedules(problem.request)]
    refusals = [too_many_stages(problems, candidate) for candidate in candidates]
    if refusals[0] is not None and None not in refusals:
        raise refusals[0]  # before schedules of so many stages are built
    for candidate, refusal in zip(candidates, refusals, strict=True):
        if refusal is None:
            problems.restrictions(candidate)


def _nothing_fits(problem: MeshProblem) -> PartitionError:
    """Return the error of a mesh without a plan, for the default schedule and the most microbatches."""
    if problem.request.is_trial:
        return nothing_of_trial()
    if problem.mesh.cutting.size > 1:  # several devices have one pipeline position
        return nothing_fits([problem], [])
    name, stages_per_rank = schedules(problem.request)[0]
    candidate = Candidate(name, stages_per_rank, _counts(problem)[-1], problem.request.replicas)
    return why_infeasible([problem.problems(policy) for policy in problem.policies], candidate)


def describe(search: PlanSearch, group: Callable[[Option], Hashable], place: int = 0) -> Plan:
    """Return the best plan of a group of solutions; its report compares it with the best solution of each other group.

    Args:
        group: the key of the group of an option.
        place: of the group among all, the fastest at 0.
    """
    others = search.fastest(group)
    option, solution = others.pop(place)
    alternatives = others or sorted((pair for pair in search.solutions if pair[0] is not option), key=lambda pair: pair[1].step_time)
    chosen = search.with_regions(option, solution)
    if chosen is None:
        plan, gap = _plan_of(option.problem, solution), search.gap
    else:
        solution = chosen.solution
        plan = dataclasses.replace(_plan_of(option.problem, solution), regions=chosen.regions)
        gap = max(0.0, 1 - search.bound / plan.step_time)
    words = option.words_with(recomputed_regions(plan) or option.policy)
    nearest = [contender(other.words, found) for other, found in alternatives[:1]]
    contenders = [contender(words, solution), *(contender(other.words, found) for other, found in others)]
    return plan.predicted(
        gap=gap,
        runner_up="".join(compared(each.words, each.step_time, plan.step_time, each.spent_on) for each in nearest),
        contenders=tuple(contenders[:_MOST_CONTENDERS]),
    )


def _plan_of(problem: MeshProblem, chosen: Solution) -> Plan:
    """Return a solution as a plan."""
    graph, request, mesh = problem.part.graph, problem.request, problem.mesh
    candidate, problems = chosen.staged.candidate, chosen.staged.problems
    return Plan(
        mesh=mesh.dimensions,
        devices=problem.devices,
        stages=describe_stages(problems, chosen.staged),
        schedule=candidate.schedule,
        n_microbatches=candidate.n_microbatches,
        recompute=problems.prices.recompute,
        batch_size=problem.batch_size,
        prediction=Prediction(
            step_time=chosen.step_time,
            memory=tuple(chosen.staged.memory[place] for place in problem.place_of_rank),
            call_memory=tuple(chosen.staged.memory_of_sweeps[place] for place in problem.place_of_rank),
            bound_by=bound_by(problems, chosen.staged, chosen.sums),
            notes=tuple(_notes(graph, problem.part.cost, request, chosen.staged)),
        ),
        batchnorm=request.batchnorm,
        widths=mesh.widths,
        recomputed=_recomputed(graph, problems, chosen.staged),
        regions=problem.part.source.regions(problems.prices.recompute, request.patterns),
        reduce_dtype=request.reduce_dtype,
    )


def _recomputed(graph: ModelGraph, problems: PipelineProblems, staged: StagedModel) -> tuple[str, ...]:
    """Return the nodes that the backward recomputes where the policy is ``"selective"``, of each stage those of its kind."""
    if not any(problems.prices.recomputed):
        return ()
    position = {node.name: index for index, node in enumerate(graph.graph.nodes)}
    starts = [position[problems.points.starts[run.start]] for run in staged.runs if len(run)]
    kinds = [kind for kind, run in zip(problems.kinds(staged.candidate), staged.runs, strict=True) if len(run)]
    found = list[tuple[int, str]]()
    for kind, names in enumerate(problems.prices.recomputed):
        for name in names:
            source = source_name(name, position)
            if source is not None and kinds[max(0, bisect_right(starts, position[source]) - 1)] == kind:
                found.append((position[source], name))
    return tuple(name for _, name in sorted(found))


_MOST_CONTENDERS = 6
"""Limit of the reported solutions, with the chosen one."""


def _notes(graph: ModelGraph, cost: GraphCost, request: PlanRequest, chosen: StagedModel) -> Iterator[str]:
    """Yield the notes of a plan: on the traced graph, why the batch is not cut, unpriced ops."""
    yield from graph.notes
    for pattern in patterns_without_effect(request.patterns, graph) if graph.training else ():
        yield f'recompute={{"{pattern}": ...}} has no effect: nothing there needs a gradient'
    if (asked := request.n_microbatches or 1) > graph.batch_size:
        yield f"n_microbatches={asked}: a pipeline has {graph.batch_size} rows of the planned batch, which runs in that many microbatches"
    yield from microbatch_effects(graph.mixing, chosen.candidate.n_microbatches)
    if graph.mixed and request.n_microbatches is None and request.mode != "model":
        yield f"The batch is not cut into microbatches, because rows of the batch are mixed in {', '.join(graph.mixed)}."
    if graph.batch is None and request.n_microbatches is None and request.mode != "model":
        yield "The batch is not cut into microbatches, because the model was traced for one batch size alone."
    if graph.mixing and request.n_microbatches is None and request.mode != "model" and not may_cut_batch(graph, request):
        yield why_uncut(graph.mixing)
    if cost.unknown:
        yield f"Priced by their bytes alone, because their FLOPs are not known: {', '.join(cost.unknown)}."
    if request.constraints.device_map is not None:
        problems = chosen.problems
        names = NamedUnits(problems.graph, problems.points, request.modules)
        placed = [chosen.schedule.stage_ranks[stage] for stage, run in enumerate(chosen.runs) for _unit in run]
        yield from placement_notes(request.constraints.device_map, names, request.devices, placed)
