"""From a model, a cluster and a request to a plan of one mesh.

    units, prices -> candidates: policy, microbatches, schedule -> for each, if it may be the fastest: cuts, clock -> the fastest that fits

It is the search of ``mode="auto"`` (``plan_search``) with the mesh given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

from cost_models.cost_model import CostModel, Roofline
from cost_models.graph_cost import GraphCost
from cost_models.hardware.clusters import Cluster
from partitioner.options.batch_statistics import microbatch_effects, why_uncut
from partitioner.planner.pipeline.candidate import StagedModel, describe_stages
from partitioner.planner.pipeline.candidates import Candidate, may_cut_batch, microbatch_choices, schedules
from partitioner.planner.request import PlanRequest
from partitioner.planner.search.best_first import Option, PlanSearch
from partitioner.planner.search.describe import bound_by, compared, contender, searched_words
from partitioner.planner.search.infeasible import nothing_fits, too_many_stages, why_infeasible
from partitioner.planner.search.mesh_problem import MeshProblem, Solution
from partitioner.planner.search.space import candidates_of
from partitioner.planner.sharding.model import MeshCut
from partitioner.planner.sharding.rank_shard import unfolded, whole_part
from passes.graph.schemas import draws
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import ModelGraph
from passes.ir.mesh import Mesh
from passes.ir.plan import Contender, Plan, Prediction

__all__ = ["PlanRequest", "Way", "describe_best", "make_plan", "plan_ways"]


def make_plan(graph: ModelGraph, cluster: Cluster, request: PlanRequest, cost_model: CostModel | None = None) -> Plan:
    """Decide stages, ranks, schedule and microbatches for a model whose axes are not cut.

    Args:
        cluster: the hardware to plan for, at least as many devices as the request names.
        request: what the user said; what is None is decided here.
        cost_model: prices work and messages; None: an analytic roofline.

    Raises:
        ConfigError: the request does not fit the model, the cluster or itself.
        InfeasiblePlanError: no plan fits the memory; says what is missing and how many devices would do.
    """
    request.check(graph)
    part = whole_part(unfolded(graph))
    mesh = Mesh((("pipeline", len(request.devices)),))
    problem = MeshProblem(mesh, part, cluster.first(len(request.devices)), request, cost_model or Roofline())
    return plan_ways([Way(problem, None)])[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """A mesh with one choice of the axes that it cuts.

    Attributes:
        cut: its axes; None where it cuts none.
        axes: those that were named for it, in words; empty where the planner chose them.
        is_of_mode: whether it is what the mode means, and may be taken.
    """

    problem: MeshProblem
    cut: MeshCut | None
    axes: str = ""
    is_of_mode: bool = True


def plan_ways(
    ways: Sequence[Way], contenders: Sequence[Way] = (), may_take: Callable[[float], bool] = lambda _seconds: True
) -> tuple[Plan, MeshCut | None]:
    """Decide what is open on one mesh that may cut axes in several ways; raises as ``make_plan`` does.

    Args:
        ways: the mesh with each of its cuts. Of equal plans, that of the first way is taken.
        contenders: other choices of axes, which are priced as plans, too: what is stated of all plans covers them.
        may_take: whether a contender may be taken whose step takes so many seconds, if it is of the mode.

    Returns:
        The plan, and the cut that it has.
    """
    search = kept = _searched([*ways, *contenders])
    if search.best is None:
        raise next((way.problem.refusal for way in ways if way.problem.refusal is not None), None) or _nothing_fits(ways[0].problem)
    fastest, solution = search.best
    of_mode = {id(way.problem) for way in (*ways, *contenders) if way.is_of_mode}
    if id(fastest.problem) not in of_mode:
        kept = _searched([way for way in (*ways, *contenders) if way.is_of_mode])
    if kept.best is not None and kept.best[0].axes and not may_take(kept.best[1].step_time):
        kept = _searched(ways)
    kept = kept if kept.best is not None else search
    assert kept.best is not None
    plan = describe_best(kept, lambda option: (bool(option.axes), option.cut is not None and option.cut.beside, option.candidate.schedule))
    gap = max(0.0, 1 - min(search.bound, solution.step_time) / plan.step_time) if plan.step_time else 0.0
    axes_gap = max(0.0, 1 - solution.step_time / plan.step_time) if plan.step_time else 0.0
    faster = f"{fastest.words}, {100 * axes_gap:.2g} % less" if axes_gap else ""
    searched = searched_words(len(search.solutions), 1, 1, gap, n_choices=len(ways) + len(contenders), faster=faster)
    return plan.predicted(searched=searched, gap=gap, axes_gap=axes_gap if contenders else None), kept.best[0].cut


def _searched(ways: Sequence[Way]) -> PlanSearch:
    """Search all plans of some ways."""
    search = PlanSearch()
    for way in ways:
        problem = way.problem
        problem.request.check(problem.part.graph)
        if not problem.part.points.units:
            raise ConfigError("the model computes nothing: there is nothing to divide", remedy="pass a model that computes something")
        counts = _counts(problem)
        _check_constraints(problem, counts[0])
        search.add_mesh(problem, way.cut, candidates_of(problem, counts), way.axes)
    search.run()
    search.prove()
    return search


def _counts(problem: MeshProblem) -> list[int]:
    """The microbatch counts that are open on a mesh that was asked for."""
    if problem.request.mode == "model" or problem.n_places == 1:
        return [problem.request.n_microbatches or 1]
    return microbatch_choices(problem.part.graph, problem.request, problem.n_places)


def _check_constraints(problem: MeshProblem, count: int) -> None:
    """Raise ConfigError when no schedule has few enough stages, or constraints do not fit one that has."""
    problems = problem.problems(problem.policies[0])
    candidates = [Candidate(*names, count, problem.request.replicas) for names in schedules(problem.request)]
    refusals = [too_many_stages(problems, candidate) for candidate in candidates]
    if refusals[0] is not None and None not in refusals:
        raise refusals[0]  # before schedules of so many stages are built
    for candidate, refusal in zip(candidates, refusals, strict=True):
        if refusal is None:
            problems.restrictions(candidate)


def _nothing_fits(problem: MeshProblem) -> PartitionError:
    """The error of a mesh, under the policy that keeps least: of the default schedule, with the most microbatches that were tried."""
    if problem.mesh.cutting.size > 1:  # places of the pipeline are not devices
        return nothing_fits([problem], [])
    problems = problem.problems(problem.policies[-1])
    name, stages_per_rank = schedules(problems.request)[0]
    count = _counts(problem)[-1]
    return why_infeasible(problems, Candidate(name, stages_per_rank, count, problems.request.replicas))


def describe_best(search: PlanSearch, group: Callable[[Option], Hashable]) -> Plan:
    """The best plan of a search, beside the best of other groups.

    Args:
        group: what others are told of, the best of each.
    """
    (option, solution), *others = search.fastest(group)
    contenders = [contender(each.words, found) for each, found in ((option, solution), *others)]
    beside = others or sorted((pair for pair in search.solutions if pair[0] is not option), key=lambda pair: pair[1].step_time)
    runner_up = compared(beside[0][0].words, beside[0][1].step_time, solution.step_time) if beside else ""
    return _described(option.problem, solution, runner_up, contenders).predicted(gap=search.gap)


def _described(problem: MeshProblem, chosen: Solution, runner_up: str, contenders: Sequence[Contender]) -> Plan:
    """The plan that a solution is.

    Args:
        runner_up: the next best, in words.
        contenders: what was worked out, the chosen one first.
    """
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
            bound_by=bound_by(problems, chosen.staged, chosen.sums),
            runner_up=runner_up,
            notes=tuple(_notes(graph, problem.part.cost, request, chosen.staged)),
            contenders=tuple(contenders[:_MOST_CONTENDERS]),
        ),
        batchnorm=request.batchnorm,
        widths=mesh.widths,
    )


_MOST_CONTENDERS = 6
"""Plans that are told of, the chosen one among them."""


def _notes(graph: ModelGraph, cost: GraphCost, request: PlanRequest, chosen: StagedModel) -> Iterator[str]:
    yield from graph.notes
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
    if request.replicas and any(draws(node) for node in graph.computing_nodes()):
        yield "Ranks of a round-robin replicated stage draw the same numbers if their seeds are equal: give each rank a different seed."
