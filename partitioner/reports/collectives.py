"""What the collectives of a step move, read from the programs: sums of gradients and of activations, parts put together, cut, exchanged.

Bytes are those that leave a rank when each rank passes on what it must: a tensor that is summed goes round once to be summed and once
more for all to have the sum, except for the part that stays (``2 (n - 1) / n`` of it); of what is gathered, scattered or exchanged, a
rank sends what it gives to others.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
from torch import fx

from partitioner.reports.module_range import module_range, rank_list, short_name
from partitioner.reports.transfer import Transfer
from passes.collective_specs import CollectiveSpec
from passes.ir.communication import COLLECTIVES, all_gather, all_reduce, all_to_all, reduce_scatter, wait
from passes.ir.microbatch import microbatch_sizes
from passes.ir.program import Program
from passes.lower import LoweredStages
from passes.provenance import module_path
from passes.tensor_spec import TensorSpec
from passes.value_specs import ValueSpecs, describe_values

__all__ = ["collective_transfers"]


@dataclass(frozen=True)
class _Call:
    """A collective of one rank.

    Attributes:
        node: what starts it.
        spec: what it gives and gets.
        result: dtype and shape of the first result, in the first microbatch.
        sent: bytes that leave the rank.
    """

    node: fx.Node
    spec: CollectiveSpec
    result: str
    sent: Fraction


def collective_transfers(lowered: LoweredStages, programs: Sequence[Program]) -> list[Transfer]:
    """One line for what is of one kind and shape, in the order of the programs; of gradients, one for those that travel together."""
    found: dict[tuple[Any, ...], list[_Call]] = {}
    for program in programs:
        if any(node.target in COLLECTIVES for node in program.module.graph.nodes):
            for call in _calls(program):
                reduces = call.node.meta.get("reduces")
                alike = (call.spec.manner, call.result) if reduces is None else (call.spec.group, reduces)
                found.setdefault((call.node.target, *alike), []).append(call)
    return [_transfer(lowered, calls) for calls in found.values()]


def _calls(program: Program) -> list[_Call]:
    """The collectives of a rank that communicate."""
    specs = describe_values(program)
    batch = program.module.meta["batch_size"]
    rows = microbatch_sizes(batch, len(specs.sizes))
    at_run = _values(specs, batch, rows)
    at_first = {**at_run, **dict.fromkeys(specs.sizes, rows[0])}
    calls = []
    for node in program.module.graph.nodes:
        if node.target in COLLECTIVES and len(specs.of[node].collective.group) > 1:
            spec: CollectiveSpec = specs.of[node].collective
            result = str(_numbered(spec.results[0], at_first)) if spec.results else "nothing"
            calls.append(_Call(node, spec, result, _sent(node, spec, program.rank, at_run)))
    return calls


def _values(specs: ValueSpecs, batch: int, rows: Sequence[int]) -> dict[Any, int]:
    """What the symbols of a program stand for in the batch that was traced."""
    return {specs.batch: batch, **dict(zip(specs.sizes, rows, strict=True))}


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


def _transfer(lowered: LoweredStages, calls: Sequence[_Call]) -> Transfer:
    reduces = calls[0].node.meta.get("reduces")
    groups = list(dict.fromkeys(call.spec.group for call in calls))
    ranks = "; ".join(rank_list(group) for group in groups[:3]) + (f" and {len(groups) - 3} groups more" if len(groups) > 3 else "")
    sending = tuple(sorted({rank for group in groups for rank in group}))
    moved, times = int(sum(call.sent for call in calls)), len(calls)
    if reduces is None:
        value, reason = _named([_value(lowered, call.node) for call in calls]), _reason(calls)
        return Transfer(value, calls[0].result, moved, times, ranks, ranks, reason, sending)
    parameters = lowered.graph.parameters
    inputs = {leaf.placeholder: leaf.name for leaf in lowered.graph.inputs}
    originals = [parameters.get(name) or inputs.get(name) for name in reduces]
    value = _named([short_name(original or name) for original, name in zip(originals, reduces, strict=True)])
    if any(originals):
        value = f"gradient of {value}"
    if all(name in parameters for name in reduces):
        reason = "a parameter that these ranks share" if len(reduces) == 1 else "parameters that these ranks share"
    else:
        reason = "all ranks return the gradient of an input" if any(originals) else "each rank has a part of it"
    return Transfer(value, _MADE[calls[0].node.target], moved, times, ranks, ranks, reason, sending)


_MADE: Mapping[Any, str] = {
    all_reduce: "summed",
    reduce_scatter: "summed and cut",
    all_gather: "put together",
    all_to_all: "exchanged",
}
"""What becomes of gradients."""


def _named(names: Sequence[str]) -> str:
    different = list(dict.fromkeys(names))
    return different[0] + (f" and {len(different) - 1} more" if len(different) > 1 else "")


def _value(lowered: LoweredStages, node: fx.Node) -> str:
    """What a collective moves: a parameter by its name in the model, a value by that of its node."""
    given = node.all_input_nodes
    if given and given[0].op == "get_attr":
        return short_name(lowered.graph.parameters.get(str(given[0].target), str(given[0].target)))
    name: str = node.meta.get("reason") or (given[0].name if given else node.name)
    return name


def _reason(calls: Sequence[_Call]) -> str:
    """The kind, and the modules that the results are of."""
    modules = list(dict.fromkeys(path for call in calls if (path := _module(call.node))))
    return f"{calls[0].spec.manner}, {module_range(modules)}" if modules else calls[0].spec.manner


def _module(started: fx.Node) -> str:
    results = [result for user in started.users if user.target is wait for result in user.users if result.target is operator.getitem]
    return next((path for node in (started, *results) if (path := module_path(node))), "")
