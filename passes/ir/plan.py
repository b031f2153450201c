"""The decisions of the planner and its predictions: immutable values of plain numbers and names, no torch objects."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from passes.ir.arguments.checked import check_fields
from passes.ir.arguments.conform import conform
from passes.ir.comm.halo_strategy import HaloSegment
from passes.ir.errors import ConfigError
from passes.ir.mesh import DIMENSIONS, SEQUENCE, STAGES, TILES, WIDTH, Mesh

_FORMAT = 4

RECOMPUTE = ("none", "selective", "full")
"""Values that a backward recomputes: none; those cheap for their bytes; all but the values that enter a region."""

BY_REGION = "by region"
"""``Plan.recompute`` of a plan whose regions have policies of their own: those that the model marks, or that the user gave by module."""

BATCHNORM = ("sync", "local")
"""Statistics of batch normalisation if the batch is sharded: over all rows, or over each rank's own rows."""

REDUCE_DTYPES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})
"""Type in which gradients of parameters may be summed over ranks, beside their own -> bytes of an element."""

OBJECTIVES = ("step_time", "memory", "tokens_per_second_per_device", "cost")
"""The shortest step; the least memory of the fullest device; of a given number of devices, the other two have the shortest step, too."""

ATTENTION = ("gather", "ulysses", "ring", "zigzag")
"""How ranks of a sequence dimension share attention: each gathers all keys and values; they exchange the sequence for heads and back; keys
and values go round all ranks, a part at a time; or they do so where each has an early and a late piece of the sequence."""


@dataclass(frozen=True)
class Stage:
    """A run of consecutive nodes of the model's graph, computed by one rank, or by several round-robin.

    Attributes:
        ranks: the ranks that compute it; on a mesh of several dimensions, pipeline positions.
        first_node: name of its first node; the stage ends where the next begins.
        modules: the module paths that it covers, for reports: ``("transformer.h.0", "transformer.h.1")``.
        parameter_count: parameters that it holds (a parameter shared with another stage counts in both).
        parameter_bytes: their size in bytes.
        flops: forward floating-point operations for one microbatch.
        forward_time: predicted seconds for one microbatch.
        backward_time: predicted seconds for one microbatch, both halves.
        activation_bytes: predicted bytes saved for the backward of one microbatch.
        send_bytes: bytes of activations that leave it for one microbatch.
    """

    ranks: tuple[int, ...]
    first_node: str
    modules: tuple[str, ...]
    parameter_count: int
    parameter_bytes: int
    flops: float
    forward_time: float = field(compare=False)
    backward_time: float = field(compare=False)
    activation_bytes: int
    send_bytes: int


@dataclass(frozen=True)
class Region:
    """A run of nodes of the model's graph with one policy in the backward; it ends where the next region begins.

    Attributes:
        first_node: name of its first node.
        recompute: one of ``RECOMPUTE``.
        is_joined: whether it is recomputed together with the region before it. Otherwise the values that enter it are saved.
    """

    first_node: str
    recompute: str = "full"
    is_joined: bool = False


@dataclass(frozen=True)
class Contender:
    """A plan that the search evaluated.

    Attributes:
        words: its mesh, schedule, microbatches and recomputation.
        step_time: predicted seconds for one training step.
        memory: predicted peak bytes of the rank with the highest peak.
        spent_on: the largest part of its time, in words.
    """

    words: str
    step_time: float
    memory: int
    spent_on: str


@dataclass(frozen=True)
class Prediction:
    """Predictions for a plan by the cost model, and how good it is compared to others.

    Attributes:
        step_time: seconds for one training step.
        memory: peak bytes for each rank, in a step by the schedule.
        call_memory: the same in a step by ``pm(...)`` and ``backward()``, which runs all forwards first, and returns the results on every
            rank; empty of a model in evaluation.
        bound_by: the bottleneck of the step, in words.
        runner_up: the next best choice and its cost, in words; empty if there was no choice.
        notes: notes for the user, one sentence each.
        gap: upper bound of the relative time that the best plan in the search space could save, by the same cost model, over all axes
            that were evaluated (``planner.axis_contenders``); 0: proved optimal. For a given mesh, over the plans of that mesh.
            None for sequential tiles on one device.
        axes_gap: the same bound for other choices of axes for a tensor dimension, by the costs of that choice; 0: proved optimal;
            None if there was no such choice.
        searched: how many plans were evaluated, and what is proved of all others, in words; empty if ``gap`` is None.
        contenders: the best plan of each evaluated mesh (of each schedule, if the mesh was given): the chosen one and the next few.
        front: of a search over all meshes, the evaluated plans that no other beats in both step time and memory, the fastest first: at most
            five; empty for a given mesh.
        sizes: the sizes of the inputs, besides the batch, that it was priced for, where calls may have others: ``(("length", 128),)``.
    """

    step_time: float
    memory: tuple[int, ...]
    call_memory: tuple[int, ...] = ()
    bound_by: str = ""
    runner_up: str = ""
    notes: tuple[str, ...] = ()
    gap: float | None = None
    axes_gap: float | None = None
    searched: str = ""
    contenders: tuple[Contender, ...] = ()
    front: tuple[Contender, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Decides where everything runs, and when. Equal inputs give an equal plan; it round-trips through JSON.

    Plans with equal decisions are equal, even if their predictions differ.

    Attributes:
        mesh: dimensions, outermost first: ``(("pipeline", 4),)``.
        devices: for each rank, the device it runs on (``"cpu"``, ``"cuda:1"``).
        stages: in graph order.
        schedule: name of the schedule.
        n_microbatches: microbatches a step.
        recompute: ``"none"``, ``"selective"``, ``"full"``, or ``"by region"``: each region has its own.
        batch_size: the batch it was planned for.
        prediction: step time, memory, and how good the plan is compared to others; no part of the decision.
        axes: sharded axes with their mesh dimensions: ``(("batch", "data"), ("heads", "tensor"))``; see ``passes.analysis.axis_names``.
        batchnorm: if the batch is sharded, ``"sync"``: statistics of all rows, or ``"local"``: of each rank's own.
        weights: digest of the weights of the model that the plan is for (``passes.graph.equivalence``); empty: any model that it fits.
        tiles: for sequential tiling on one device, the number of tiles along each dimension of space; empty: no tiling.
        tile_budget: with ``tiles``, bytes up to which values are computed whole.
        halos: for spatial sharding over devices, the halo strategy of each segment of calls.
        widths: for each pipeline position, the number of ranks along the mesh dimension ``tensor``; empty if all have the same.
        attention: how the ranks of the mesh dimension ``sequence`` share attention: one of ``ATTENTION``.
        regions: with ``recompute="full"`` or ``"by region"``, the regions in graph order. The backward recomputes a region from the values
            that enter it, directly before the region's own backward. Empty: each stage is one region.
        recomputed: where the policy is ``"selective"``, the nodes whose values the backward recomputes; it saves all others that it reads.
            Besides nodes of the model's graph, those that a rewrite of one gives, with its name and a suffix: ``dropout_1_mask``.
        reduce_dtype: type in which gradients of parameters are summed over ranks: one of ``REDUCE_DTYPES``; None: that of the parameters.
    """

    mesh: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]
    stages: tuple[Stage, ...]
    schedule: str
    n_microbatches: int
    recompute: str
    batch_size: int
    prediction: Prediction = field(compare=False)
    axes: tuple[tuple[str, str], ...] = ()
    batchnorm: str = "sync"
    weights: str = ""
    tiles: tuple[int, ...] = ()
    tile_budget: int = 0
    halos: tuple[HaloSegment, ...] = ()
    widths: tuple[int, ...] = ()
    attention: str = "gather"
    regions: tuple[Region, ...] = ()
    recomputed: tuple[str, ...] = ()
    reduce_dtype: str | None = None

    @property
    def step_time(self) -> float:
        """Predicted seconds for one training step."""
        return self.prediction.step_time

    @property
    def memory(self) -> tuple[int, ...]:
        """Predicted peak bytes for each rank."""
        return self.prediction.memory

    @property
    def call_memory(self) -> tuple[int, ...]:
        """Predicted peak bytes for each rank in a step by ``pm(...)`` and ``backward()``; in evaluation those of the forward."""
        return self.prediction.call_memory or self.memory

    @property
    def gap(self) -> float | None:
        """Upper bound of the relative time that another plan could save: see ``Prediction``."""
        return self.prediction.gap

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, one sentence each."""
        return self.prediction.notes

    def predicted(self, **changes: Any) -> Plan:
        """Return the plan with fields of its prediction replaced."""
        return dataclasses.replace(self, prediction=dataclasses.replace(self.prediction, **changes))

    @property
    def grid(self) -> Mesh:
        """The mesh as an object."""
        return Mesh(self.mesh, self.widths)

    @property
    def n_ranks(self) -> int:
        return len(self.devices)

    @property
    def first_nodes(self) -> tuple[str, ...]:
        """For each stage, the name of its first node."""
        return tuple(stage.first_node for stage in self.stages)

    @property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the ranks that compute it."""
        return tuple(stage.ranks for stage in self.stages)

    @property
    def replicas(self) -> tuple[int, ...]:
        """For each stage, the number of its round-robin ranks; empty if every stage has one."""
        counts = tuple(len(stage.ranks) for stage in self.stages)
        return counts if max(counts, default=1) > 1 else ()

    def check(self) -> None:
        """Raise ConfigError, naming the entry, if an entry is out of range or contradicts another."""
        for part in (self, self.prediction, *self.stages, *self.prediction.contenders, *self.prediction.front, *self.halos, *self.regions):
            check_fields(part)
        for path, number in _numbers(self, ""):
            may_be_negative = path in ("prediction.gap", "prediction.axes_gap")  # by a rounding error
            _require(math.isfinite(number) and (number >= 0 or may_be_negative), path, f"there is no {number} there")
        self._check_recomputation()
        _require(self.batchnorm in BATCHNORM, "batchnorm", f"there is no {self.batchnorm!r}, choose one of {', '.join(BATCHNORM)}")
        _require(self.attention in ATTENTION, "attention", f"there is no {self.attention!r}, choose one of {', '.join(ATTENTION)}")
        is_type = self.reduce_dtype in (None, *REDUCE_DTYPES)
        _require(is_type, "reduce_dtype", f"there is no {self.reduce_dtype!r}, choose one of {', '.join(REDUCE_DTYPES)}, or null")
        has_sequence = any(name == SEQUENCE for name, _ in self.mesh)
        _require(has_sequence or self.attention == ATTENTION[0], "attention", f"the mesh has no {SEQUENCE!r} to share attention over")
        _require(self.batch_size >= 1, "batch_size", f"a batch of {self.batch_size} rows has none")
        _require(self.n_microbatches >= 1, "n_microbatches", f"a step of {self.n_microbatches} microbatches is none")
        self._check_mesh()
        places = list(range(len(self.widths) or math.prod(size for name, size in self.mesh if name in STAGES)))
        for index, stage in enumerate(self.stages):
            valid = bool(stage.ranks) and len(set(stage.ranks)) == len(stage.ranks) and set(stage.ranks) <= set(places)
            _require(valid, f"stages[{index}].ranks", f"{stage.ranks} are not some of the pipeline's ranks, 0 to {len(places) - 1}")
        idle = sorted(set(places).difference(*self.stage_ranks))
        _require(not idle, "stages", f"rank {idle[0] if idle else 0} of the pipeline has none")
        for index, (name, dimension) in enumerate(self.axes):
            _require(dimension in self.grid.cutting.names, f"axes[{index}]", f"the mesh has no {dimension!r} to cut {name!r} over")
            _require(self.axes.index((name, dimension)) == index, f"axes[{index}]", f"{name!r} is cut over {dimension!r} twice")
        _require(len(self.memory) == self.n_ranks, "prediction.memory", f"it covers {len(self.memory)} ranks, the plan has {self.n_ranks}")
        n_calls = len(self.prediction.call_memory)
        _require(n_calls in (0, self.n_ranks), "prediction.call_memory", f"it covers {n_calls} ranks, the plan has {self.n_ranks}")
        tiled = self.n_ranks == 1 and len(self.tiles) <= len(TILES) and min(self.tiles, default=1) >= 1
        _require(tiled or not self.tiles, "tiles", f"one device computes at least one tile along each dimension of space, not {self.tiles}")
        _require(bool(self.tiles) or self.tile_budget == 0, "tile_budget", "there are no tiles")

    def _check_recomputation(self) -> None:
        """Raise ConfigError for an unknown policy, or regions that do not fit it."""
        known = (*RECOMPUTE, BY_REGION)
        _require(self.recompute in known, "recompute", f"there is no {self.recompute!r}, choose one of {', '.join(known)}")
        _require(self.recompute in ("full", BY_REGION) or not self.regions, "regions", f"recompute={self.recompute!r} has no regions")
        _require(self.recompute != BY_REGION or bool(self.regions), "regions", f"recompute={self.recompute!r} has none")
        for index, region in enumerate(self.regions):
            is_policy = region.recompute in RECOMPUTE and (self.recompute == BY_REGION or region.recompute == "full")
            _require(is_policy, f"regions[{index}].recompute", f"{region.recompute!r} does not fit recompute={self.recompute!r}")
        is_selective = "selective" in (self.recompute, *(region.recompute for region in self.regions))
        _require(is_selective or not self.recomputed, "recomputed", f"recompute={self.recompute!r} selects no values")

    def _check_mesh(self) -> None:
        """Raise ConfigError if the mesh, its widths and the devices do not fit together."""
        sizes, n_ranks = dict(self.mesh), len(self.devices)
        _require(n_ranks > 0, "devices", "there is none")
        for index, (name, size) in enumerate(self.mesh):
            _require(name in (*DIMENSIONS, *TILES), f"mesh[{index}]", f"there is no mesh dimension {name!r}")
            _require(1 <= size <= n_ranks, f"mesh[{index}]", f"{n_ranks} devices have no dimension of {size}")
        _require(len(sizes) == len(self.mesh) and not set(STAGES) <= sizes.keys(), "mesh", "it has a dimension twice")
        n_places, widest = math.prod(sizes.get(name, 1) for name in STAGES), max(self.widths, default=1)
        differ = len(set(self.widths)) > 1
        valid_widths = differ and len(self.widths) == n_places and min(self.widths) >= 1 and widest == sizes.get(WIDTH)
        _require(not self.widths or valid_widths, "widths", f"{self.widths} do not fit the mesh, {sizes}")
        _require(self.grid.size == n_ranks, "mesh", f"it has {self.grid.size} ranks, and the plan names {n_ranks} devices")

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan from the text of ``to_json``.

        Raises:
            ConfigError: the text is not a plan: names the wrong entry.
        """
        remedy = "pass the text that plan.to_json() gave"
        try:
            fields = json.loads(conform(text, str, "the plan"), object_pairs_hook=_entries)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = "it is nested too deep" if isinstance(error, RecursionError) else error
            raise ConfigError(f"the plan is not JSON: {reason}", remedy=remedy) from error
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ConfigError(f"the plan is not of format {_FORMAT}", remedy="make the plan again with this version")
        missing = [field.name for field in dataclasses.fields(Plan) if field.name not in fields]
        prediction = fields.get("prediction")
        if isinstance(prediction, dict):
            missing += [f"prediction.{field.name}" for field in dataclasses.fields(Prediction) if field.name not in prediction]
        if missing:  # fields with a default, too: the plan may have had another value
            raise ConfigError(f"the plan lacks {', '.join(missing)}", remedy=remedy)
        plan: Plan = conform(fields, Plan, "plan", plain=True)
        plan.check()
        return plan

    @property
    def hash(self) -> str:
        """A short digest of the decision: equal for equal plans, on every machine."""
        return hashlib.sha256(json.dumps(_decision(self)).encode()).hexdigest()[:16]


def _decision(value: Any) -> Any:
    """Return a part of a plan as plain lists, without predictions: the fields that ``==`` compares."""
    if dataclasses.is_dataclass(value):
        return [(field.name, _decision(getattr(value, field.name))) for field in dataclasses.fields(value) if field.compare]
    return [_decision(item) for item in value] if isinstance(value, tuple) else value


def _require(holds: bool, path: str, problem: str) -> None:
    if not holds:
        raise ConfigError(f"plan.{path}: {problem}", remedy="make the plan again, or correct the entry")


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield all numbers of a plan, each with its path: ``("stages[0].flops", 1e9)``."""
    if dataclasses.is_dataclass(value):
        for child in dataclasses.fields(value):
            yield from _numbers(getattr(value, child.name), f"{path}.{child.name}" if path else child.name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")
    elif isinstance(value, int | float):
        yield path, value


def _entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object; raises ConfigError if it has an entry twice, of which ``json`` would take the last."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the plan has the entry {twice!r} twice", remedy="leave one of them out")
    return entries
