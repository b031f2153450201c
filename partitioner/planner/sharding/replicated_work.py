"""Find the contractions that every rank of a mesh dimension computes whole.

    rows    [batch/data]   --- gathered for sort --->  sorted  [batch]  --->  linear 0, linear 1: whole on every rank

Tensor and sequence dimensions replicate contractions whose axes are too short, or not worth a message. Dimensions that shard the batch
replicate those that read the result of an operation that mixes rows, or that has no rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping

from torch import fx

from partitioner.options.constraints import TENSOR
from partitioner.planner.sharding.axis_costs import contractions_of
from partitioner.planner.sharding.mesh_cut import MeshCut
from passes.graph.provenance import module_path
from passes.ir.errors import PartitionWarning, first_few, level_of_caller
from passes.ir.graph import ModelGraph
from passes.ir.layout import Shard
from passes.ir.mesh import ROWS, SEQUENCE
from passes.ir.plan import Plan

_WORTH_SAYING = 0.01
"""Fraction of the work from which it is noted."""

_MOST = 0.5
"""Fraction from which a request to shard the batch is warned of: any number of ranks is less than twice as fast as one device."""

_GAINS_LITTLE = "Sharding the batch gains little."

_REMEDY = "compute each row of the batch by itself there, describe an operation of your own by register_rule, or choose another mode"


def replicated_work(cut: MeshCut) -> Iterator[str]:
    """Yield a note for each mesh dimension of weights, of the sequence or of rows that replicates contractions."""
    source = cut.part.source
    counted = contractions_of(cut.axes, source.graph.batch_size)
    multiply_adds = {name: number * len(source.copies(name)) for name, number in counted.items()}
    nodes = {node.name: node for node in source.graph.graph.nodes}
    of_inputs = _of_inputs(source.graph)
    for index, dimension in enumerate(cut.part.cutting.names):
        replicated = [name for name in multiply_adds if cut.layouts.cuts[name][index] is None]
        gathering: tuple[str, ...] = ()
        if dimension in ROWS:
            gathering = _gathering(cut, index)
            # Data parallelism replicates calls that depend on weights alone, whatever the operations are.
            replicated = [name for name in replicated if gathering and name in of_inputs]
        elif dimension not in (TENSOR, SEQUENCE):
            continue
        share = sum(multiply_adds[name] for name in replicated) / max(sum(multiply_adds.values()), 1.0)
        if share >= _WORTH_SAYING:
            note = f"Every rank of {dimension} computes {share:.0%} of the multiply-adds whole: {_modules(nodes, replicated)}."
            yield f"{note} {_cause(nodes, gathering, share)}" if gathering else note


def _gathering(cut: MeshCut, index: int) -> tuple[str, ...]:
    """Return the calls that no loop of a mesh dimension cuts, and that gather an operand that is sharded over it."""
    needs, results = cut.layouts.needs, cut.layouts.results
    return tuple(
        name
        for name, cuts in cut.layouts.cuts.items()
        if cuts[index] is None
        and any(
            isinstance(results[operand.name][0][index], Shard) and not isinstance(need[index], Shard)
            for operand, need in zip(cut.axes.operands[name], needs[name], strict=True)
            if operand.name not in cut.layouts.stored
        )
    )


def _of_inputs(graph: ModelGraph) -> set[str]:
    """Return the inputs of a model, and the calls that depend on them."""
    found = {leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None}
    for node in graph.graph.nodes:
        if any(source.name in found for source in node.all_input_nodes):
            found.add(node.name)
    return found


def _cause(nodes: Mapping[str, fx.Node], gathering: Collection[str], share: float) -> str:
    operations = dict.fromkeys(f"{nodes[name].target} ({module_path(nodes[name]) or 'the model itself'})" for name in gathering)
    cause = f"The rows of all ranks are gathered for {first_few(list(operations))}."
    return f"{cause} {_GAINS_LITTLE}" if share >= _MOST else cause


def _modules(nodes: Mapping[str, fx.Node], names: Collection[str]) -> str:
    return first_few(list(dict.fromkeys(module_path(nodes[name]) or name for name in names)))


def warn_of_replicated_work(plan: Plan) -> None:
    """Emit one PartitionWarning, at the line that called ``partition``, if ranks that share the batch do most of the work of one device."""
    notes = [note for note in plan.notes if note.endswith(_GAINS_LITTLE)]
    if notes:
        warnings.warn("\n".join([*notes, f"  remedy: {_REMEDY}"]), PartitionWarning, stacklevel=level_of_caller())
