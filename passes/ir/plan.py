"""What the planner decided: an immutable value of plain numbers and names, no torch objects."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from passes.ir.errors import ConfigError
from passes.ir.halo_run import HaloRun
from passes.ir.mesh import Mesh

__all__ = ["Contender", "Plan", "Stage"]

_FORMAT = 1


@dataclass(frozen=True)
class Stage:
    """A run of consecutive nodes of the model's graph, computed by one rank, or by several that microbatches are dealt to in turn.

    Attributes:
        ranks: who computes it; on a mesh of several dimensions, places along the pipeline.
        first_node: name of its first node; the stage ends where the next begins.
        modules: the module paths that it covers, for reading: ``("transformer.h.0", "transformer.h.1")``.
        parameter_count: parameters that it holds (a parameter shared with another stage counts in both).
        parameter_bytes: their size in bytes.
        flops: forward floating-point operations for one microbatch.
        forward_time: predicted seconds for one microbatch.
        backward_time: predicted seconds for one microbatch, both halves.
        activation_bytes: predicted bytes kept for the backward of one microbatch.
        send_bytes: bytes of activations that leave it for one microbatch.
    """

    ranks: tuple[int, ...]
    first_node: str
    modules: tuple[str, ...]
    parameter_count: int
    parameter_bytes: int
    flops: float
    forward_time: float
    backward_time: float
    activation_bytes: int
    send_bytes: int


@dataclass(frozen=True)
class Contender:
    """A plan that was worked out beside others.

    Attributes:
        words: its mesh, schedule, microbatches and recomputation.
        step_time: predicted seconds for one training step.
        memory: predicted peak bytes of its fullest rank.
        spent_on: what most of its time goes into.
    """

    words: str
    step_time: float
    memory: int
    spent_on: str


@dataclass(frozen=True)
class Plan:
    """Where everything runs, and when. Equal inputs give an equal plan; it round-trips through JSON.

    Attributes:
        mesh: dimensions, outermost first: ``(("pipeline", 4),)``.
        devices: for each rank, the device it runs on (``"cpu"``, ``"cuda:1"``).
        stages: in graph order.
        schedule: name of the schedule.
        n_microbatches: microbatches a step.
        recompute: ``"none"``, ``"selective"`` or ``"full"``.
        batch_size: the batch it was planned for.
        step_time: predicted seconds for one training step.
        memory: predicted peak bytes for each rank.
        bound_by: what limits the step, in words.
        runner_up: the next best choice and its predicted price, in words; empty when there was no choice.
        notes: what the user should know, one sentence each.
        axes: which axis is cut over which mesh dimension: ``(("batch", "data"), ("heads", "tensor"))``; see ``passes.axis_names``.
        batchnorm: where the batch is cut, ``"sync"``: statistics of all rows, or ``"local"``: of each rank's own.
        gap: how much faster, relatively, any plan could be of all that were to choose from, by the same prices: 0 is proved to be the best;
            None where one device computes tiles in turn. Where the mesh was given, of all plans of that mesh.
        axes_gap: how much less, relatively, another choice of axes for a tensor dimension could cost, by the prices of that choice: 0 is
            proved to be the best; None where no such axes were to be chosen.
        searched: how many plans were worked out and what is known of all others, in words; empty where ``gap`` is None.
        contenders: the best plan of each mesh that was worked out (where the mesh was given, of each schedule): the chosen one, and the
            few that come next.
        weights: digest of the model's weights (``passes.weights_digest``): a plan is for one model; empty: for any that it fits.
        tiles: where one device computes tiles in turn, how many along each dimension of space; empty: none.
        tile_budget: bytes up to which values are computed whole there.
        halos: where tiles lie over devices, how each run of calls pays for what its windows read of neighbours.
        widths: for each place along the pipeline, how many ranks stand along the mesh dimension ``tensor``; empty where all have as many.
    """

    mesh: tuple[tuple[str, int], ...]
    devices: tuple[str, ...]
    stages: tuple[Stage, ...]
    schedule: str
    n_microbatches: int
    recompute: str
    batch_size: int
    step_time: float
    memory: tuple[int, ...]
    bound_by: str
    runner_up: str
    notes: tuple[str, ...]
    axes: tuple[tuple[str, str], ...] = ()
    batchnorm: str = "sync"
    gap: float | None = None
    axes_gap: float | None = None
    searched: str = ""
    contenders: tuple[Contender, ...] = ()
    weights: str = ""
    tiles: tuple[int, ...] = ()
    tile_budget: int = 0
    halos: tuple[HaloRun, ...] = ()
    widths: tuple[int, ...] = ()

    @property
    def grid(self) -> Mesh:
        """The mesh, as its ranks stand on it."""
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
        """For each stage, how many ranks microbatches are dealt to; empty where every stage has one."""
        counts = tuple(len(stage.ranks) for stage in self.stages)
        return counts if max(counts, default=1) > 1 else ()

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what ``to_json`` wrote; raises ConfigError naming what does not fit."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the plan is not JSON: {error}", remedy="pass the text that plan.to_json() gave") from error
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ConfigError(f"the plan is not of format {_FORMAT}", remedy="make the plan again with this version")
        _check_names("plan", fields, Plan)
        for stage in fields["stages"]:
            _check_names("stage", stage, Stage)
        fields["stages"] = tuple(
            Stage(**{**stage, "modules": tuple(stage["modules"]), "ranks": tuple(stage["ranks"])}) for stage in fields["stages"]
        )
        for contender in fields["contenders"]:
            _check_names("contender", contender, Contender)
        fields["contenders"] = tuple(Contender(**contender) for contender in fields["contenders"])
        for run in fields["halos"]:
            _check_names("run of halos", run, HaloRun)
        fields["halos"] = tuple(HaloRun(**{**run, "modules": tuple(run["modules"])}) for run in fields["halos"])
        fields["mesh"] = tuple((name, size) for name, size in fields["mesh"])
        fields["axes"] = tuple((name, dimension) for name, dimension in fields["axes"])
        for name in ("devices", "memory", "notes", "tiles", "widths"):
            fields[name] = tuple(fields[name])
        return Plan(**fields)

    @property
    def hash(self) -> str:
        """A short digest of the whole plan: equal plans, equal digests, on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def _check_names(what: str, fields: dict[str, Any], kind: type) -> None:
    expected = {field.name for field in dataclasses.fields(kind)}
    for problem, names in (("lacks", expected - fields.keys()), ("has unknown", fields.keys() - expected)):
        if names:
            raise ConfigError(f"the {what} {problem} {', '.join(sorted(names))}", remedy="pass the text that plan.to_json() gave")
