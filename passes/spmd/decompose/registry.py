"""The decompositions of ops that reduce over a sharded axis: local kernels and collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes.graph.schemas import bound_arguments, packet
from passes.rules.ops.channel_statistics import channel_statistics
from passes.rules.ops.grouped_mm import grouped_mm
from passes.spmd.decompose import normalization as norms
from passes.spmd.decompose.builder import ReductionWriter
from passes.spmd.decompose.softmax_loss import causal_attention, cross_entropy, embedding, grouped_product, log_softmax, softmax

aten = torch.ops.aten

SINGLE_BYTES = 4
"""Bytes of an element of a decomposition that computes in float32."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of a decomposition, as (number of launches, number of passes over as many elements as the result, or an operand, has).

    Attributes:
        forward: those of the call.
        activation: those of the gradients of activations.
        weight: those of the gradients of parameters.
        keeps: number of tensors like the result that are saved for the backward, in addition to those of the undecomposed op.
        repeated: those of a recomputation for which the statistics are saved, all of them; None: those of the call.
        updates: whether they write to buffers: no recomputation runs them.
    """

    forward: tuple[int, int] = (0, 0)
    activation: tuple[int, int] = (0, 0)
    weight: tuple[int, int] = (0, 0)
    keeps: int = 0
    repeated: tuple[int, int] | None = None
    updates: bool = False


@dataclass(frozen=True)
class Decomposition:
    """The decomposition of one operator whose rule has a reduction ``"whole"``.

    Attributes:
        write: emits it for a shard.
        factors: the names (or beginnings of names) of the factors that may be sharded.
        gives: the placement of a result without the factor: the whole on every rank, or a partial sum.
        whole: arguments that every rank reads as Replicate, not Varying: stored statistics.
        allows: whether a call with such arguments can be decomposed.
        by_place: whether positions along the factor matter: a shard must then be a contiguous interval.
        widened: arguments that are converted from half precision to float32, as torch's kernels for sums of many terms do.
        sends: for each all_reduce of the forward, the number of statistics, each one number for each element of the other loops.
        returns: the same for the backward.
        kernels: the kernels run if an argument is given, ``""``: always; empty: those of the undecomposed op, and ``more``.
        more: the kernels run beside about those of the undecomposed op, in the same way.
        sums_of_half: the kernels run besides for half precision, if the input is not converted: those of the sums' copy in float32.
        passes_over: the argument whose elements the passes of ``more`` read or write; empty: those of the result.
    """

    write: Callable[[ReductionWriter], fx.Node]
    factors: tuple[str, ...]
    gives: Literal["replicate", "sum"] = "replicate"
    whole: tuple[str, ...] = ()
    allows: Callable[[Mapping[str, Any]], bool] = lambda _arguments: True
    by_place: bool = False
    widened: tuple[str, ...] = ()
    sends: tuple[int, ...] = (1, 1)
    returns: tuple[int, ...] = (2,)
    kernels: Mapping[str, Kernels] = field(default_factory=dict)
    more: Mapping[str, Kernels] = field(default_factory=dict)
    sums_of_half: Kernels = Kernels()
    passes_over: str = ""

    def on_part(self, write: ReductionWriter) -> fx.Node:
        """Emit the decomposition for a rank's shard."""
        return write.in_single_precision(self.write, self.widened) if self.widened else self.write(write)


def _is_plain_lookup(arguments: Mapping[str, Any]) -> bool:
    return not arguments["scale_grad_by_freq"] and not arguments["sparse"]


def _has_class_targets(arguments: Mapping[str, Any]) -> bool:
    """Return whether the targets of a cross entropy are class indices, without class weights or label smoothing."""
    target = arguments["target"].meta["val"]
    is_index = isinstance(target, Tensor) and not target.is_floating_point()
    return is_index and arguments["weight"] is None and not arguments["label_smoothing"]


def _is_without_dropout(arguments: Mapping[str, Any]) -> bool:
    return not arguments["dropout_p"]


def takes_own_statistics(arguments: Mapping[str, Any]) -> bool:
    """Return whether an instance normalisation uses the statistics of its input, and stores none."""
    return bool(arguments["use_input_stats"]) and arguments["running_mean"] is None


_STATISTICS = ("running_mean", "running_var")

_WEIGHTS = ("weight", "bias")
"""Arguments of ``normalize`` that are converted; its input keeps its type, and its sums alone are of float32."""

_OPERANDS = ("input", "self", *_WEIGHTS)
"""Those of other decompositions. Stored statistics are written, and keep their dtype."""

_NORMALIZED = Kernels((10, 4), (8, 8), repeated=(1, 2))
"""Sum, variance, ``normalize`` and small kernels; backward: two kernels over the shard, their sum, and small ones."""

_OF_A_COPY = Kernels((1, 5), repeated=(0, 0))
"""A copy in float32 is written, and read twice instead of the input."""

_OF_CHANNELS = {"": _NORMALIZED, "weight": Kernels(activation=(1, 0)), "running_mean": Kernels((14, 0), updates=True)}
"""Running statistics are updated by many small kernels."""

_OF_GROUPS = {
    "": Kernels((10, 4), (13, 8), repeated=(1, 2)),
    "weight": Kernels(activation=(2, 0), weight=(1, 0)),
    "bias": Kernels(weight=(1, 0)),
}
_OF_IMAGES = {**_OF_GROUPS, "": _NORMALIZED}

_AFFINE = {"weight": Kernels((1, 2), (1, 2), (2, 4), keeps=1), "bias": Kernels((1, 2), weight=(1, 1))}
_OF_ROWS = {"": _NORMALIZED, **_AFFINE}
_SCALED = {"": Kernels((5, 6), (8, 8), repeated=(1, 2)), **_AFFINE}

_OF_LOOKUP = {"": Kernels((6, 2), weight=(1, 2)), "padding_idx": Kernels((2, 3), weight=(2, 2))}
"""Rows of other ranks, and gradients of the padding, are replaced by zeros."""

_OF_CLASSES = {"": Kernels((18, 3), (6, 4), repeated=(9, 4))}
"""Maximum, differences, exponentials and sum are separate kernels; so are, in the backward, zeros, the target, product and sum.
Differences, exponentials and the rank's own targets are computed again."""

_DECOMPOSITIONS: Mapping[Any, Decomposition] = {
    aten.batch_norm: Decomposition(
        norms.batch_norm,
        ("batch", "space"),
        whole=_STATISTICS,
        allows=lambda arguments: bool(arguments["training"]),
        widened=_WEIGHTS,
        kernels=_OF_CHANNELS,
        sums_of_half=_OF_A_COPY,
    ),
    packet(channel_statistics): Decomposition(
        norms.channel_statistics,
        ("batch", "space"),
        widened=_WEIGHTS,
        returns=(),
        kernels={"": Kernels((14, 2))},
        sums_of_half=_OF_A_COPY,
    ),
    aten.layer_norm: Decomposition(norms.layer_norm, ("features",), widened=_OPERANDS, kernels=_OF_ROWS),
    aten.rms_norm: Decomposition(norms.rms_norm, ("features",), widened=_OPERANDS, sends=(1,), returns=(1,), kernels=_SCALED),
    aten.group_norm: Decomposition(norms.group_norm, ("channels", "space"), widened=_WEIGHTS, kernels=_OF_GROUPS, sums_of_half=_OF_A_COPY),
    aten.instance_norm: Decomposition(
        norms.instance_norm, ("space",), allows=takes_own_statistics, widened=_WEIGHTS, kernels=_OF_IMAGES, sums_of_half=_OF_A_COPY
    ),
    aten.embedding: Decomposition(
        embedding, ("vocab",), gives="sum", allows=_is_plain_lookup, by_place=True, sends=(), returns=(), more=_OF_LOOKUP
    ),
    packet(grouped_mm): Decomposition(grouped_product, ("experts",), gives="sum", by_place=True, sends=(), returns=()),
    aten.softmax: Decomposition(softmax, ("dim",), widened=_OPERANDS, returns=(1,)),
    aten.log_softmax: Decomposition(log_softmax, ("dim",), widened=_OPERANDS, returns=(1,)),
    aten._softmax: Decomposition(softmax, ("dim",), widened=_OPERANDS, returns=(1,)),  # noqa: SLF001
    aten._log_softmax: Decomposition(log_softmax, ("dim",), widened=_OPERANDS, returns=(1,)),  # noqa: SLF001
    aten.scaled_dot_product_attention: Decomposition(
        causal_attention, ("queries",), allows=_is_without_dropout, by_place=True, sends=(), returns=()
    ),
    aten.cross_entropy_loss: Decomposition(
        cross_entropy,
        ("classes",),
        allows=_has_class_targets,
        by_place=True,
        widened=_OPERANDS,
        sends=(1, 1, 1),
        returns=(),
        more=_OF_CLASSES,
        passes_over="self",
    ),
}
"""Operator -> its decomposition."""


def decomposition_of(node: fx.Node, factor: str) -> Decomposition | None:
    """Return the decomposition of a call over a factor; None if the factor cannot be sharded."""
    decomposition = _DECOMPOSITIONS.get(packet(node.target))
    if decomposition is None or not factor.startswith(decomposition.factors) or not decomposition.allows(bound_arguments(node)):
        return None
    return decomposition
