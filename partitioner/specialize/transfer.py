"""Carry a plan over to another trace of the same model: in evaluation mode, if it was made in training mode, or for other arguments.

    training     linear, relu, dropout | linear, add          the stage begins with the second linear of module head
    evaluation   linear, relu          | linear                by the same module, operation and count

Parameters stay where they are, so that both traces share them. Operations have other names in another trace: they are found by the module
that they compute in, what they call, and how many calls alike come before in that module. Where a stage would read parameters that its
ranks do not hold, or none is left for it to compute, stages begin where each reads its own (``stage_starts``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Mapping, Sequence

from partitioner.specialize.stage_starts import reads_where_held, stages_where_held
from passes.analysis.merge_axes import find_axes_to_cut
from passes.graph.equivalence import target_name
from passes.graph.provenance import module_path
from passes.ir.errors import ConfigError, first_few
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan, Stage
from passes.spmd.shard_stages import StagedCut, StoredLayouts, StoredShards

__all__ = ["stored_as_in", "transferred_plan"]

_Key = tuple[str, str, int]
"""Module path, operation, number of equal calls before."""


def transferred_plan(
    plan: Plan, before: ModelGraph, after: ModelGraph, held: Sequence[Sequence[frozenset[str]]], *, fixed_microbatches: bool
) -> Plan:
    """Return the plan of one trace for another one. Its prediction stays that of the first trace, and a note says so.

    Args:
        before: the trace that the plan was made for.
        after: another trace of the same model, in other modes or for other arguments.
        held: for each stage, the names of the parameters that it may read; a name that is in none may be read anywhere. Of several such
            sequences the first that fits is kept to.
        fixed_microbatches: whether the user chose the number of microbatches. Otherwise it becomes 1 where microbatches would compute
            other numbers (batch normalisation in training).

    Raises:
        ConfigError: ranks of one stage would have to read parameters that those of another one hold.
    """
    keys, new_keys = _keys(before), _keys(after)
    names, found = [name for name, _ in keys], {key: name for name, key in new_keys}
    stages: Sequence[Stage] | None = plan.stages
    if not plan.tiles:
        firsts = _first_nodes(plan, keys, new_keys, found)
        stages = next(filter(None, (_stages(plan, after, firsts, each) for each in held)), None)
    if stages is None:
        raise _held_elsewhere(plan, after, held[0])
    halos = []
    for run in plan.halos:
        inside = [found[key] for _, key in keys[names.index(run.first) : names.index(run.last) + 1] if key in found]
        if inside:
            halos.append(dataclasses.replace(run, first=inside[0], last=inside[-1]))
    count = plan.n_microbatches
    mixes = after.batch is None or bool(after.mixed) or (plan.batchnorm == "sync" and bool(after.mixing))
    if mixes and not fixed_microbatches:
        count = 1
    mode = "training" if before.training else "evaluation"
    note = f"The plan is that of {mode}, carried over to the same weights in other modes; its predictions are those of {mode}."
    by_name = {region.first_node: region for region in plan.regions}
    moves = ((by_name[name], found.get(key)) for name, key in keys if name in by_name)
    regions = tuple(dataclasses.replace(region, first_node=name) for region, name in moves if name is not None)
    moved = dataclasses.replace(plan, stages=tuple(stages), halos=tuple(halos), n_microbatches=count, regions=regions)
    return moved.predicted(notes=(*plan.notes, note))


def _stages(plan: Plan, after: ModelGraph, firsts: Sequence[str] | None, held: Sequence[frozenset[str]]) -> tuple[Stage, ...] | None:
    """Return the stages that begin with these nodes, else with others, so that each reads what its ranks hold; None if there are none."""
    if firsts is not None and (len(firsts) == 1 or reads_where_held(after, firsts, held)):
        return tuple(dataclasses.replace(stage, first_node=first) for stage, first in zip(plan.stages, firsts, strict=True))
    return stages_where_held(after, plan.stages, held)


def _first_nodes(
    plan: Plan, keys: Sequence[tuple[str, _Key]], new_keys: Sequence[tuple[str, _Key]], found: Mapping[_Key, str]
) -> list[str] | None:
    """Return the first node of each stage in another trace; None if a stage has none.

    Args:
        keys, new_keys: of the operations of both traces.
        found: key -> operation of the other trace.
    """
    names, known, firsts = [name for name, _ in keys], {key for _, key in keys}, list[str]()
    for stage in plan.stages:
        first = next((found[key] for _, key in keys[names.index(stage.first_node) :] if key in found), None)
        if first is None or first in firsts:
            return None
        firsts.append(_with_what_is_new(first, new_keys, known))
    return firsts


def stored_as_in(
    like: StagedCut, before: ModelGraph, after: ModelGraph, holders: Mapping[str, tuple[int, ...]] | None = None
) -> StoredLayouts:
    """Return the layouts of parameters and buffers of ``like`` by their names in another trace; its constants are replicated.

    Args:
        holders: name of a parameter -> the pipeline positions that hold it.

    Raises:
        ConfigError: a sharded parameter has other axes in the other trace.
    """
    old = {name: placeholder for placeholder, name in (*before.parameters.items(), *before.buffers.items())}
    same = {placeholder: old[name] for placeholder, name in (*after.parameters.items(), *after.buffers.items())}
    axes = find_axes_to_cut(after, like.mesh)
    moved: list[dict[str, StoredShards]] = []
    for cut, shards in zip(like.of_places, like.stored.of_places, strict=True):
        whole: StoredShards = (None,) * len(cut.cut.mesh.names)
        moved.append({placeholder: shards[each] for placeholder, each in same.items() if each in shards})
        for placeholder, stored in moved[-1].items():
            for shard in filter(None, stored):
                if shard.index_in([axes.sizes[axis] for axis in axes.of(placeholder)[shard.dimension]]) is None:
                    raise _lacks_axis({**after.parameters, **after.buffers}[placeholder])
        moved[-1].update(dict.fromkeys(after.constants, whole))
    known = {placeholder: holders[name] for placeholder, name in after.parameters.items() if holders and name in holders}
    return StoredLayouts(tuple(moved), known)


def _lacks_axis(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is sharded along an axis that it does not have in this call",
        remedy="partition the model with an example like this call, in these modes, and load pm.full_state_dict() into it",
    )


def _with_what_is_new(first: str, keys: Sequence[tuple[str, _Key]], known: Container[_Key]) -> str:
    """Return the first of the operations before ``first`` that are of its module and new: they read buffers of the module."""
    index = [name for name, _ in keys].index(first)
    module = keys[index][1][0]
    while index > 0 and keys[index - 1][1] not in known and keys[index - 1][1][0] == module:
        index -= 1
    return keys[index][0]


def _keys(graph: ModelGraph) -> Sequence[tuple[str, _Key]]:
    """Return name and key of every operation, in order."""
    seen: Counter[tuple[str, str]] = Counter()
    keys = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            place = module_path(node), target_name(node)
            keys.append((node.name, (*place, seen[place])))
            seen[place] += 1
    return keys


def _held_elsewhere(plan: Plan, after: ModelGraph, held: Sequence[frozenset[str]]) -> ConfigError:
    """Return the error of a trace that reads parameters in another order than that of the stages whose ranks hold them."""
    highest, names = 0, list[str]()
    for node in after.computing_nodes():
        for name in (after.parameters[each.name] for each in node.all_input_nodes if each.name in after.parameters):
            stages = [index for index, each in enumerate(held) if name in each]
            names += [name] if stages and max(stages) < highest else []
            highest = max(highest, min(stages, default=0))
    return ConfigError(
        f"the call reads {first_few(list(dict.fromkeys(names)))} after parameters of later stages of the {len(plan.stages)}, and each rank "
        "holds its part of the model since it was partitioned",
        remedy="partition the model with an example that reads them all, partition(model, ..., example_inputs=..., example_kwargs=...), "
        "and load pm.full_state_dict() into it",
    )
