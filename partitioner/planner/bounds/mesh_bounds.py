"""Lower bounds of the step time of a mesh, before its axes are sharded: from costs that depend on no layout.

With the batch in R parts, other axes in T parts and P stages, a rank does at least 1 / (R T P) of the model's arithmetic and traffic, and
launches all kernels of its stages: sharding makes kernels smaller, not fewer. Stages wait for each other as in the best schedule
(``schedule_bounds``). Replicas all_reduce gradients of parameters that they read whole once a step, or gather sharded parameters in every
microbatch. Collectives inside stages are bounded for all stages together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np

from cost_models.collectives.algorithms import Collective, GroupLinks
from cost_models.cost_model import CostModel
from cost_models.formulas.symbols import Numbers
from cost_models.hardware.clusters import Cluster
from partitioner.planner.bounds.schedule_bounds import least_shared_step, least_step
from partitioner.planner.costs.collectives import fraction_of_message
from partitioner.planner.costs.links import LinkTable, stages_length
from partitioner.planner.costs.unit_costs import MicrobatchTimes
from partitioner.planner.pipeline.candidates import Candidate, microbatch_choices, microbatch_size, schedules
from partitioner.planner.pipeline.problem import memory_limits
from partitioner.planner.request import PlanRequest
from partitioner.planner.sharding.model import CuttableModel
from partitioner.planner.solvers.stage_memory import Floats
from passes.analysis.axes import Axes
from passes.ir.errors import ConfigError
from passes.ir.mesh import GATHERED_ONCE, ROWS, SCATTERED_ONCE, TILES, Mesh
from passes.ir.plan import ATTENTION


class MeshBounds:
    """Computes lower bounds of meshes on one cluster.

    Args:
        cost_model: prices work. A fraction of some work must take at least that fraction of its seconds, launches aside.
        links: of the cluster, to share their cache.
    """

    def __init__(
        self, model: CuttableModel, cluster: Cluster, request: PlanRequest, cost_model: CostModel, links: LinkTable | None = None
    ) -> None:
        whole = model.whole
        self._cluster, self._whole, self._model = cluster, whole, model
        self._links = links or LinkTable(cluster)
        kinds = tuple(dict.fromkeys(cluster.devices))
        prices = whole.prices(kinds, cost_model, request.optimizer, adding=False)  # a rank may have one microbatch, and accumulate nothing
        self._prices, self._request = prices, request
        self._numbers = cache(Numbers)
        self._n_units = len(whole.points.units)
        self._starts = prices.starting().min(axis=1)
        self._fixed = prices.fixed_bytes + prices.gradients.least
        self._limit = sum(memory_limits(cluster, request))
        axes = model.axes_of(whole.source.graph)
        trained = [name for name in whole.source.graph.parameters if name in whole.cost.gradients]
        every = [(copy, _longest_axis(axes, name)) for name in trained for copy in whole.source.copies(name)]
        self._sizes = {name: float(whole.held_bytes[name]) for name, _ in every}
        self._longest = dict(every)
        self._known_messages: dict[tuple[Collective, int, int], tuple[float, float]] = {}
        self._known_replicated: dict[int, frozenset[str]] = {}

    def step_bound(
        self,
        mesh: Mesh,
        *,
        extra_axes: bool = False,
        replicas: tuple[int, ...] = (),
        limit: float = math.inf,
        attention: str = ATTENTION[0],
    ) -> float:
        """Return a lower bound of the step seconds of all plans of a mesh; inf if parameters alone exceed the memory of all devices.

        Collectives are priced as between two ranks that shard the same axes: more ranks take longer for values of the same size.
        Microbatches divide a message into several, which take no less time together.

        Args:
            extra_axes, limit, attention: as for ``CuttableModel.cut``.
            replicas: for each stage, its number of round-robin ranks; empty: one each.

        Raises:
            ConfigError: the mesh cannot shard the model.
        """
        if mesh.widths:
            return self._of_submeshes(mesh, replicas)
        places = stages_length(mesh)
        rows_name, n_rows = next(((name, size) for name, size in mesh.dimensions if name in ROWS), ("", 1))
        shares_weights = extra_axes and mesh.cutting.names == ("data",)  # replicas may hold shards of any weight, and sum nothing of it
        n_whole = n_rows if rows_name == "data" and not shares_weights else 1
        if self._fixed * n_whole > self._limit or (len(replicas) or places) > self._n_units:
            return math.inf
        if shares_weights or sum(name in ROWS for name in mesh.names) > 1:
            return self.of_any_axes(mesh)
        own_rows = -(-self._whole.batch_size // n_rows)
        *activations, backward_wait = self._activation_collectives(mesh, own_rows, extra_axes, limit, attention)
        parameters, gradients = self._weight_collectives(mesh, rows_name, n_rows, stages=len(replicas) or places)
        part = dataclasses.replace(self._whole.graph, batch_size=own_rows)
        request = dataclasses.replace(self._request, devices=self._request.devices[:places], replicas=replicas)
        steps = []
        for count in microbatch_choices(part, request, places):
            if count >= max(replicas, default=1):
                # Activations of a step are divided among its microbatches; parameters are gathered in each of them, or in the first.
                gathers = parameters[0] if count == 1 or rows_name not in GATHERED_ONCE else 0.0
                scatters = parameters[1] if count == 1 or rows_name not in SCATTERED_ONCE else 0.0
                # A rank computes while parameters are sent: for their whole time only if its processors move them.
                busy = self._links.of(mesh)[rows_name].ring.host_share if gathers or scatters else 0.0
                # Seconds of one microbatch that its ranks wait for collectives: forward, backward.
                waiting = activations[0] / count + busy * gathers, backward_wait / count + busy * scatters
                size = microbatch_size(own_rows, count)
                times, starts = self._prices.times(size), self._starts
                if rows_name in GATHERED_ONCE:
                    times, starts = times.without_casts, starts - times.casts.max(axis=1)[times.source]
                computing = self._pipeline(times, starts, count, places, mesh.cutting.size // n_rows, request, waiting)
                # The slower of two: compute with the waits that it cannot hide, and all collectives of a rank one after the other.
                steps.append(max(computing, (sum(activations) + count * (gathers + scatters)) / places))
        if gradients and places == 1:  # one stage sums them while its backward computes
            gradients *= self._links.of(mesh)[rows_name].ring.host_share
        return (min(steps, default=math.inf) + gradients) * (1 - _ROUNDING)

    def of_any_axes(self, mesh: Mesh) -> float:
        """Return the work of an average rank: a weaker lower bound, which holds whatever axes the mesh shards."""
        seconds = self._prices.times(self._whole.batch_size).least
        return float(np.maximum(seconds / mesh.cutting.size, self._starts).sum()) / stages_length(mesh) * (1 - _ROUNDING)

    @cached_property
    def of_any_mesh(self) -> float:
        """Seconds of work of an average device: the weakest lower bound, valid for every mesh."""
        seconds = self._prices.times(self._whole.batch_size).least
        return float(seconds.sum()) / len(self._cluster.devices) * (1 - _ROUNDING)

    def _of_submeshes(self, mesh: Mesh, replicas: tuple[int, ...]) -> float:
        """Return the lower bound for stages with different tensor-parallel degrees.

        It is the larger of the work of an average rank, and of the path of one microbatch through all stages at the largest degree.
        Collectives are left out: their sizes depend on which stage has which layer.
        """
        rows = mesh.n_row_parts
        own_rows, n_ranks, widest = -(-self._whole.batch_size // rows), sum(mesh.widths), max(mesh.widths)
        n_stages = len(replicas) or len(mesh.widths)
        if self._fixed * (rows if "data" in mesh.names else 1) > self._limit or n_stages > self._n_units:
            return math.inf
        part = dataclasses.replace(self._whole.graph, batch_size=own_rows)
        steps = []
        for count in microbatch_choices(part, self._request, len(mesh.widths)):
            times = self._prices.times(microbatch_size(own_rows, count))
            through = float(np.maximum(times.least / widest, self._starts).sum()) * times.fractions.through
            steps.append(max(count * float(times.least.sum()) / n_ranks, through))
        return min(steps) * (1 - _ROUNDING)

    def _pipeline(
        self,
        times: MicrobatchTimes,
        starts: Floats,
        count: int,
        places: int,
        parts: int,
        request: PlanRequest,
        exchanged: tuple[float, float],
    ) -> float:
        """Return a lower bound of the seconds of one pipeline, compute and bubble, under the best schedule.

        Args:
            times: of a microbatch.
            starts: seconds of launching the kernels of each unit.
            places: ranks of the pipeline.
            parts: ranks that share each stage.
            exchanged: seconds of the collectives of all stages for one microbatch, forward and backward.
        """
        whole, longest, shares = float(times.least.sum()), float(times.least.max()), times.fractions
        with_launches = count * (float(np.maximum(times.least / parts, starts).sum()) + sum(exchanged)) / places
        steps = []
        for name, stages_per_rank in schedules(request):
            if request.replicas:
                candidate = Candidate(name, 1, count, request.replicas)
                steps.append(least_shared_step(candidate, whole / parts, longest / parts, shares, exchanged))
            elif places * stages_per_rank <= self._n_units:
                load = max(whole / places, longest) / parts
                slowest = max(whole / (places * stages_per_rank), longest) / parts
                candidate = Candidate(name, stages_per_rank, count)
                steps.append(least_step(candidate, places, whole / parts, load, slowest, shares, exchanged))
        return max(with_launches, min(steps, default=math.inf))

    def _activation_collectives(self, mesh: Mesh, rows: int, extra_axes: bool, limit: float, attention: str) -> tuple[float, float, float]:
        """Return the seconds of the collectives of activations of all stages: forward, backward, and those waited for in the latter.

        Gathers of sharded parameters are left out: with more ranks their shards may be small enough to be coalesced, which the price for
        two ranks does not show.
        """
        inner = Mesh(tuple(each for each in mesh.cutting.dimensions if each[0] not in (*ROWS, *TILES)))  # halos shrink with a grid
        if not inner.dimensions:
            return 0.0, 0.0, 0.0
        in_mesh = self._model.axes_cut(mesh.cutting, extra_axes=extra_axes, limit=limit)
        alone = self._model.axes_cut(inner, extra_axes=extra_axes, limit=limit)
        if any(in_mesh[name] != alone[name] for name in inner.names):  # the other dimensions change the choice: no bound
            return 0.0, 0.0, 0.0
        part = self._model.part_for_bounds(inner, extra_axes=extra_axes, limit=limit, attention=attention)
        links = self._links.of(mesh)
        numbers, totals = self._numbers(rows), np.zeros(3)
        for exchange, count in part.exchange_counts:
            if exchange.is_stored:
                continue
            share = rows / self._whole.batch_size if part.source.graph.batch is None else 1.0
            # The time of copies is left out: shards of a microbatch of one sample may be contiguous, and need none.
            forward, backward = exchange.seconds(numbers[exchange.size] * share, links[exchange.dimension])
            forward = 0.0 if exchange.is_ahead else forward
            totals += np.array([forward, backward, 0.0 if exchange.is_beside else backward]) * count
        in_forward, in_backward, backward_wait = totals.tolist()
        return in_forward, in_backward, backward_wait

    def _weight_collectives(self, mesh: Mesh, rows_name: str, n_rows: int, stages: int) -> tuple[tuple[float, float], float]:
        """Return the seconds of parameters of all stages in each microbatch, forward and backward, and of gradients once a step."""
        if n_rows == 1 or not self._whole.graph.training:
            return (0.0, 0.0), 0.0
        links, parts = self._links.of(mesh)[rows_name], mesh.cutting.size // n_rows
        if rows_name == "data":
            size = sum(self._sizes[name] for name in self._read_by_all(n_rows))
            return (0.0, 0.0), links.seconds("all_reduce", size / (stages * parts)) if size else 0.0
        return self._parameter_gathers(links, n_rows, parts), 0.0

    def _parameter_gathers(self, links: GroupLinks, rows: int, others: int) -> tuple[float, float]:
        """Return the seconds of all stages to gather parameters, and to reduce-scatter gradients, for each microbatch.

        Parameters are sharded over ``rows`` ranks, and evenly over ``others`` along other mesh dimensions.
        """
        kinds: Sequence[Collective] = ("all_gather", "reduce_scatter")
        totals = []
        for kind in kinds:
            messages, size = self._gathered_messages(kind, rows, others)
            totals.append(messages * links.seconds(kind, 0.0) + size / others * links.seconds(kind, _LARGE) / _LARGE)
        return totals[0], totals[1]

    def _gathered_messages(self, kind: Collective, rows: int, others: int) -> tuple[float, float]:
        """Return the messages, and the bytes, of parameters that are long enough to be sharded over ``rows`` ranks in every plan."""
        key = (kind, rows, others)
        if key not in self._known_messages:
            sizes = [self._sizes[name] for name in self._read_by_all(rows) if self._longest[name] >= rows * others]
            self._known_messages[key] = sum(fraction_of_message(kind, size / others, rows) for size in sizes), sum(sizes)
        return self._known_messages[key]

    def _read_by_all(self, rows: int) -> frozenset[str]:
        """Return the parameters that each of ``rows`` replicas reads whole: no slices, and no experts that only one replica has."""
        if rows not in self._known_replicated:
            try:
                sums = self._model.cut(Mesh((("data", rows),))).part.sums
            except ConfigError:
                sums = ()
            self._known_replicated[rows] = frozenset(each.parameter for each in sums) & self._sizes.keys()
        return self._known_replicated[rows]


def _longest_axis(axes: Axes, parameter: str) -> int:
    """Return the longest axis over which a parameter could be sharded; 0 if no node reads it."""
    if parameter not in axes.tensors:
        return 0
    sizes = (axes.sizes[axis] for dimension in axes.of(parameter) for axis in dimension)
    return max((size for size in sizes if isinstance(size, int)), default=0)


_LARGE = 1e18
"""Bytes of a message for which latency is negligible."""

_ROUNDING = 1e-6
"""Relative margin for the rounding of sums."""
