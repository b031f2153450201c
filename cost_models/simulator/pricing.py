"""Price each node of an emitted program: its work by the operator table, its seconds by the cost model.

A fused kernel draws a dropout mask where it uses it, and draws only the part that it uses.

program                                  what a kernel written by hand draws

mask = dropout_mask((1, 96, s, s))       nothing: every rank of the program draws the mask of one device
own = take_part(mask, 1, 8, 3)           (1, 12, s, s), its own heads
y = x * own * (1 / (1 - p))
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cost_models.cost_model import CostModel
from cost_models.hardware.clusters import Device
from cost_models.ops.cost import call_work, node_work
from cost_models.ops.fusion import Fusion, fused
from cost_models.ops.work import Work
from cost_models.simulator.storages import Held, leaves_of
from passes.graph.schemas import bound_arguments
from passes.ir.comm import microbatch
from passes.ir.comm.microbatch import take_part
from passes.ir.comm.primitives import draw_alike
from passes.ir.tensor_spec import TensorSpec
from passes.ir.torch_private import OpOverload
from passes.normalize.randomness.functional_rng import dropout_mask, dropout_mask_again, dropout_mask_with_state
from passes.rules.call import Call


class NodePrices:
    """Prices nodes on one device; equal calls are priced once.

    Args:
        device: where they run.
        cost_model: turns work into seconds.
        fusion: which operators one kernel does together.
        copies: whether tensors are copied into messages and out of them (``Link.copies``).
    """

    def __init__(self, device: Device, cost_model: CostModel, fusion: Fusion = "none", *, copies: bool = True) -> None:
        self.fusion = fusion
        self._copies = copies
        self._device = device
        self._cost_model = cost_model
        self._known: dict[Call, float] = {}

    def operator(self, node: fx.Node, values: Mapping[fx.Node, Any], result: Any, *, is_view: bool) -> float:
        """Return the seconds of an ATen operator.

        Args:
            values: of the nodes that it reads.
            result: what it gives.
            is_view: whether its result shares memory of its arguments.
        """
        assert isinstance(node.target, OpOverload)
        results = tuple(TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves_of(result))
        if is_view or not results:
            return 0.0
        arguments = [(name, _described(value, values)) for name, value in bound_arguments(node).items()]
        call = Call.numbered(node.target, arguments, results)
        if call not in self._known:
            self._known[call] = self.seconds(call_work(call), results[0].known_dtype)
        return self._known[call]

    def function(self, target: Callable[..., Any], arguments: Sequence[Any], result: Any, made_bytes: int) -> float:
        """Return the seconds of a function of ``passes.ir.comm.microbatch``, or of any that reads its arguments and writes new memory.

        Args:
            made_bytes: of the storages that it makes.
        """
        if target in (microbatch.add_gradients, microbatch.add_gradients_in_place):
            written = sum(leaf.bytes for leaf in leaves_of(result))
        elif not made_bytes:
            return 0.0
        else:
            written = made_bytes
        adds = target not in (microbatch.split_batch, microbatch.concatenate, microbatch.take_part)
        read = sum(leaf.bytes for leaf in leaves_of(list(arguments))) if adds else written
        dtype = next((leaf.dtype for leaf in leaves_of(result)), torch.float32)
        return self.seconds(Work(0, read + written, 1), dtype)

    def writing(self, size: float) -> float:
        """Return the seconds of a kernel that writes so many bytes."""
        return self.seconds(Work(0, size, 1), torch.bool)

    def copying(self, size: float) -> float:
        """Return the seconds of copying so many bytes into a message, or out of one."""
        return self.seconds(Work(0, 2 * size, 1), torch.uint8) if self._copies and size else 0.0

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """Return the seconds of work; 0 if it starts no kernel and moves no bytes."""
        return self._cost_model.operation_time(work, self._device, dtype) if work.launches or work.bytes else 0.0

    def fused_works(self, graph: fx.Graph) -> dict[fx.Node, Work]:
        """Return the work of a graph's operators after fusion, as formulas; empty without fusion."""
        if self.fusion == "none":
            return {}
        return fused({node: node_work(node) for node in graph.nodes if node.op == "call_function"}, self.fusion)


def _described(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return an argument with its nodes replaced by shapes and numbers; hashable."""
    if isinstance(value, fx.Node):
        return _shapes(values[value])
    if isinstance(value, list | tuple):
        return tuple(_described(item, values) for item in value)
    return value


def _shapes(value: Any) -> Any:
    if isinstance(value, Held):
        return TensorSpec(value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_shapes(part) for part in value)
    return value


# -- masks of dropout in fused kernels ---------------------------------------------------------------------------------------------


_MASKS = (dropout_mask, dropout_mask_again, dropout_mask_with_state)


def is_mask(node: fx.Node) -> bool:
    """Return whether a node draws a mask, alone or with other ranks."""
    return node.target in _MASKS or (node.target is draw_alike and node.args[0] in _MASKS)


def is_part_of_mask(node: fx.Node) -> bool:
    """Return whether a node takes a part of a mask."""
    source = node.args[0] if node.target is take_part else None
    while isinstance(source, fx.Node) and source.target in (operator.getitem, take_part):
        source = source.args[0]
    return isinstance(source, fx.Node) and is_mask(source)


def share_taken(node: fx.Node) -> float:
    """Return the used fraction of a mask, or of a part."""
    return max((_share(user) for user in node.users if user.op != "output"), default=1.0)


def _share(user: fx.Node) -> float:
    if user.target is operator.getitem:
        return share_taken(user) if user.args[1] == 0 else 0.0
    if user.target is not take_part:
        return 1.0
    sizes: Any = user.args[2]
    here = 1 / sizes if isinstance(sizes, int) else sizes[user.args[3]] / sum(sizes)
    return float(here * share_taken(user))
