"""What the collectives of a step move, read from the programs: sums of gradients and of activations, parts put together, cut, exchanged.

Bytes are those that leave a rank when each rank passes on what it must: a tensor that is summed goes round once to be summed and once
more for all to have the sum, except for the part that stays (``2 (n - 1) / n`` of it); of what is gathered, scattered or exchanged, a
rank sends what it gives to others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
from torch import fx

from partitioner.reports.communication.purpose import Purpose, Purposes, dimensions_of
from partitioner.reports.communication.transfer import Transfer
from partitioner.reports.module_names import rank_list
from passes.autograd.staged_model import LoweredStages
from passes.ir.comm.microbatch import microbatch_sizes
from passes.ir.comm.primitives import COLLECTIVES, all_reduce
from passes.ir.comm.semantics import CollectiveSpec
from passes.ir.errors import first_few
from passes.ir.mesh import Mesh
from passes.ir.program import Program
from passes.ir.tensor_spec import TensorSpec
from passes.verify.value_specs import describe_values

__all__ = ["collective_transfers", "sent_by_kind"]


@dataclass(frozen=True)
class _Call:
    """A collective of one rank.

    Attributes:
        node: what starts it.
        spec: what it gives and gets.
        purpose: why it is there.
        result: dtype and shape of the first result, in the first microbatch.
        sent: bytes that leave the rank.
    """

    node: fx.Node
    spec: CollectiveSpec
    purpose: Purpose
    result: str
    sent: Fraction


def collective_transfers(lowered: LoweredStages, programs: Sequence[Program], mesh: Mesh | None = None) -> list[Transfer]:
    """One line for what is of one kind, purpose and shape, in the order of the programs; of gradients, one for all that travel alike.

    Args:
        mesh: of the ranks, whose dimensions are told instead of groups.
    """
    found: dict[tuple[Any, ...], list[_Call]] = {}
    for program in programs:
        if any(node.target in COLLECTIVES for node in program.module.graph.nodes):
            for call in _calls(lowered, program):
                over = call.spec.group if mesh is None else dimensions_of(call.spec.group, mesh)
                purpose = call.purpose
                if call.node.meta.get("reduces") is not None:
                    alike: tuple[Any, ...] = (over, purpose.names)
                else:
                    alike = (purpose.subject, purpose.why, purpose.made, purpose.made or call.result, () if mesh is None else over)
                found.setdefault((call.node.target, *alike), []).append(call)
    return [_transfer(calls, mesh) for calls in found.values()]


def sent_by_kind(lowered: LoweredStages, program: Program) -> dict[str, int]:
    """Bytes that leave a rank in a step, by the function that sends them."""
    sent: dict[str, Fraction] = {}
    for call in _calls(lowered, program):
        kind = call.node.target.__name__  # type: ignore[union-attr]
        sent[kind] = sent.get(kind, Fraction(0)) + call.sent
    return {kind: int(moved) for kind, moved in sent.items()}


def _calls(lowered: LoweredStages, program: Program) -> list[_Call]:
    """The collectives of a rank that communicate."""
    specs = describe_values(program)
    batch = program.module.meta["batch_size"]
    rows = microbatch_sizes(batch, len(specs.sizes))
    # What the symbols of a program stand for in the batch that was traced.
    at_run = {specs.batch: batch, **dict(zip(specs.sizes, rows, strict=True))}
    at_first = {**at_run, **dict.fromkeys(specs.sizes, rows[0])}
    calls = []
    purposes = Purposes(lowered.graph, program.module)
    for node in program.module.graph.nodes:
        if node.target in COLLECTIVES and len(specs.of[node].collective.group) > 1:
            spec: CollectiveSpec = specs.of[node].collective
            result = str(_numbered(spec.results[0], at_first)) if spec.results else "nothing"
            calls.append(_Call(node, spec, purposes.of(node), result, _sent(node, spec, program.rank, at_run)))
    return calls


def _numbered(tensor: TensorSpec, values: Mapping[Any, int]) -> TensorSpec:
    return TensorSpec(tuple(int(sympy.sympify(size).subs(values)) for size in tensor.shape), tensor.dtype)


def _sent(node: fx.Node, spec: CollectiveSpec, rank: int, values: Mapping[Any, int]) -> Fraction:
    n_ranks = len(spec.group)
    if node.target is all_reduce:
        return Fraction(2 * (n_ranks - 1), n_ranks) * sum(_bytes(node, given[0], values) for given in spec.given)
    others = [position for position, other in enumerate(spec.group) if other != rank]
    return Fraction(sum(_bytes(node, given[position], values) for given in spec.given for position in others))


def _bytes(node: fx.Node, tensor: TensorSpec, values: Mapping[Any, int]) -> int:
    if tensor.dtype is None:  # that of a loss, which is known to whoever wrote the node
        size: int = node.meta["bytes"]
        return size
    count = sympy.Mul(*_numbered(tensor, values).shape)
    return int(count) * tensor.dtype.itemsize


# -- words -----------------------------------------------------------------------------------------------------------------------------


def _transfer(calls: Sequence[_Call], mesh: Mesh | None) -> Transfer:
    groups = list(dict.fromkeys(call.spec.group for call in calls))
    sending = tuple(sorted({rank for group in groups for rank in group}))
    purpose = calls[0].purpose
    value = purpose.subject + first_few(list(dict.fromkeys(name for call in calls for name in call.purpose.names)), 1)
    source, destination = _between(groups, mesh)
    moved = int(sum(call.sent for call in calls))
    return Transfer(value, purpose.made or calls[0].result, moved, len(calls), source, destination, purpose.why, sending)


def _between(groups: Sequence[tuple[int, ...]], mesh: Mesh | None) -> tuple[str, str]:
    """The kind of way, and between whom."""
    if mesh is None:
        more = f" and {len(groups) - 3} groups more" if len(groups) > 3 else ""
        ranks = "; ".join(rank_list(group) for group in groups[:3]) + more
        return ranks, ranks
    over = " and ".join(dimensions_of(groups[0], mesh))
    return f"over {over}", rank_list(groups[0]) if len(groups) == 1 else f"{len(groups)} groups of {len(groups[0])} ranks"
