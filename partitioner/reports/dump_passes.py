"""Write the graphs or programs after every phase into a folder, to find the phase that changed something.

    passes/
      phases.txt                     the order, with seconds and nodes
      01_tie_parameters.py ...       the graph after each step of normalization
      19_shard/rank_0.py             each rank's graph
      20_split/stage_0.py            the stages of the first pipeline
      21_differentiate/stage_0_forward.py, stage_0_backward.py
      24_place/rank_0.py             the program that runs

A phase that changed nothing has a line in ``phases.txt`` and no file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import fx

from cost_models.hardware.units import format_seconds
from passes.graph.program_printer import program_text
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.phase import observing_phases
from passes.ir.plan import Plan
from passes.normalize.order import ExportedGraph
from passes.pipeline import Lowered, Lowerer, Target


def dump_passes(folder: Path, trace: Callable[[], ModelGraph], plan: Plan, target: Target) -> None:
    """Trace and lower a model once more, and write the graph, or the programs, after each phase.

    Args:
        folder: created if it does not exist.
        trace: traces the model, for the batch of the target.
        plan: by which the model is lowered.
        target: the kind of programs to lower to.

    Raises:
        ConfigError: the folder cannot be written.
    """
    dump = _Dump(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with observing_phases(dump):
            Lowerer(Lowered(plan, trace())).programs(target)
        dump.write_summary()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", remedy="name a folder that you may write to") from error


class _Dump:
    """Observes phases, and writes the state after each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[tuple[str, str, float, int]] = []
        self._last: dict[str, str] = {}

    def __call__(self, phase: str, state: Any, seconds: float) -> None:
        graphs = _graphs_of(state)
        texts = {name: program_text(graph) for name, graph in graphs.items()}
        is_new = texts != self._last
        n_nodes = sum(len(graph.nodes) for graph in graphs.values())
        self._rows.append((f"{len(self._rows) + 1:02}_{phase}", "" if is_new else "no change", seconds, n_nodes))
        if is_new:
            self._write(self._rows[-1][0], texts)
            self._last = texts

    def _write(self, name: str, texts: dict[str, str]) -> None:
        """Write one file for a model, else a folder with a file for each graph."""
        if list(texts) == ["model"]:
            (self._folder / f"{name}.py").write_text(texts["model"], encoding="utf-8")
            return
        (self._folder / name).mkdir(exist_ok=True)
        for part, text in texts.items():
            (self._folder / name / f"{part}.py").write_text(text, encoding="utf-8")

    def write_summary(self) -> None:
        """Write ``phases.txt``: the phases in order, the time of each, and the number of nodes after it."""
        lines = [f"{'phase':28} {'took':>9} {'nodes':>7}"]
        lines += [f"{name:28} {format_seconds(seconds):>9} {nodes:7}  {note}".rstrip() for name, note, seconds, nodes in self._rows]
        (self._folder / "phases.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _graphs_of(state: Any) -> dict[str, fx.Graph]:
    """Return name -> graph of the latest form of a state: its programs; else its stages; else the graphs of ranks; else the model."""
    if isinstance(state, ExportedGraph):
        return {"model": state.graph}
    assert isinstance(state, Lowered)
    if state.programs:
        return {f"rank_{program.rank}": program.module.graph for _, program in state.programs}
    if state.stages:
        stages = state.stages[0, 0]
        graphs = {f"stage_{stage.index}": stage.module.graph for stage in stages.stages}
        for index, training in enumerate(stages.training):
            names = ("gathers", "forward", "backward", "scatters")
            modules = {name: getattr(training, name) for name in names}
            graphs |= {f"stage_{index}_{name}": module.graph for name, module in modules.items() if module is not None}
        return graphs
    if state.cut is not None:
        return {
            f"rank_{rank}": part.graph
            for ranks, parts in zip(state.pipelines, state.parts, strict=True)
            for rank, part in zip(ranks, parts, strict=True)
        }
    return {"model": state.graph.graph}
