"""Sum gradients of parameters over ranks in a type that the plan names, one that is not theirs.

    before                                               after, in bfloat16

    pending = all_reduce([dw1, dw2])                     pending = all_reduce([to(dw1, bfloat16), to(dw2, bfloat16)])
    sums = wait(pending)                                 sums = wait(pending)
    store((sums[0], sums[1]))                            store((to(sums[0], float32), to(sums[1], float32)))

Sums inside of a backward, of parameters that are stored in parts, have their casts there (``passes.autograd.precision.wide_sums``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.graph.program_printer import ProgramModule
from passes.ir.comm.primitives import all_reduce

aten = torch.ops.aten

_CAST = aten._to_copy.default  # noqa: SLF001  what a conversion comes down to


def sum_gradients_in(module: ProgramModule, reduce_dtype: torch.dtype, parameters: Mapping[str, Tensor]) -> None:
    """Cast gradients before their all_reduce, and the sums back, in place.

    Args:
        parameters: placeholder -> a tensor of the size and type of the gradient.
    """
    for node in list(module.graph.nodes):
        names = node.meta.get("reduces", ()) if node.target is all_reduce else ()
        if names and all(name in parameters for name in names):
            _cast_around(node, [parameters[name] for name in names], reduce_dtype)
    module.graph.lint()


def _cast_around(start: fx.Node, like: Sequence[Tensor], reduce_dtype: torch.dtype) -> None:
    """Cast the operands of an all_reduce that are of another type, and its results.

    Args:
        like: for each operand, a tensor of its size and type.
    """
    (end,) = start.users
    readers = list(end.users)
    sources = start.args[0]
    assert isinstance(sources, Sequence)
    operands = []
    for source, each in zip(sources, like, strict=True):
        assert isinstance(source, fx.Node)
        with start.graph.inserting_after(source):  # the sum can start when its last operand is there
            operands.append(_cast(start, source, each, reduce_dtype, f"{source}_to_sum"))
    start.args = (operands, *start.args[1:])
    start.meta["bytes"] = sum(each.numel() * reduce_dtype.itemsize for each in like)
    with start.graph.inserting_before(end.next):
        items = [_call(start, operator.getitem, (end, place), f"{end.name}_{place}") for place in range(len(like))]
        sums = [each.to(reduce_dtype) for each in like]
        results = [_cast(start, item, have, each.dtype, f"{item.name}_back") for item, have, each in zip(items, sums, like, strict=True)]
    for reader in readers:
        if reader.target is operator.getitem:
            place = reader.args[1]
            assert isinstance(place, int)
            reader.replace_all_uses_with(results[place])
            start.graph.erase_node(reader)
        else:
            reader.args = fx.map_arg(reader.args, lambda node: tuple(results) if node is end else node)


def _cast(start: fx.Node, value: Any, have: Tensor, dtype: torch.dtype, name: str) -> Any:
    """Cast a value that is like ``have``."""
    if have.dtype == dtype:
        return value
    cast = _call(start, _CAST, (value,), name, dtype=dtype)
    cast.meta["val"] = have.to(dtype)
    return cast


def _call(start: fx.Node, function: Callable[..., Any], arguments: tuple[Any, ...], name: str, /, **keywords: Any) -> fx.Node:
    node = start.graph.create_node("call_function", function, arguments, keywords, name=name)
    node.meta["section"] = start.meta.get("section", "gradients of parameters")
    return node
