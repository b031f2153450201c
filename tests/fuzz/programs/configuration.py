"""How a case is partitioned: a mode that applies to its program, and options at random."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from partitioner import Constraints
from passes.ir.plan import ATTENTION
from tests.fuzz.programs.program import Program

ROWS = ("data", "fsdp", "zero1", "zero2")
TWO_STAGES = ("Interleaved1F1B", "ZBV", "DualPipeV")


@dataclass(frozen=True)
class Configuration:
    """The arguments of ``partition``; None leaves one out."""

    devices: int
    mode: str | tuple[tuple[str, int | tuple[int, int]], ...]
    n_microbatches: int | None = None
    schedule: str | None = None
    recompute: str | tuple[tuple[str, str], ...] | None = None
    attention: str | None = None
    precision: str | None = None

    @property
    def mesh(self) -> Mapping[str, int | tuple[int, int]]:
        return {self.mode: self.devices} if isinstance(self.mode, str) else dict(self.mode)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``partition``."""
        found: dict[str, Any] = {"devices": self.devices, "mode": self.mode if isinstance(self.mode, str) else dict(self.mode)}
        for name in ("n_microbatches", "schedule", "recompute", "precision"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if isinstance(self.recompute, tuple):
            found["recompute"] = dict(self.recompute)
        if self.attention is not None:
            found["constraints"] = Constraints(attention=self.attention)
        return found

    def text(self) -> str:
        """Return the arguments as Python."""
        arguments = {name: repr(value) for name, value in self.arguments().items()}
        if self.attention is not None:
            arguments["constraints"] = f"Constraints(attention={self.attention!r})"
        return ", ".join(f"{name}={value}".replace("'", '"') for name, value in arguments.items())


def choose_configuration(rng: random.Random, program: Program, processes: int | None = None) -> Configuration:
    """Return a mode that applies to the program: its axes exist, and ranks divide the batch.

    Args:
        processes: how many ranks there are; None: any number.
    """
    found = _configuration(rng, program, processes)
    if "sequence" not in found.mesh or rng.random() < 0.5:
        return found
    return replace(found, attention=rng.choice(_attention(program, found.mesh["sequence"])))


def _attention(program: Program, n_ranks: Any) -> list[str]:
    """Return the ways to share attention that one of the program can follow: some of its positions, or heads, for each rank."""
    found = set[str]()
    for feature in program.features:
        if feature.startswith("attends "):
            positions, heads, is_causal = feature.split()[1:]
            found.update(["ring"] if int(positions) % n_ranks == 0 else ())
            found.update(["zigzag"] if is_causal == "True" and int(positions) % (2 * n_ranks) == 0 else ())
            found.update(["ulysses"] if int(heads) >= n_ranks else ())
    return [each for each in ATTENTION if each in found] or ["gather"]


def _configuration(rng: random.Random, program: Program, processes: int | None) -> Configuration:
    mesh = _mesh(rng, program) if processes is None else _one_dimension(rng, program, processes)
    recompute = rng.choice((None, None, "none", "selective", "full"))
    if isinstance(mesh, Configuration):
        return mesh
    if "pipeline" not in mesh:
        devices = math.prod(mesh.values())
        mode: Any = tuple(mesh.items())
        if len(mesh) == 1 and rng.random() < 0.7:
            mode = next(iter(mesh))
        return Configuration(devices, mode, recompute=recompute)
    return _pipeline(rng, program, mesh, recompute)


def _mesh(rng: random.Random, program: Program) -> dict[str, int] | Configuration:
    """Return one or more dimensions; a whole configuration for sequential tiles, for grids of tiles and for ``"auto"``."""
    features = program.features
    if (alone := _alone(rng, features)) is not None:
        return alone
    names = _names(rng, program)
    chosen = [rng.choice(names)]
    if rng.random() < 0.4 and chosen != ["model"]:
        other = rng.choice([name for name in names if name not in chosen and name != "model"] or chosen)
        if other not in chosen and not {*chosen, other} < set(ROWS):
            chosen.append(other)
            rng.shuffle(chosen)
    largest = 2 if len(chosen) > 1 else rng.choice((2, 2, 3, 4))
    mesh = dict.fromkeys(chosen, largest)
    for name in chosen:
        if name in ROWS:
            mesh[name] = rng.choice([each for each in range(2, largest + 1) if program.rows % each == 0] or [_that_divides(rng, program)])
        if name in {"pipeline", "model"} and len(program.live()) < 3 * mesh[name]:
            mesh[name] = 2
    return mesh


def _one_dimension(rng: random.Random, program: Program, size: int) -> dict[str, int] | Configuration:
    """Return one dimension over all ranks; a whole configuration for ``"auto"``."""
    if rng.random() < 0.05:
        return Configuration(size, "auto")
    return {rng.choice(_names(rng, program)): size}


def _names(rng: random.Random, program: Program) -> list[str]:
    """Return the dimensions that apply, with repetitions as weights."""
    features = program.features
    found = ["model", "pipeline", "pipeline"] if len(program.live()) >= 5 else ["model" if "time_first" in features else "data"]
    if "mixes" not in features and ("time_first" not in features or rng.random() < 0.3):
        found += ["data", "fsdp", "zero1", "zero2"]
    if "weights" in features:
        found += ["tensor", "tensor"]
    if "attention" in features:
        found += ["sequence", "sequence"]
    if "space" in features:
        found += ["tile", "tile"]
    return found


def _that_divides(rng: random.Random, program: Program) -> int:
    """Return a number of ranks for a batch that few numbers divide: mostly one that does, sometimes two, that compute the whole batch."""
    divisors = [each for each in range(2, 8) if program.rows % each == 0]
    return min(divisors) if divisors and rng.random() < 0.7 else 2


def _alone(rng: random.Random, features: frozenset[str]) -> Configuration | None:
    """Return a mode that cannot be combined."""
    if rng.random() < 0.05:
        return Configuration(2, "auto")
    recompute = rng.choice((None, "none", "full"))
    if "space" in features and rng.random() < 0.06:
        tiles = rng.choice((2, 3, 4, (2, 2)) if "image" in features else (2, 3, 4))
        return Configuration(1, (("tile", tiles),), recompute=recompute)
    if {"image", "space"} <= features and rng.random() < 0.04:
        height, width = rng.choice(((2, 1), (1, 2), (2, 2), (3, 1)))
        return Configuration(height * width, (("tile", (height, width)),), recompute=recompute)
    return None


def _pipeline(rng: random.Random, program: Program, mesh: dict[str, int], recompute: str | None) -> Configuration:
    rows = program.rows // math.prod(size for name, size in mesh.items() if name in ROWS)
    whole = program.features & {"mixes", "unbatched", "batchnorm", "dropout"}
    count = 1 if whole else rng.choice([each for each in (1, 2, 3, 4) if each <= rows])
    schedule = rng.choice((None, "GPipe", "1F1B", "1F1B", "ZB1P"))
    if len(program.live()) >= 5 * mesh["pipeline"] and mesh["pipeline"] == 2 and rng.random() < 0.35:
        schedule = rng.choice(TWO_STAGES)
    if schedule == "DualPipeV" and count < 2 * mesh["pipeline"]:
        schedule = "ZBV"
    if schedule == "Interleaved1F1B" and count % mesh["pipeline"]:
        schedule = "1F1B"
    mode: Any = tuple(mesh.items())
    devices = math.prod(mesh.values())
    if len(mesh) == 1 and rng.random() < 0.7:
        mode = "pipeline"
    return Configuration(devices, mode, count, schedule, recompute)
