"""One placement of a model, and the grid of all placements of a sweep.

models x devices x modes x clusters x schedules x microbatches x recompute x options

Combinations that do not fit are left out, such as a mesh of another number of devices. Options that a mode ignores, such as the schedule
without a pipeline, are dropped, and of equal placements one remains.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partitioner.options.mode import REST, mode_text, parse_mode, resolve_mode, sequential_tiles, without_rest
from passes.ir.errors import ConfigError
from passes.ir.mesh import STAGES


@dataclass(frozen=True)
class Placement:
    """One request of a sweep to the planner.

    Attributes:
        model: the name of the model in the sweep.
        devices: the number of ranks.
        mode: the mode as text, ``"tensor"`` or ``"data=2,tensor=2"``.
        cluster: the name of the machine in the sweep.
        schedule, n_microbatches, recompute: None: the planner chooses. Policies by pattern are text, ``"layers.*=full"``.
        options: other keywords of ``partition`` as JSON, see ``option_grid``; empty: their defaults.
    """

    model: str
    devices: int
    mode: str
    cluster: str
    schedule: str | None = None
    n_microbatches: int | None = None
    recompute: str | None = None
    options: str = ""

    @property
    def policies(self) -> str | dict[str, str] | None:
        """The recomputation as an argument of ``partition``."""
        if self.recompute is None or "=" not in self.recompute:
            return self.recompute
        return dict(entry.split("=") for entry in self.recompute.split(","))

    @property
    def mesh(self) -> str | dict[str, Any]:
        """The mode as an argument of ``partition``."""
        return parse_mode(self.mode)

    def key(self, *context: object) -> str:
        """Return a digest of the placement and of ``context``, the other facts that its result depends on; the same on every machine."""
        text = json.dumps([asdict(self), *context], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        chosen = (
            self.schedule,
            self.n_microbatches and f"{self.n_microbatches} microbatches",
            self.recompute and f"recompute {self.recompute}",
            self.options,
        )
        return " ".join([self.model, f"{self.mode} on {self.devices} x {self.cluster}", *(word for word in chosen if word)])


def placements(
    models: Sequence[str],
    devices: Sequence[int],
    modes: Sequence[str | Mapping[str, Any]],
    clusters: Sequence[str],
    schedules: Sequence[str | None] = (None,),
    microbatches: Sequence[int | None] = (None,),
    recompute: Sequence[str | Mapping[str, str] | None] = (None,),
    options: Sequence[str] = ("",),
) -> list[Placement]:
    """Return every placement of a grid; those that share a model and a mesh are neighbours.

    Args:
        models, clusters: their names.
        devices: numbers of ranks.
        modes: as for ``partition``; one size of a mesh may be -1, which takes the remaining devices.
        schedules, microbatches, recompute: None stands for the planner's choice.
        options: other keywords of ``partition``, each as JSON.

    Raises:
        ConfigError: a dimension is empty, a mode is unknown, or a mesh fits none of the numbers of devices.
    """
    others = {"clusters": clusters, "schedules": schedules, "microbatches": microbatches, "recompute": recompute}
    for name, values in {"models": models, "devices": devices, "modes": modes, **others}.items():
        if not values:
            raise ConfigError(f"`{name}` is empty", remedy=f"pass {name}=[...], or leave it out")
    meshes = [count_and_mesh for mode in modes for count_and_mesh in _meshes(mode, devices)]
    grid = (
        _canonical_placement(model, count, mesh, *rest)
        for model, (count, mesh) in itertools.product(models, meshes)
        for rest in itertools.product(clusters, schedules, microbatches, map(_policy_text, recompute), options)
    )
    return list(dict.fromkeys(grid))


def _policy_text(recompute: str | Mapping[str, str] | None) -> str | None:
    """Return a policy, or policies by pattern as text: ``"layers.*=full,head=none"``."""
    return ",".join(f"{pattern}={policy}" for pattern, policy in recompute.items()) if isinstance(recompute, Mapping) else recompute


def _meshes(mode: str | Mapping[str, Any], devices: Sequence[int]) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Yield (number of devices, mesh or mode) for each of the numbers of devices that a mode fits."""
    fitting = [(count, mesh) for count in devices if (mesh := _mesh_on(mode, count)) is not None]
    if not fitting:
        numbers = ", ".join(map(str, devices))
        how = f"a size of {REST} takes what the others leave" if isinstance(mode, Mapping) else "pass other devices"
        raise ConfigError(f"the mesh {mode_text(mode)} has none of the numbers of devices {numbers}", remedy=how)
    for count, mesh in fitting:
        if sequential_tiles(mesh, count) is None:
            resolve_mode(mesh, count)
        yield count, mesh


def _mesh_on(mode: str | Mapping[str, Any], n_devices: int) -> str | dict[str, Any] | None:
    """Return a mode for a number of devices, None if it does not fit; tiles of one device are computed one after the other."""
    if isinstance(mode, Mapping) and REST not in mode.values() and sequential_tiles(mode, n_devices) is not None:
        return dict(mode)
    return without_rest(mode, n_devices)


def _canonical_placement(
    model: str,
    devices: int,
    mesh: str | dict[str, Any],
    cluster: str,
    schedule: str | None,
    n_microbatches: int | None,
    recompute: str | None,
    options: str,
) -> Placement:
    """Return a placement in canonical form: without mesh dimensions of size 1, and without options that its mode ignores."""
    if isinstance(mesh, dict):
        mesh = {name: size for name, size in mesh.items() if size != 1} or {"pipeline": 1}  # one device
        (name, size), *others = mesh.items()
        if not others and size == devices:  # {"tensor": 4} is "tensor" on 4 devices
            mesh = name
    names = list(mesh) if isinstance(mesh, dict) else [mesh]
    in_stages = "auto" in names or "pipeline" in names or "pp" in names
    keeps_batch_whole = STAGES[1] in names
    if not in_stages:
        schedule, options = None, _without_stages(options)
    return Placement(model, devices, mode_text(mesh), cluster, schedule, None if keeps_batch_whole else n_microbatches, recompute, options)


def _without_stages(options: str) -> str:
    """Return options without those of a pipeline."""
    others = {name: value for name, value in json.loads(options or "{}").items() if name != "stages_per_device"}
    return json.dumps(others, sort_keys=True) if others else ""
