"""Carry a plan over to another trace of the same model: in evaluation mode, if it was made in training mode, or for other arguments.

    training     linear, relu, dropout | linear, add          the stage begins with the second linear of module head
    evaluation   linear, relu          | linear                by the same module, operation and count

Parameters stay where they are, so that both traces share them. Operations have other names in another trace: they are found by the module
that they compute in, what they call, and how many calls alike come before in that module. Where a stage would read parameters that its
ranks do not hold, or none is left for it to compute, stages begin where each reads its own (``stages_where_held``):

    held            embed, layers 0 and 1    |   layers 2 and 3, head
    another graph   embed, layer 0, adapter, layer 1 | layer 2, layer 3, head         the cut that sends fewest bytes
                    head of the first stage          | (nothing)                      a stage may compute nothing
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from torch import Tensor, fx

from partitioner.specialize.trace import Trace
from passes.analysis.merge_axes import find_axes_to_cut
from passes.analysis.replicable import replicable_nodes
from passes.graph.equivalence import target_name
from passes.graph.provenance import module_path, source_name
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.errors import ConfigError, first_few
from passes.ir.graph import ModelGraph
from passes.ir.mesh import pipelines
from passes.ir.plan import Plan, Stage
from passes.spmd.shard_stages import StagedCut, StoredLayouts, StoredShards
from passes.stages.split import stage_of_nodes

_Key = tuple[str, str, int]
"""Module path, operation, number of equal calls before."""

_EMPTY = 1e-6
"""Bytes that an empty stage counts as: of cuts that send as many bytes, the one with fewest empty stages is taken."""


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
    moved = dataclasses.replace(
        plan,
        stages=tuple(stages),
        halos=tuple(halos),
        n_microbatches=count,
        regions=regions,
        recomputed=tuple(_moved(plan.recomputed, dict(keys), found)),
    )
    return moved.predicted(notes=(*plan.notes, note))


def _moved(nodes: Iterable[str], keys: Mapping[str, _Key], found: Mapping[_Key, str]) -> Iterator[str]:
    """Yield the names of nodes in another trace; a node that a rewrite adds has the name that the rewrite will give there."""
    for name in nodes:
        source = source_name(name, keys)
        if source is not None and (other := found.get(keys[source])) is not None:
            yield other + name.removeprefix(source)


def _stages(plan: Plan, after: ModelGraph, firsts: Sequence[str] | None, held: Sequence[frozenset[str]]) -> tuple[Stage, ...] | None:
    """Return the stages that begin with these nodes, else with others, so that each reads what its ranks hold; None if there are none."""
    if firsts is not None and (len(firsts) == 1 or reads_where_held(after, firsts, held)):
        return tuple(dataclasses.replace(stage, first_node=first) for stage, first in zip(plan.stages, firsts, strict=True))
    return stages_where_held(after, plan.stages, held)


def _first_nodes(
    plan: Plan, keys: Sequence[tuple[str, _Key]], new_keys: Sequence[tuple[str, _Key]], found: Mapping[_Key, str]
) -> list[str] | None:
    """Return the first node of each stage in another trace; None if a stage has none, or they are in another order there.

    Args:
        keys, new_keys: of the operations of both traces.
        found: key -> operation of the other trace.
    """
    starts, known, firsts = {name: index for index, (name, _) in enumerate(keys)}, {key for _, key in keys}, list[str]()
    new_starts = {name: index for index, (name, _) in enumerate(new_keys)}
    for stage in plan.stages:
        start = starts.get(stage.first_node, len(keys))  # a stage that computes nothing begins with the output
        first = next((found[key] for _, key in keys[start:] if key in found), None)
        if first is None:
            return None
        first = _with_what_is_new(first, new_keys, known)
        if firsts and new_starts[first] <= new_starts[firsts[-1]]:
            return None
        firsts.append(first)
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
    old = {name: placeholder for placeholder, name in before.weights.items()}
    same = {placeholder: old[name] for placeholder, name in after.weights.items()}
    axes = find_axes_to_cut(after, like.mesh)
    moved: list[dict[str, StoredShards]] = []
    for cut, shards in zip(like.of_places, like.stored.of_places, strict=True):
        whole: StoredShards = (None,) * len(cut.cut.mesh.names)
        moved.append({placeholder: shards[each] for placeholder, each in same.items() if each in shards})
        for placeholder, stored in moved[-1].items():
            for shard in filter(None, stored):
                of_dimension = axes.of(placeholder)[shard.dimension]
                if shard.index_in([axes.sizes[axis] for axis in of_dimension], axes.segments_of(of_dimension)) is None:
                    raise _lacks_axis(after.weights[placeholder])
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


# -- the parameters that ranks hold --------------------------------------------------------------------------------------------------


def held_by_stage(first: Trace) -> list[list[frozenset[str]]]:
    """Return candidates for the parameters that each stage may read, strictest first: for each stage, names that its ranks hold.

    A parameter in no set may be read in any stage. In one process any rank can read a parameter that a device holds whole: the second
    candidate leaves out such parameters that the first trace does not read, the third leaves out all of them.
    """
    names, held_at = first.graph.parameters, positions_of(first, first.graph.parameters.values())
    held = [frozenset(name for name, places in held_at.items() if set(places).issuperset(stage)) for stage in first.plan.stage_ranks]
    fixed = frozenset(name for each, name in names.items() if not first.state.is_whole_here(each))
    read = frozenset(names[node.name] for node in first.graph.graph.nodes if node.name in names and node.users)
    return [held] if fixed == frozenset(held_at) else [held, [each & (read | fixed) for each in held], [each & fixed for each in held]]


def positions_of(first: Trace, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return parameter -> the pipeline positions that hold it."""
    position = {rank: place for ranks in pipelines(first.plan.grid) for place, rank in enumerate(ranks)}
    return {name: tuple(sorted({position[rank] for rank in first.state.blocks_in_processes(name)})) for name in names}


def reads_where_held(graph: ModelGraph, first_nodes: Sequence[str], held: Sequence[frozenset[str]]) -> bool:
    """Return whether each stage reads only parameters that its ranks hold.

    Args:
        held: for each stage, the names of the parameters; a name that is in none of them may be read anywhere.
    """
    known, stages = frozenset[str]().union(*held), stage_of_nodes(graph, first_nodes)
    return all(_known_parameters(graph, node, known) <= held[stages[node.name]] for node in graph.computing_nodes() if node.name in stages)


def _known_parameters(graph: ModelGraph, node: fx.Node, known: frozenset[str]) -> frozenset[str]:
    """Return the original names of the parameters that a node reads, as far as they are in ``known``."""
    return known.intersection(graph.parameters[each.name] for each in node.all_input_nodes if each.name in graph.parameters)


def stages_where_held(graph: ModelGraph, stages: Sequence[Stage], held: Sequence[frozenset[str]]) -> tuple[Stage, ...] | None:
    """Return the stages with the first nodes that they have in a graph; None if there is no such cut.

    Each parameter is read in a stage that holds it; of all such cuts the one that sends fewest bytes is taken.

    Args:
        held: see ``reads_where_held``.
    """
    nodes, known, last = graph.computing_nodes(), frozenset[str]().union(*held), len(stages) - 1
    across = _bytes_across(graph, nodes)
    best = [_EMPTY * stage for stage in range(len(stages))]  # bytes sent so far, if the present node is in a stage
    entered: list[list[int]] = []  # the stage of the node before, on the best way to a node in a stage
    for index, node in enumerate(nodes):
        read, before = _known_parameters(graph, node, known), best
        sources = [min(range(stage + 1), key=lambda source: _sent(before, source, stage, across[index])) for stage in range(len(stages))]
        if not index:
            sources = list(range(len(stages)))
        entered.append(sources)
        sent = [_sent(before, source, stage, across[index]) for stage, source in enumerate(sources)]
        best = [each if read <= names else math.inf for each, names in zip(sent, held, strict=True)]
    stage = min(range(len(stages)), key=lambda each: best[each] + _EMPTY * (last - each))
    if math.isinf(best[stage]):
        return None
    of_nodes: list[int] = []
    for sources in reversed(entered):
        of_nodes.append(stage)
        stage = sources[stage]
    return tuple(dataclasses.replace(each, first_node=_first(graph, nodes, of_nodes[::-1], index)) for index, each in enumerate(stages))


def _sent(best: Sequence[float], source: int, stage: int, across: float) -> float:
    """Return the bytes that are sent until a node in a stage, if the node before it is in the stage ``source``."""
    return best[stage] if source == stage else best[source] + across + _EMPTY * (stage - source - 1)


def _first(graph: ModelGraph, nodes: Sequence[fx.Node], stages: Sequence[int], stage: int) -> str:
    """Return the name of the first node of a stage; if it computes nothing, that of the first node after it."""
    return next((node.name for node, each in zip(nodes, stages, strict=True) if each >= stage), graph.graph.output_node().name)


def _bytes_across(graph: ModelGraph, nodes: Sequence[fx.Node]) -> list[float]:
    """Return for each node the bytes that a stage which begins with it receives from earlier ones; infinity if it would read a tuple."""
    replicable, positions = replicable_nodes(graph), {node: index for index, node in enumerate(nodes)}
    changes, within_tuples = [0] * (len(nodes) + 1), set[int]()
    for index, node in enumerate(nodes):
        value = node.meta.get("val")
        last = max((positions[user] for user in node.users if user in positions), default=index)
        if isinstance(value, tuple | list):
            within_tuples.update(range(index + 1, last + 1))
        elif node.name not in replicable and isinstance(value, Tensor):
            size = bytes_of(value, graph.batch, graph.batch_size)
            changes[index + 1] += size
            changes[last + 1] -= size
    return [math.inf if index in within_tuples else size for index, size in enumerate(itertools.accumulate(changes[:-1]))]
