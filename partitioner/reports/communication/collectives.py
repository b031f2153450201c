"""The collectives of a step, read from the programs: their values, bytes, groups and purposes.

Bytes are those that a rank sends in a ring of ``n`` ranks: ``2 (n - 1) / n`` of a tensor for an all_reduce (a reduce_scatter and an
all_gather); for any other collective the parts that go to other ranks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import sympy
from torch import fx

from partitioner.reports.communication.purpose import Purpose, Purposes, dimensions_of
from partitioner.reports.communication.transfer import Transfer
from partitioner.reports.sources import Explained, RankClass
from passes.autograd.staged_model import SplitModel
from passes.emit.inline_stages import TIMES
from passes.graph.symbolic_sizes import expected_size
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import COLLECTIVES, all_reduce
from passes.ir.comm.semantics import CollectiveSpec
from passes.ir.errors import first_few
from passes.ir.mesh import Mesh, rank_list
from passes.ir.program import Program
from passes.ir.tensor_spec import Size, TensorSpec
from passes.verify.value_specs import ValueSpecs


@dataclass(frozen=True)
class Collective:
    """A collective of one rank.

    Attributes:
        node: the call that starts it.
        spec: its group, operands and results.
        purpose: the values it moves, and why.
        result: dtype and shape of the first result, in the first microbatch.
        sent: bytes that the rank sends.
        times: how many equal collectives of a step this one stands for.
    """

    node: fx.Node
    spec: CollectiveSpec
    purpose: Purpose
    result: str
    sent: Fraction
    times: int


_NUMBER = re.compile(r"\d+")

_OfClass: TypeAlias = tuple[RankClass, Collective]
"""A collective of each rank of a class."""


def collective_transfers(
    classes: Sequence[RankClass], collectives: Iterable[Sequence[Collective]], mesh: Mesh | None = None
) -> list[Transfer]:
    """Return one transfer for all collectives with the same function, purpose, shape and mesh dimensions, in the order of the programs.

    All-reduces that the emitter wrote, of gradients and the loss, are grouped by their values and groups instead; values of equal layers,
    whose names differ in numbers alone, are one.

    Args:
        collectives: of each class of ranks.
        mesh: the mesh of the ranks: transfers then name mesh dimensions; None: they name the ranks of groups.
    """
    groups: dict[tuple[Any, ...], list[_OfClass]] = {}
    for of_class, call in ((one, call) for one, calls in zip(classes, collectives, strict=True) for call in calls):
        over = call.spec.group if mesh is None else dimensions_of(call.spec.group, mesh)
        purpose = call.purpose
        if call.node.meta.get("reduces") is not None:
            key: tuple[Any, ...] = (over, tuple(_NUMBER.sub("*", name) for name in purpose.names))
        else:
            key = (purpose.subject, purpose.why, purpose.operation, purpose.operation or call.result, () if mesh is None else over)
        groups.setdefault((call.node.target, *key), []).append((of_class, call))
    return [_transfer(calls, mesh) for calls in groups.values()]


def sent_by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    """Return name of a function -> bytes that a rank sends by its collectives of it in a step."""
    sent: dict[str, Fraction] = {}
    for call in collectives:
        kind = call.node.target.__name__  # type: ignore[union-attr]
        sent[kind] = sent.get(kind, Fraction(0)) + call.sent * call.times
    return {kind: int(size) for kind, size in sent.items()}


def collectives_of_classes(explained: Explained) -> tuple[tuple[Collective, ...], ...]:
    """Return the collectives of a rank of each class; the programs are read once."""

    def read() -> tuple[tuple[Collective, ...], ...]:
        programs = [of_class.program for of_class in explained.classes]
        return tuple(collectives_of(explained.lowered, explained.values(each)) if has_collectives(each) else () for each in programs)

    return explained.once("collectives", read)


def has_collectives(program: Program) -> bool:
    """Return whether a program calls any collective."""
    return any(node.target in COLLECTIVES for node in program.module.graph.nodes)


def collectives_of(lowered: SplitModel, specs: ValueSpecs) -> tuple[Collective, ...]:
    """Return the collectives of a rank whose group has other ranks.

    Args:
        lowered: the stages of the first pipeline.
        specs: the values of the rank's program.
    """
    program = specs.program
    batch = program.module.meta["batch_size"]
    rows = microbatch_sizes(batch, len(specs.sizes))
    # Values of the symbolic sizes: in the traced batch; with every microbatch as large as the first.
    at_run = {specs.batch: batch, **dict(zip(specs.sizes, rows, strict=True))}
    at_first = {**at_run, **dict.fromkeys(specs.sizes, rows[0])}
    calls = []
    purposes = Purposes(lowered.graph, program.module)
    for node in program.module.graph.nodes:
        if node.target in COLLECTIVES and len(specs.of[node].collective.group) > 1:
            spec: CollectiveSpec = specs.of[node].collective
            result = str(_with_numbers(spec.results[0], at_first)) if spec.results else "nothing"
            sent = _sent_bytes(node, spec, program.rank, at_run)
            calls.append(Collective(node, spec, purposes.of(node), result, sent, node.meta.get(TIMES, 1)))
    return tuple(calls)


def _with_numbers(tensor: TensorSpec, values: Mapping[Any, int]) -> TensorSpec:
    """Substitute numbers for the symbols of a shape."""
    key = tuple(values.items())
    return TensorSpec(tuple(_number(size, key) for size in tensor.shape), tensor.dtype)


@functools.lru_cache(maxsize=65536)
def _number(size: Size, values: tuple[tuple[Any, int], ...]) -> int:
    """Return a size with numbers for symbols: programs have many collectives of few shapes."""
    return int(sympy.sympify(expected_size(size)).subs(dict(values)))


def _sent_bytes(node: fx.Node, spec: CollectiveSpec, rank: int, values: Mapping[Any, int]) -> Fraction:
    """Return the bytes that a rank sends in a collective: ``spec.given`` has, for each operand, one part for each rank of the group."""
    n_ranks = len(spec.group)
    if node.target is all_reduce:
        return Fraction(2 * (n_ranks - 1), n_ranks) * sum(_bytes(node, given[0], values) for given in spec.given)
    others = [position for position, other in enumerate(spec.group) if other != rank]
    return Fraction(sum(_bytes(node, given[position], values) for given in spec.given for position in others))


def _bytes(node: fx.Node, tensor: TensorSpec, values: Mapping[Any, int]) -> int:
    """Return the bytes of an operand of a collective, with these values of symbolic sizes."""
    if tensor.dtype is None:  # a loss, whose dtype the program does not say
        size: int = node.meta["bytes"]
        return size
    return int(_with_numbers(tensor, values).bytes)


def _transfer(calls: Sequence[_OfClass], mesh: Mesh | None) -> Transfer:
    """Sum up collectives of one purpose, of all ranks and microbatches."""
    groups = _groups(calls, mesh)
    purpose = calls[0][1].purpose
    names = dict.fromkeys(name for _, call in calls for name in call.purpose.names)
    source, destination = _ends(groups, mesh)
    sent = int(sum(call.sent * call.times * len(of_class.ranks) for of_class, call in calls))
    shape = purpose.operation or calls[0][1].result
    times = sum(call.times * len(of_class.ranks) for of_class, call in calls)
    function: Any = calls[0][1].node.target
    why = f"{function.__name__.replace('_', '-')}: {purpose.why}"
    return Transfer(purpose.subject + first_few(list(names), 1), shape, sent, times, source, destination, why)


def _groups(calls: Sequence[_OfClass], mesh: Mesh | None) -> list[tuple[int, ...]]:
    """Return the groups of collectives: of a rank of each class, and of the others the same, shifted along the mesh."""
    found: dict[tuple[int, ...], None] = {}
    seen: set[tuple[tuple[str, ...], tuple[int, ...]]] = set()  # mesh dimensions and ranks whose groups are found
    for group, first, ranks in dict.fromkeys((call.spec.group, of_class.program.rank, of_class.ranks) for of_class, call in calls):
        found[group] = None
        if mesh is None or len(ranks) == 1:
            continue
        over = dimensions_of(group, mesh)
        if mesh.group(first, over) != group:  # a part of the ranks along its dimensions
            found |= dict.fromkeys(tuple(mesh.shifted(member, first, rank) for member in group) for rank in ranks)
        elif (over, ranks) not in seen:
            found |= dict.fromkeys(mesh.group(rank, over) for rank in ranks)
            seen.add((over, ranks))
    return list({frozenset(group): group for group in reversed(found)}.values())[::-1]


def _ends(groups: Sequence[tuple[int, ...]], mesh: Mesh | None) -> tuple[str, str]:
    """Return source and destination of a transfer: the ranks twice, or ``("over tensor", "4 groups of 2 ranks")`` on a mesh."""
    if mesh is None:
        more = f" and {len(groups) - 3} groups more" if len(groups) > 3 else ""
        ranks = "; ".join(rank_list(group) for group in groups[:3]) + more
        return ranks, ranks
    over = " and ".join(dimensions_of(groups[0], mesh))
    return f"over {over}", rank_list(groups[0]) if len(groups) == 1 else f"{len(groups)} groups of {len(groups[0])} ranks"
