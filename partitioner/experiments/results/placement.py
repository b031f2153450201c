"""One placement of a model, and the grid of all that a sweep asks for.

models x devices x modes x clusters x schedules x microbatches x recompute

What does not go together is left out: a mesh of another number of devices, a schedule where nothing is a pipeline. What then comes twice
comes once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partitioner.options.mode import REST, mode_text, parse_mode, resolve_mode, without_rest
from passes.ir.errors import ConfigError
from passes.ir.mesh import STAGES

__all__ = ["Placement", "placements"]


@dataclass(frozen=True)
class Placement:
    """What a sweep asks the planner for, once.

    Attributes:
        model: its name in the sweep.
        devices: how many ranks.
        mode: as text, ``"tensor"`` or ``"data=2,tensor=2"``.
        cluster: its name in the sweep.
        schedule: None: the planner chooses.
        n_microbatches: None: the planner chooses.
        recompute: None: the planner chooses.
    """

    model: str
    devices: int
    mode: str
    cluster: str
    schedule: str | None = None
    n_microbatches: int | None = None
    recompute: str | None = None

    @property
    def mesh(self) -> str | dict[str, Any]:
        """The mode as ``partition`` takes it."""
        return parse_mode(self.mode)

    def key(self, *context: object) -> str:
        """A digest of the placement and of everything else that its result depends on: equal questions, equal keys, on every machine."""
        text = json.dumps([asdict(self), *context], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        chosen = (
            self.schedule,
            self.n_microbatches and f"{self.n_microbatches} microbatches",
            self.recompute and f"recompute {self.recompute}",
        )
        return " ".join([self.model, f"{self.mode} on {self.devices} x {self.cluster}", *(word for word in chosen if word)])


def placements(
    models: Sequence[str],
    devices: Sequence[int],
    modes: Sequence[str | Mapping[str, Any]],
    clusters: Sequence[str],
    schedules: Sequence[str | None] = (None,),
    microbatches: Sequence[int | None] = (None,),
    recompute: Sequence[str | None] = (None,),
) -> list[Placement]:
    """Every placement of a grid, those next to each other that share a model and a mesh.

    Args:
        models, clusters: by name.
        devices: how many ranks.
        modes: as ``partition`` takes them; one size of a mesh may be -1: what the others leave.
        schedules, microbatches, recompute: None stands for the planner's choice.

    Raises:
        ConfigError: a dimension is empty, a mode is unknown, or a mesh has none of the numbers of devices.
    """
    others = {"clusters": clusters, "schedules": schedules, "microbatches": microbatches, "recompute": recompute}
    for name, values in {"models": models, "devices": devices, "modes": modes, **others}.items():
        if not values:
            raise ConfigError(f"a sweep over no {name} asks for nothing", remedy=f"pass {name}=[...], or leave it out")
    meshes = [each for mode in modes for each in _meshes(mode, devices)]
    found = (
        _placement(model, count, mesh, *rest)
        for model, (count, mesh) in itertools.product(models, meshes)
        for rest in itertools.product(clusters, schedules, microbatches, recompute)
    )
    return list(dict.fromkeys(found))


def _meshes(mode: str | Mapping[str, Any], devices: Sequence[int]) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """The numbers of devices that a mode fits, each with its mesh."""
    fitting = [(count, mesh) for count in devices if (mesh := without_rest(mode, count)) is not None]
    if not fitting:
        numbers = ", ".join(map(str, devices))
        how = f"a size of {REST} takes what the others leave" if isinstance(mode, Mapping) else "pass other devices"
        raise ConfigError(f"the mesh {mode_text(mode)} has none of the numbers of devices {numbers}", remedy=how)
    for count, mesh in fitting:
        resolve_mode(mesh, count)
        yield count, mesh


def _placement(
    model: str,
    devices: int,
    mesh: str | dict[str, Any],
    cluster: str,
    schedule: str | None,
    n_microbatches: int | None,
    recompute: str | None,
) -> Placement:
    """A placement in the one way to write it: without what means nothing for its mode."""
    if isinstance(mesh, dict):
        cutting = {name: size for name, size in mesh.items() if size != 1} or {"pipeline": 1}
        mesh = next(iter(cutting)) if len(cutting) == 1 and not isinstance(next(iter(cutting.values())), tuple | list) else cutting
    names = list(mesh) if isinstance(mesh, dict) else [mesh]
    in_stages = "auto" in names or "pipeline" in names or "pp" in names
    keeps_batch_whole = STAGES[1] in names
    return Placement(
        model,
        devices,
        mode_text(mesh),
        cluster,
        schedule if in_stages else None,
        None if keeps_batch_whole else n_microbatches,
        recompute,
    )
