"""Carry a plan over to another trace of the same model: in evaluation mode, if it was made in training mode, or the reverse.

    training     linear, relu, dropout | linear, add          the stage begins with the second linear of module head
    evaluation   linear, relu          | linear                by the same module, operation and count

Parameters stay where they are, so that both traces share them. Operations have other names in another trace: they are found by the module
that they compute in, what they call, and how many calls alike come before in that module.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Sequence

from passes.analysis.merge_axes import find_axes_to_cut
from passes.graph.fingerprint import target_name
from passes.graph.provenance import module_path
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Plan, Stage
from passes.spmd.shard_stages import StagedCut, StoredLayouts, StoredShards

__all__ = ["stored_as_in", "transferred_plan"]

_Key = tuple[str, str, int]
"""Module path, operation, number of equal calls before."""


def transferred_plan(plan: Plan, before: ModelGraph, after: ModelGraph, *, fixed_microbatches: bool) -> Plan:
    """Return the plan of one trace for another one. Its prediction stays that of the first trace, and a note says so.

    Args:
        before: the trace that the plan was made for.
        after: another trace of the same model, in other modes.
        fixed_microbatches: whether the user chose the number of microbatches. Otherwise it becomes 1 where microbatches would compute
            other numbers (batch normalisation in training).

    Raises:
        ConfigError: the other trace has no operation where a stage should begin.
    """
    keys, new_keys = _keys(before), _keys(after)
    names, found = [name for name, _ in keys], {key: name for name, key in new_keys}
    known = {key for _, key in keys}
    stages: list[Stage] = []
    for stage in () if plan.tiles else plan.stages:
        first = next((found[key] for _, key in keys[names.index(stage.first_node) :] if key in found), None)
        if first is None or any(first == other.first_node for other in stages):
            raise _lacks_stage(stage)
        stages.append(dataclasses.replace(stage, first_node=_with_what_is_new(first, new_keys, known)))
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
    moved = dataclasses.replace(plan, stages=tuple(stages) or plan.stages, halos=tuple(halos), n_microbatches=count)
    return moved.predicted(notes=(*plan.notes, note))


def stored_as_in(like: StagedCut, before: ModelGraph, after: ModelGraph) -> StoredLayouts:
    """Return the layouts of parameters and buffers of ``like`` by their names in another trace; its constants are replicated.

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
    return StoredLayouts(tuple(moved))


def _lacks_axis(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is sharded along an axis that it does not have in these modes",
        remedy="partition the model in these modes, and load pm.full_state_dict() into it",
    )


def _with_what_is_new(first: str, keys: Sequence[tuple[str, _Key]], known: Container[_Key]) -> str:
    """Return the first of the operations in front of ``first`` that are of its module and new: they read buffers of the module."""
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


def _lacks_stage(stage: Stage) -> ConfigError:
    return ConfigError(
        f"the stage that begins with {stage.first_node} ({', '.join(stage.modules)}) computes nothing in these modes",
        remedy="partition the model in evaluation mode, partition(model.eval(), ...), and load pm.full_state_dict() into it",
    )
