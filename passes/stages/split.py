"""Cut the model's graph into one graph a stage.

Before (one graph, cut before ``relu``; ``position`` is replicable):

    x, weight_0, weight_1 -> linear -> position -> add -> | relu -> add_1(position) -> linear_1 -> out

After:

    stage 0   (weight_0, batch, x)      -> linear, position, add               -> (add,)
    stage 1   (weight_1, batch, add)    -> relu, position, add_1, linear_1     -> (linear_1,)

A replicable node (see ``passes.analysis.replicable``) is computed again in every stage that reads it. Everything else that a later stage
reads is an output of its stage and an input of the reader, however far apart the two are.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, fx

from passes.analysis.replicable import replicable_nodes
from passes.graph.aliasing import Aliasing, aliasing
from passes.graph.buffer_writes import verify_writes
from passes.graph.lazy_graph_module import LazyGraphModule
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.plan import Region
from passes.normalize.randomness.draw_order import draw_in_rows, draws, laid_out_anew

aten = torch.ops.aten

T = TypeVar("T")


@dataclass(frozen=True)
class StageGraph:
    """One stage as a graph of its own. Its placeholders, in order.

        bound:      parameters... buffers... constants...
        arguments:  [batch] model inputs... values of earlier stages...

    Names are those of the model's graph.

    Attributes:
        index: position in the pipeline.
        module: the graph; its output is the tuple of ``outputs``.
        parameters, buffers, constants: placeholders that stay with the stage.
        model_inputs: inputs of the model that the stage reads.
        values: values of earlier stages that it reads.
        outputs: values that later stages read or the model returns.
        has_batch: whether the size of the microbatch is an argument.
        device: on which its graph creates tensors.
        regions: computing node -> the number of the region that it is recomputed with, of which joined ones share one (``Plan.regions``).
            Replicable nodes, and all nodes of a plan without regions, are in none.
        policies: the same nodes -> the policy of their region, one of ``RECOMPUTE``.
        recomputed: where the policy is ``"selective"``, the nodes of the model whose values the backward recomputes (``Plan.recomputed``).
        gathers: bound -> (parameters that the graph takes gathered, after the bound ones...) (``passes.emit.once_a_step``); None: none.
    """

    index: int
    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    model_inputs: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[str, ...]
    has_batch: bool
    device: torch.device
    regions: Mapping[str, int] = field(default_factory=dict)
    policies: Mapping[str, str] = field(default_factory=dict)
    recomputed: frozenset[str] = frozenset()
    gathers: fx.GraphModule | None = None

    @property
    def calls(self) -> dict[str, str]:
        """Computing node -> the node of the model's graph that it is emitted for: itself, where ranks compute it as the model does."""
        return {node.name: node.meta.get("written_for") or node.name for node in self.module.graph.nodes if node.op == "call_function"}

    @property
    def bound(self) -> tuple[str, ...]:
        """Placeholders that stay the same from step to step."""
        return self.parameters + self.buffers + self.constants

    @property
    def arguments(self) -> tuple[str, ...]:
        """Placeholders that differ from microbatch to microbatch."""
        return (("batch",) if self.has_batch else ()) + self.model_inputs + self.values


def stage_of_nodes(graph: ModelGraph, first_nodes: Sequence[str]) -> dict[str, int]:
    """Return the stage of every computing node that is not replicable.

    Args:
        graph: a model, or a rank's graph of it (``passes.spmd.localize``): there a stage begins with the first node that was emitted for
            its first node (``written_for``).
        first_nodes: for each stage, the name of its first node, in graph order; that of stage 0 is ignored. A stage that computes nothing
            begins with the first node of the next; after the last node, with the output.

    Raises:
        ConfigError: a name is no computing node, or the names are out of order.
    """
    position = _positions(graph)
    starts = []
    for name in first_nodes[1:]:
        if name not in position:
            raise ConfigError(f"the plan starts a stage at {name!r}, which is no node of this graph", remedy="make the plan again")
        starts.append(position[name])
    if starts != sorted(starts):
        raise ConfigError("the plan's stages are not in the order of the graph", remedy="make the plan again")
    return _numbered(graph, starts)


def _number_regions(graph: ModelGraph, regions: Sequence[Region]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the number and the policy of the region of every computing node that is not replicable.

    Nodes before all regions are in the first. A region whose first node is absent is part of the one before it.
    """
    position = _positions(graph)
    present = sorted((region for region in regions if region.first_node in position), key=lambda region: position[region.first_node])
    if not present:
        return {}, {}
    numbers = list(accumulate(int(not region.is_joined) for region in present))
    run_of = _numbered(graph, [position[region.first_node] for region in present[1:]])
    return {name: numbers[run] for name, run in run_of.items()}, {name: present[run].recompute for name, run in run_of.items()}


def _positions(graph: ModelGraph) -> dict[str, int]:
    """Return the position of each node among those that compute; of a node of the model, that of the first node emitted for it."""
    nodes = graph.computing_nodes()
    position = {graph.graph.output_node().name: len(nodes), **{node.name: index for index, node in enumerate(nodes)}}
    for index, node in reversed(list(enumerate(nodes))):
        if "written_for" in node.meta:  # the earliest node wins, also over a node that has the name itself
            position[node.meta["written_for"]] = index
    return position


def _numbered(graph: ModelGraph, starts: Sequence[int]) -> dict[str, int]:
    """Return for each computing node that is not replicable the number of positions in ``starts`` up to its own."""
    replicable = replicable_nodes(graph)
    nodes = enumerate(graph.computing_nodes())
    return {node.name: bisect.bisect_right(starts, index) for index, node in nodes if node.name not in replicable}


def split_stages(
    graph: ModelGraph,
    first_nodes: Sequence[str],
    devices: Sequence[torch.device],
    regions: Sequence[Region] = (),
    recomputed: Collection[str] = (),
) -> tuple[StageGraph, ...]:
    """Cut the graph before the named nodes.

    Args:
        first_nodes: for each stage, the name of its first node.
        devices: for each stage, the device that its graph creates tensors on.
        regions: of recomputation.
        recomputed: the nodes that the backward recomputes where the policy is ``"selective"``.
    """
    stages, (region_of, policy_of) = stage_of_nodes(graph, first_nodes), _number_regions(graph, regions)
    last = len(first_nodes) - 1
    memory = aliasing(graph.graph)
    with_new_strides = _values_with_new_strides(graph, stages) if draws(graph.graph) else frozenset()
    indices = range(len(first_nodes))
    cut = [_stage_graph(graph, memory, stages, index, index == last, devices[index], with_new_strides) for index in indices]
    return tuple(
        replace(
            stage,
            regions=_within(stage, region_of),
            policies=_within(stage, policy_of),
            recomputed=frozenset(recomputed).intersection(stage.calls.values()),
        )
        for stage in cut
    )


def _within(stage: StageGraph, of_nodes: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of the nodes that a stage computes."""
    return {node.name: of_nodes[node.name] for node in stage.module.graph.nodes if node.op == "call_function" and node.name in of_nodes}


def read_by_one_stage(graph: ModelGraph) -> frozenset[str]:
    """Return the placeholders that a stage of the whole graph reads; unread replicable nodes are not computed."""
    needed = _needed_nodes(graph, stage_of_nodes(graph, [""]), 0, graph.returned)
    return frozenset(name for name in _read(needed, graph.returned) if name not in {node.name for node in needed})


def _stage_graph(
    graph: ModelGraph,
    memory: Aliasing,
    stages: Mapping[str, int],
    index: int,
    is_last: bool,
    device: torch.device,
    with_new_strides: Collection[str],
) -> StageGraph:
    """Return stage ``index`` of the model; ``stages`` is that of ``stage_of_nodes``."""
    outputs = _outputs(graph, stages, index, is_last)
    needed = _needed_nodes(graph, stages, index, outputs)
    names = {node.name for node in needed}
    read = _read(needed, outputs)
    placeholders = {node.name for node in graph.graph.nodes if node.op == "placeholder"}

    def reads(candidates: Mapping[str, object]) -> tuple[str, ...]:
        return tuple(name for name in candidates if name in read)

    model_inputs = tuple(leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None and leaf.placeholder in read)
    values = tuple(node.name for node in graph.computing_nodes() if node.name in read and node.name not in names)
    stage = StageGraph(
        index=index,
        module=LazyGraphModule({}, fx.Graph()),
        parameters=reads(graph.parameters),
        buffers=reads(graph.buffers),
        constants=reads(graph.constants),
        model_inputs=model_inputs,
        values=values,
        outputs=outputs,
        has_batch="batch" in placeholders,
        device=device,
    )
    module = _copy(graph, memory, stage, needed, with_new_strides)
    return replace(stage, module=module)


def _read(needed: Sequence[fx.Node], outputs: Sequence[str]) -> set[str]:
    """Return the names of the values that the nodes of a stage and its outputs read."""
    return {argument.name for node in needed for argument in node.all_input_nodes} | set(outputs)


def _outputs(graph: ModelGraph, stages: Mapping[str, int], index: int, is_last: bool) -> tuple[str, ...]:
    """Return the values of a stage that later stages read or the model returns; the last stage also returns replicable results."""
    returned = {output.node for output in graph.outputs if output.node is not None}
    outputs = []
    for node in graph.graph.nodes:
        if node.name in stages:
            is_output = stages[node.name] == index and (node.name in returned or is_read_later(node, stages, index, output=index))
        else:
            is_output = is_last and node.name in returned
        outputs += [node.name] if is_output else []
    return tuple(outputs)


def is_read_later(node: fx.Node, stages: Mapping[str, int], stage: int, *, output: int) -> bool:
    """Return whether a stage after ``stage`` reads a value, directly or through replicable nodes (which are computed where they are read).

    Args:
        output: the stage that counts as the reader of the model's results.
    """
    for user in node.users:
        reader = output if user.op == "output" else stages.get(user.name)
        if is_read_later(user, stages, stage, output=output) if reader is None else reader > stage:
            return True
    return False


def _needed_nodes(graph: ModelGraph, stages: Mapping[str, int], index: int, outputs: Sequence[str]) -> list[fx.Node]:
    """Return the nodes that a stage computes: its own, and the replicable ones that these or its outputs depend on."""
    needed = {node for node in graph.graph.nodes if stages.get(node.name) == index}
    replicable = [node for node in graph.computing_nodes() if node.name not in stages]
    wanted = {argument for node in needed for argument in node.all_input_nodes}
    wanted |= {node for node in replicable if node.name in outputs}
    for node in reversed(replicable):
        if node in wanted:
            needed.add(node)
            wanted.update(node.all_input_nodes)
    return [node for node in graph.computing_nodes() if node in needed]


def _copy(
    graph: ModelGraph, memory: Aliasing, stage: StageGraph, needed: Sequence[fx.Node], with_new_strides: Collection[str]
) -> fx.GraphModule:
    """Copy the needed nodes into a graph with the placeholders and outputs of a stage."""
    nodes = {node.name: node for node in graph.graph.nodes}
    target = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for name in stage.bound + stage.arguments:
        placeholder = target.placeholder(name)
        placeholder.meta = dict(nodes[name].meta)
        copies[nodes[name]] = placeholder
    for node in needed:
        copies[node] = target.node_copy(node, lambda argument: copies[argument])
        _set_device(copies[node], stage.device)
        if not memory.written(node):
            _allow_any_layout(node, copies[node], stage)
    draw_in_rows(target, with_new_strides)
    target.output(tuple(copies[nodes[name]] for name in stage.outputs))
    target.lint()
    verify_writes(target, "cutting stages", owns_memory=True)
    module = LazyGraphModule({}, target, class_name=f"Stage{stage.index}")
    module.meta.update(graph.module.meta)
    return module


def _allow_any_layout(node: fx.Node, copy: fx.Node, stage: StageGraph) -> None:
    """Replace ``view`` by ``reshape``: values from other stages are dense, and need not have the strides that a view relies on."""
    if copy.target is aten.view.default:
        copy.target = aten.reshape.default
    elif copy.target is aten.as_strided.default and stage.values:
        raise ConfigError(
            f"{node.name} depends on the strides of a value received from another stage, which are not preserved",
            remedy="cut elsewhere (Constraints.split_spec), or write it with reshape, transpose and indexing",
        )


def _values_with_new_strides(graph: ModelGraph, stages: Mapping[str, int]) -> frozenset[str]:
    """Return the values that depend on non-contiguous inputs, or on non-contiguous values of other stages: a stage gets these dense."""

    def reads_dense_copy(node: fx.Node) -> bool:
        if node.op == "placeholder":
            return not _is_contiguous(node)
        own_stage = stages.get(node.name)
        crossing = [source for source in node.all_input_nodes if source.op != "placeholder" and stages.get(source.name) != own_stage]
        return not all(map(_is_contiguous, crossing))

    return frozenset(node.name for node in laid_out_anew(graph.graph, reads_dense_copy))


def _is_contiguous(node: fx.Node) -> bool:
    """Return whether a value is contiguous; True if it is no strided tensor."""
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.layout != torch.strided or value.is_contiguous()


def _set_device(node: fx.Node, device: torch.device) -> None:
    """Replace the device among a node's arguments, if there is one."""
    node.args = tuple(device if isinstance(argument, torch.device) else argument for argument in node.args)
    if isinstance(node.kwargs.get("device"), torch.device):
        node.kwargs = {**node.kwargs, "device": device}
