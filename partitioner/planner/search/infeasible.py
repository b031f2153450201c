"""Errors of searches without a plan: too few cut points, contradicting constraints, or too little memory, with remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cost_models.hardware.clusters import Cluster, Device, Link
from cost_models.hardware.units import enough_bytes, format_bytes
from partitioner.options.batch_statistics import first_names
from partitioner.options.constraints import Constraints
from partitioner.planner.pipeline.candidates import Candidate, may_cut_batch, schedules
from partitioner.planner.pipeline.problem import PipelineProblems
from partitioner.planner.search.mesh_problem import MeshProblem
from partitioner.planner.solvers.min_max_dp import fits, shortfall, solve
from passes.ir.errors import ConfigError, InfeasiblePlanError, PartitionError
from passes.ir.mesh import STAGES, Mesh, mesh_words

_MOST_PLACES = 4096

_MOST_TRIED = 16
"""How many meshes, those that lack least first, are tried with more devices."""


def why_infeasible(by_policy: Sequence[PipelineProblems], candidate: Candidate) -> PartitionError:
    """Return the error for a candidate without a solution.

    Args:
        by_policy: the problems of the mesh, one for each policy of recomputation that was tried.
    """
    problems = by_policy[0]
    refusal = too_many_stages(problems, candidate)
    if refusal is not None:
        return refusal
    n_ranks = len(problems.cluster.devices)
    if solve(replace(problems.problem(candidate), limit=(np.inf,) * n_ranks)) is None:
        return ConfigError(
            f"no way to cut the model into {candidate.n_stages(n_ranks)} stages keeps to the constraints",
            remedy="every stage needs at least one operation that may be in it: leave out device_map, split_spec or pin entries",
        )
    missing = min(shortfall(each.problem(candidate)) for each in by_policy)
    suffice = [(places, "") for each in by_policy if (places := _fewest_places(each, candidate)) is not None]
    limit = min(problems.limits)
    count = _count(candidate.n_microbatches, "microbatch", "es")
    return InfeasiblePlanError(
        f"the model does not fit {_count(n_ranks, 'device')} of {format_bytes(limit)}: {_lack_words(missing)} with {count}",
        remedy=_remedy(problems, n_ranks, min(suffice, default=None), missing),
    )


def nothing_of_trial() -> InfeasiblePlanError:
    """Return the error of a search that only asks whether there is a plan: its caller catches it."""
    return InfeasiblePlanError("no plan fits the memory", remedy="allow more memory")


def too_many_stages(problems: PipelineProblems, candidate: Candidate) -> ConfigError | None:
    """Return the error for a candidate with more stages than the model has units, or None."""
    n_units, n_ranks = len(problems.points.units), len(problems.cluster.devices)
    n_stages = candidate.n_stages(n_ranks)
    if n_units >= n_stages:
        return None
    each = candidate.stages_per_rank
    if candidate.replicas:
        return ConfigError(
            f"{n_stages} stages were asked for, the model can be cut into {n_units}", remedy="give more ranks to fewer stages"
        )
    fewer = "put fewer stages on each device" if each > 1 else ""
    most = f"pass devices={n_units // each}{' or fewer' if n_units > 2 * each else ''}" if n_units >= each else ""
    return ConfigError(
        f"{_count(n_ranks, 'device')} with {_count(each, 'stage')} each: {n_stages} stages, the model can be cut into {n_units}",
        remedy=", or ".join(filter(None, (most, fewer))),
    )


@dataclass(frozen=True, eq=False)
class _Lack:
    """The memory that a mesh lacks, for its candidate of least memory under one policy of recomputation.

    Attributes:
        missing: bytes that the fullest device lacks; not positive if every stage fits alone, but not all stages of a device together.
        problems: of the mesh, under that policy.
    """

    missing: float
    mesh: Mesh
    problems: PipelineProblems
    candidate: Candidate


def nothing_fits(meshes: Sequence[MeshProblem], refusals: Sequence[PartitionError]) -> PartitionError:
    """Return the error if no plan of any mesh fits: what the closest mesh lacks, and the fewest devices that suffice.

    Of many meshes, more devices are tried for those that lack least.

    Args:
        meshes: all that were tried; if there are none, there are refusals.
        refusals: errors of other meshes; the first is returned if no mesh lacks only memory.
    """
    lacks = _lacks(meshes)
    if not lacks:
        if refusals:
            return refusals[0]
        by_policy = [meshes[0].problems(policy) for policy in meshes[0].policies]
        return why_infeasible(by_policy, _least_memory_candidate(by_policy[0], meshes[0]))
    closest = min(lacks, key=lambda lack: lack.missing)
    mesh, candidate = closest.mesh, closest.candidate
    words, count = mesh_words(mesh, candidate.replicas), _count(candidate.n_microbatches, "microbatch", "es")
    devices, limit = _count(mesh.size, "device"), format_bytes(min(closest.problems.limits))
    lacks.sort(key=lambda lack: lack.missing)
    meshes_tried = list(dict.fromkeys(lack.mesh for lack in lacks))[:_MOST_TRIED]
    nearest = [lack for lack in lacks if lack.mesh in meshes_tried]
    places = [(lack.mesh, _fewest_places(lack.problems, lack.candidate)) for lack in nearest]
    suffice = [(_n_ranks(each, n_places), _larger_mesh_words(each, n_places)) for each, n_places in places if n_places is not None]
    return InfeasiblePlanError(
        f"no plan fits {devices} of {limit}: in the closest, {words} with {count}, {_lack_words(closest.missing)}",
        remedy=_remedy(closest.problems, mesh.size, min(suffice, default=None), closest.missing),
    )


def _lacks(meshes: Sequence[MeshProblem]) -> list[_Lack]:
    """Return the missing memory of each mesh and policy; those with too few units, or whose constraints allow no cuts, are left out."""
    lacks = []
    for mesh, problems in ((each, each.problems(policy)) for each in meshes for policy in each.policies):
        candidate = _least_memory_candidate(problems, mesh)
        if len(problems.points.units) >= mesh.n_places:
            missing = shortfall(problems.problem(candidate))
            if missing < np.inf:
                lacks.append(_Lack(missing, mesh.mesh, problems, candidate))
    return lacks


def _lack_words(missing: float) -> str:
    return f"the fullest device lacks {format_bytes(missing)}" if missing > 0 else "its stages do not fit together"


def _n_ranks(mesh: Mesh, n_places: int) -> int:
    """Return the number of ranks of a mesh with another number of pipeline positions; further stages are as wide as the last."""
    if not mesh.widths:
        return n_places * mesh.cutting.size
    widths = (*mesh.widths, *(mesh.widths[-1] for _ in range(n_places)))[:n_places]
    return mesh.size // sum(mesh.widths) * sum(widths)


def _larger_mesh_words(mesh: Mesh, n_places: int) -> str:
    """Say which mode has these pipeline positions, where a mesh has other dimensions: ``mode="fsdp"`` alone would only get larger."""
    if mesh.widths or mesh.cutting.size == 1 or n_places == mesh.size // mesh.cutting.size:
        return ""
    sizes = {name: n_places if name in STAGES else size for name, size in mesh.dimensions}
    return f" with mode={sizes if STAGES & sizes.keys() else {'pipeline': n_places, **sizes}}"


def _least_memory_candidate(problems: PipelineProblems, mesh: MeshProblem) -> Candidate:
    """Return the candidate that needs least memory: the most microbatches, in the default schedule."""
    rows = mesh.part.graph.batch_size
    count = mesh.request.n_microbatches or (rows if may_cut_batch(mesh.part.graph, mesh.request) else 1)
    name, stages_per_rank = schedules(problems.request)[0]
    return Candidate(name, stages_per_rank, count, problems.request.replicas)


def _count(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def _remedy(problems: PipelineProblems, present: int, fewest: tuple[int, str] | None, missing: float) -> str:
    """Say how many devices would suffice, and how large they would have to be.

    Args:
        present: number of devices.
        fewest: smallest number of such devices that fit the model, and the mesh in words; None: no number does.
        missing: bytes that the fullest device lacks.
    """
    others = "a smaller batch, or an optimizer with less state"
    request, mixing = problems.request, problems.graph.mixing
    if mixing and request.mode != "model" and request.n_microbatches is None and not may_cut_batch(problems.graph, request):
        others += f"; or pass n_microbatches=, which takes the statistics of {first_names(mixing.normalizations)} "
        others += "over each microbatch"
    larger = f"{_count(present, 'device')} of {enough_bytes(min(problems.limits) + missing)}" if missing > 0 else "larger devices"
    if fewest is None:
        return f"no number of such devices fits it, as one operation alone needs more: take {larger}, {others}"
    count, mesh = fewest
    without = "" if problems.request.constraints == Constraints() else " without the constraints"
    without += ", one for each stage" if problems.request.replicas else ""
    return f"{count} such devices fit it{mesh}{without}, or {larger}; or take {others}"


def _fewest_places(problems: PipelineProblems, candidate: Candidate) -> int | None:
    """Return the smallest number of pipeline positions, not below the present one, that fits; None if none does."""
    most = min(len(problems.points.units) // candidate.stages_per_rank, _MOST_PLACES)
    low = high = len(problems.cluster.devices)
    while not _fits(problems, candidate, high):  # double
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:  # bisect
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(problems, candidate, middle) else (middle, high)
    return high


def _fits(problems: PipelineProblems, candidate: Candidate, n_places: int) -> bool:
    """Return whether the model fits ``n_places`` positions without constraints: the cluster's devices, and further ones like the last."""
    devices: list[Device] = [*problems.cluster.devices, *[problems.cluster.devices[-1]] * n_places][:n_places]
    larger = PipelineProblems(
        problems.graph,
        Cluster(devices, Link(latency=0.0, bandwidth=float("inf"))),
        replace(problems.request, devices=("",) * n_places, constraints=Constraints(), replicas=()),
        problems.points,
        problems.prices,
        problems.cost_model,
    )
    return fits(larger.problem(replace(candidate, replicas=())))
