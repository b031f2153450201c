"""Place the programs of one pipeline on a mesh of several.

The programs of a pipeline number its ranks from 0, and do not communicate with other pipelines. Here

- sends, receives and all_reduces of tied weights are addressed to the ranks of the mesh;
- stages that communicate are inlined, their mesh dimensions replaced by groups of ranks (``passes.emit.inline_stages``);
- gradients of parameters are reduced over pipelines that use them on their own rows, or for their own part of the work;
- the loss of a rank's rows is reduced over the ranks of the other rows;
- results that are sharded by rows are gathered.

                 tensor 0          tensor 1
    stage 0      rank 0   ══════   rank 1        ══ collectives
                   │                 │            │ send, receive
    stage 1      rank 2   ══════   rank 3

Between per-stage submeshes of different shape, values are replicated: one rank of the larger submesh sends to the smaller one, which sends
gradients back to all ranks of the larger.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx

from passes.emit.coalesce_collectives import ALONE_BYTES, coalesce_collectives
from passes.emit.gradient_buckets import gradient_buckets
from passes.emit.inline_stages import Inline, inline_stages
from passes.emit.overlap_collectives import overlap_communication
from passes.graph.program_printer import ProgramModule
from passes.graph.symbolic_sizes import bytes_of
from passes.ir.comm.primitives import all_gather, all_reduce, receive, send, wait
from passes.ir.comm.unsummed import AddUnsummed
from passes.ir.graph import ModelGraph
from passes.ir.mesh import STAGES, STORED, WIDTH, Mesh, receivers
from passes.ir.program import Program, StoreGradients

Gradients = Literal["sum", "keep", "add"]
"""Handling of gradients of ranks with their own rows: sum them; keep each rank's part for a later step; sum
them together with the parts that were kept (``passes.ir.comm.unsummed``)."""


def place_on_mesh(
    program: Program,
    graph: ModelGraph,
    mesh: Mesh,
    pipeline: Sequence[int],
    gradients: Gradients = "sum",
    results: Literal["global", "local"] = "global",
    *,
    inline: Inline = "all",
) -> Program:
    """Place one rank's program on the mesh; ``arrange_collectives`` follows.

    Args:
        program: as written for its pipeline alone.
        graph: what the pipeline computes.
        mesh: of all ranks.
        pipeline: for each rank of the pipeline, the rank of the mesh.
        gradients: whether those of parameters are summed.
        results: whether row-sharded ones are gathered, or stay on the ranks that have the rows.
        inline: which calls of stages that communicate are inlined.
    """
    writer = _Writer(program, graph, mesh, pipeline)
    writer.address()
    writer.sum_totals()
    writer.sum_gradients(gradients)
    writer.sum_loss()
    if results == "global":
        writer.gather_rows()
    program.module.graph.lint()
    assert isinstance(program.module, ProgramModule)
    rank = pipeline[program.rank]
    module = inline_stages(program.module, mesh, rank, inline)
    # Every graph module has a class of its own, which its text is named after: until here, after the rank of the pipeline.
    type(module).__name__ = re.sub(r"^Rank\d+", f"Rank{rank}", type(module).__name__)
    return replace(program, rank=rank, module=module)


def arrange_collectives(placed: Iterable[tuple[int, Program]]) -> None:
    """Coalesce and overlap the collectives that programs of several pipelines start together, in place: alike on all ranks that do.

    Args:
        placed: programs on a mesh, each after the rank of its pipeline.
    """
    together: dict[int, list[fx.Graph]] = {}
    for place, program in placed:
        together.setdefault(place, []).append(program.module.graph)
    for graphs in together.values():
        coalesce_collectives(graphs)
        overlap_communication(graphs)


class _Writer:
    """Rewrites one program in place."""

    def __init__(self, program: Program, graph: ModelGraph, mesh: Mesh, pipeline: Sequence[int]) -> None:
        self.program = program
        self.graph = graph
        self.part = graph.part
        self.mesh = mesh
        self.pipeline = pipeline
        self.rank = pipeline[program.rank]
        self.nodes: fx.Graph = program.module.graph
        self.fakes = {node.name: node.meta.get("val") for node in graph.graph.nodes}

    def address(self) -> None:
        """Replace ranks of the pipeline by ranks of the mesh; reduce a tied weight over the other pipelines in the same all_reduce."""
        for node in list(self.nodes.nodes):
            if node.target is receive:
                node.update_kwarg("source", self.pipeline[node.kwargs["source"]])
            if node.target is send:
                self._send(node)
            if node.target is all_reduce and self.mesh.widths and not set(node.meta["reduces"]) & self.graph.parameters.keys():
                self._sum_over_stages(node)
            elif node.target is all_reduce:
                over = {self.part.reduced.get(name, ()) for name in node.meta.get("reduces", ())}
                assert len(over) == 1, "tied weights that are summed together are used alike"
                (names,) = over
                ranks = {rank for member in node.kwargs["group"] for rank in self.mesh.group(self.pipeline[member], names)}
                node.update_kwarg("group", tuple(sorted(ranks)))

    def _send(self, node: fx.Node) -> None:
        """Address a send to the ranks of the mesh that receive from this one: several for a larger submesh, at most one for a smaller."""
        place = node.kwargs["destination"]
        assert isinstance(place, int)
        if not self.mesh.widths:
            node.update_kwarg("destination", self.pipeline[place])
            return
        for rank in receivers(self.mesh, self.rank, self.program.rank, place):
            with self.nodes.inserting_before(node):  # named by its rank when it is emitted
                copy = self.nodes.create_node("call_function", send, node.args, {**node.kwargs, "destination": rank}, name=node.name)
            copy.meta = dict(node.meta)
        self.nodes.erase_node(node)

    def _sum_over_stages(self, node: fx.Node) -> None:
        """Reduce the loss or an input's gradient over stages; of ranks with equal copies, all but the first contribute zeros."""
        along = next(name for name in self.mesh.names if name in STAGES)
        node.update_kwarg("group", self.mesh.group(self.rank, (along, WIDTH)))
        if self.mesh.coordinate(self.rank)[WIDTH]:
            (own,) = node.all_input_nodes
            with self.nodes.inserting_before(node):
                zeros = self._call(node, torch.zeros_like, (own,), f"{own.name}_of_the_first")
            node.args = ([zeros],)

    # -- gradients of parameters ---------------------------------------------------------------------------------------------------

    def sum_gradients(self, mode: Gradients) -> None:
        """Write the reductions of gradients over pipelines, before each call that stores them."""
        for node in list(self.nodes.nodes):
            if node.op != "call_module":
                continue
            store = self.program.module.get_submodule(node.target)
            if isinstance(store, StoreGradients) and not node.meta.get("is_summed"):
                if mode == "keep":
                    over = {name: self.part.reduced.get(name or "", ()) for name in store.names if name is not None}
                    store.unsummed = {name: self.mesh.group(self.rank, names) for name, names in over.items() if names}
                    continue
                if mode == "add":
                    self._add_unsummed(node, store)
                self._sum(node, store)

    def _add_unsummed(self, node: fx.Node, store: StoreGradients) -> None:
        """Add the gradients kept by earlier steps, before they are reduced."""
        name = f"{node.target}_unsummed"
        self.program.module.add_module(name, AddUnsummed([each if self.part.reduced.get(each or "") else None for each in store.names]))
        with self.nodes.inserting_before(node):
            added = self.nodes.create_node("call_module", name, (node.args[0],), {}, name=name)
        added.meta["section"] = node.meta.get("section", "gradients of parameters")
        node.args = (added,)

    def _sum(self, node: fx.Node, store: StoreGradients) -> None:
        gradients = node.args[0]
        places: dict[tuple[str, ...], list[int]] = {}
        for index, name in enumerate(store.names):
            names = self.part.reduced.get(name or "", ())
            if names:
                places.setdefault(names, []).append(index)
        if not places:
            return
        with self.nodes.inserting_before(node):
            parts: list[Any] = [
                self._call(node, operator.getitem, (gradients, index), f"{node.target}_{index}") for index in range(len(store.names))
            ]
            for names, indices in places.items():
                ranks = self.mesh.group(self.rank, names)
                for bucket in self._buckets(store, indices, are_scattered=not any(name in STORED for name in names)):
                    label = f"{node.target}_{bucket[0]}"
                    started = self._call(node, all_reduce, ([parts[index] for index in bucket],), f"all_reduce_{label}", group=ranks)
                    started.meta["reduces"] = tuple(store.names[index] for index in bucket)
                    started.meta["bytes"] = sum(self._bytes(store.names[index]) for index in bucket)
                    summed = self._call(node, wait, (started,), f"wait_all_reduce_{label}")
                    for position, index in enumerate(bucket):
                        parts[index] = self._call(node, operator.getitem, (summed, position), f"summed_{node.target}_{index}")
        node.args = (parts,)

    def _buckets(self, store: StoreGradients, indices: Sequence[int], *, are_scattered: bool) -> list[list[int]]:
        """Group gradients into messages; last those that are there last, as they were scattered in one message at the end."""
        parts = math.prod(size for name, size in self.mesh.dimensions if name in STORED) if are_scattered else 1
        sizes = {index: self._bytes(store.names[index]) for index in indices}
        is_late = {index: parts > 1 and size * parts < ALONE_BYTES for index, size in sizes.items()}
        found: list[list[int]] = []
        for group in ([index for index in indices if is_late[index] is late] for late in (False, True)):
            buckets = gradient_buckets([sizes[index] for index in group]) if group else []
            found += [[group[place] for place in bucket] for bucket in buckets]
        return found

    def _bytes(self, name: str | None) -> int:
        value = self.fakes[name or ""]
        return int(value.numel()) * int(value.dtype.itemsize)

    # -- loss and results ----------------------------------------------------------------------------------------------------------

    def sum_totals(self) -> None:
        """Reduce counts over a rank's rows (``passes.spmd.mean_to_sum``) to counts over the batch."""
        if self.part.n_row_parts == 1:
            return
        names = {total.placeholder for total in self.graph.totals}
        for node in list(self.nodes.nodes):
            if node.op == "call_module" and node.name in names:
                self._sum_value(node, f"all_reduce_{node.name}", f"{node.name}_of_all_rows")

    def _sum_value(self, node: fx.Node, start: str, name: str) -> None:
        """Replace a value by its all_reduce over the ranks that shard the batch."""
        users = list(node.users)
        with self.nodes.inserting_after(node):
            started = self._call(node, all_reduce, ([node],), start, group=self.mesh.group(self.rank, self.part.rows))
        started.meta["bytes"] = self._bytes_of_number(node)
        started.meta["reduces"] = (node.name,)
        with self.nodes.inserting_after(started):
            summed = self._call(node, wait, (started,), f"wait_{start}")
        with self.nodes.inserting_after(summed):
            result = self._call(node, operator.getitem, (summed, 0), name)
        for user in users:
            user.replace_input_with(node, result)

    def _bytes_of_number(self, node: fx.Node) -> int:
        """Return the bytes of a scalar: the loss, or a count that the model divides by."""
        dtype = node.meta["dtype"] if "dtype" in node.meta else node.meta["val"].dtype
        return int(dtype.itemsize)

    def sum_loss(self) -> None:
        """Reduce the loss of a rank's rows to that of the batch."""
        if self.part.n_row_parts == 1 or self.program.kind != "train_step" or self.part.results != "loss":
            return
        for node in list(self.nodes.nodes):
            if node.name == "loss_of_batch":
                self._sum_value(node, "all_reduce_loss", "loss_of_all_rows")

    def gather_rows(self) -> None:
        """Gather the results of a forward, and gradients of inputs, which are sharded by rows, on every rank."""
        if self.part.n_row_parts == 1:
            return
        by_rows = self.part.results != "whole"
        outputs = {each.node: each.batch_dim for each in self.graph.outputs if each.combine == "concatenate" and by_rows}
        inputs = {f"{leaf.placeholder}_gradient": leaf.batch_dim for leaf in self.graph.inputs}
        output = self.nodes.output_node()
        results: Any = output.args[0]
        if self.program.kind == "forward":
            saves = len(results) == 2 and isinstance(results[0], tuple)
            names = list(self.graph.returned)
            gathered = self._gather(output, results[0] if saves else results, names, [outputs.get(name) for name in names])
            output.args = ((gathered, results[1]) if saves else gathered,)
        else:
            is_step = self.program.kind == "train_step"
            gradients = results[1] if is_step else results
            names = [getattr(each, "name", "").removesuffix("_gradient") for each in gradients]
            gathered = self._gather(output, gradients, names, [inputs.get(f"{name}_gradient") for name in names])
            writes = dict.fromkeys(each.node for each in self.graph.writes.values() if each.node is not None)
            written = [self._gather(output, each, list(writes), [outputs.get(name) for name in writes]) for each in results[2:] if is_step]
            output.args = ((results[0], gathered, *written) if is_step else gathered,)

    def _gather(self, output: fx.Node, values: Sequence[Any], names: Sequence[str], dims: Sequence[int | None]) -> tuple[Any, ...]:
        """Gather values by rows.

        Args:
            names: of the values in the model's graph.
        """
        places = [index for index, (value, dim) in enumerate(zip(values, dims, strict=True)) if value is not None and dim is not None]
        if not places:
            return tuple(values)
        found = list(values)
        with self.nodes.inserting_before(output):
            arguments = ([values[index] for index in places], tuple(dims[index] for index in places))
            started = self._call(output, all_gather, arguments, "all_gather_rows", group=self.mesh.group(self.rank, self.part.rows))
            fakes = [self.fakes[names[index]] for index in places]
            started.meta["bytes"] = sum(bytes_of(fake, self.graph.batch, self.graph.batch_size) for fake in fakes)
            gathered = self._call(output, wait, (started,), "all_rows")
            for position, index in enumerate(places):
                found[index] = self._call(output, operator.getitem, (gathered, position), f"{values[index].name}_of_all_rows")
        return tuple(found)

    def _call(self, like: fx.Node, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, /, **keywords: Any) -> fx.Node:
        node = self.nodes.create_node("call_function", function, arguments, keywords, name=name)
        node.meta["section"] = like.meta.get("section", "results" if like.op == "output" else "gradients of parameters")
        return node
