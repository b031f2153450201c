"""Which operations can be cut where they reduce inside, over which of their factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from passes.graph.schemas import bound_arguments, packet
from passes.spmd.decompose import normalization as norms
from passes.spmd.decompose import softmax_loss as attention
from passes.spmd.decompose import softmax_loss as classes
from passes.spmd.decompose.builder import InsideWriter

__all__ = ["SINGLE_BYTES", "Inside", "Kernels", "inside_of", "takes_own_statistics"]

aten = torch.ops.aten

SINGLE_BYTES = 4
"""Of an element where half precision is made float32 inside."""


@dataclass(frozen=True)
class Kernels:
    """What a rank runs for a call that is decomposed: kernels, and how often they read or write as many elements as the call's result has.

    Attributes:
        forward: of the call.
        activation: of the gradients of activations.
        weight: of the gradients of parameters.
        keeps: how many values like the result are kept for the backward, beside those of the call in one piece.
    """

    forward: tuple[int, int] = (0, 0)
    activation: tuple[int, int] = (0, 0)
    weight: tuple[int, int] = (0, 0)
    keeps: int = 0


@dataclass(frozen=True)
class Inside:
    """How one operation is cut over factors that its rule calls whole.

    Attributes:
        write: writes it on a part.
        factors: the names (or beginnings of names) of the factors.
        gives: a result that does not have the factor is there on every rank, or a part of a sum.
        whole: arguments that are read whole by every rank alike, not on their way into cut work: stored statistics.
        allows: whether this call can be written so.
        by_place: whether it counts places along the factor: a part must then be a run of them.
        single: whether half precision is made float32 inside, as torch's kernels do for what adds up many terms.
        sends: how many statistics, numbers for each element of the other loops, are summed over ranks in each message of the forward.
        returns: the same of the backward.
        kernels: what is run, by the argument that asks for it, ``""`` for every call; empty: about as much as for the call in one piece.
    """

    write: Callable[[InsideWriter], fx.Node]
    factors: tuple[str, ...]
    gives: Literal["replicate", "sum"] = "replicate"
    whole: tuple[str, ...] = ()
    allows: Callable[[Mapping[str, Any]], bool] = lambda _arguments: True
    by_place: bool = False
    single: bool = False
    sends: tuple[int, ...] = (1, 1)
    returns: tuple[int, ...] = (2,)
    kernels: Mapping[str, Kernels] = field(default_factory=dict)

    def on_part(self, write: InsideWriter) -> fx.Node:
        """Write it on a rank's part."""
        return write.in_single_precision(self.write) if self.single else self.write(write)


def _is_plain_lookup(arguments: Mapping[str, Any]) -> bool:
    return not arguments["scale_grad_by_freq"] and not arguments["sparse"]


def _is_of_class_numbers(arguments: Mapping[str, Any]) -> bool:
    target = arguments["target"].meta["val"]
    return (
        isinstance(target, Tensor) and not target.is_floating_point() and arguments["weight"] is None and not arguments["label_smoothing"]
    )


def _is_without_dropout(arguments: Mapping[str, Any]) -> bool:
    return not arguments["dropout_p"]


def takes_own_statistics(arguments: Mapping[str, Any]) -> bool:
    """Whether an instance normalisation takes the statistics of its input, and stores none."""
    return bool(arguments["use_input_stats"]) and arguments["running_mean"] is None


_STATISTICS = ("running_mean", "running_var")

_NORMALIZED = Kernels((7, 9), (8, 8))
"""Sum, mean, distances, squares, sum, variance, ``normalize``; back two over the part and their sum, and what is small."""

_OF_CHANNELS = {"": _NORMALIZED, "weight": Kernels(activation=(1, 0)), "running_mean": Kernels((14, 0))}
"""Statistics that move are small tensors, and many of them."""

_OF_GROUPS = {"": Kernels((7, 9), (13, 8)), "weight": Kernels(activation=(2, 0), weight=(1, 0)), "bias": Kernels(weight=(1, 0))}
_OF_IMAGES = {**_OF_GROUPS, "": _NORMALIZED}

_AFFINE = {"weight": Kernels((1, 2), (1, 2), (2, 4), keeps=1), "bias": Kernels((1, 2), weight=(1, 1))}
_OF_ROWS = {"": _NORMALIZED, **_AFFINE}
_SCALED = {"": Kernels((5, 6), (8, 8)), **_AFFINE}

_INSIDE: Mapping[Any, Inside] = {
    aten.batch_norm: Inside(
        norms.batch_norm,
        ("batch", "space"),
        whole=_STATISTICS,
        allows=lambda arguments: bool(arguments["training"]),
        single=True,
        kernels=_OF_CHANNELS,
    ),
    aten.layer_norm: Inside(norms.layer_norm, ("features",), single=True, kernels=_OF_ROWS),
    aten.rms_norm: Inside(norms.rms_norm, ("features",), single=True, sends=(1,), returns=(1,), kernels=_SCALED),
    aten.group_norm: Inside(norms.group_norm, ("channels", "space"), single=True, kernels=_OF_GROUPS),
    aten.instance_norm: Inside(norms.instance_norm, ("space",), allows=takes_own_statistics, single=True, kernels=_OF_IMAGES),
    aten.embedding: Inside(classes.embedding, ("vocab",), gives="sum", allows=_is_plain_lookup, by_place=True, sends=(), returns=()),
    aten.softmax: Inside(classes.softmax, ("dim",), single=True, returns=(1,)),
    aten.log_softmax: Inside(classes.log_softmax, ("dim",), single=True, returns=(1,)),
    aten._softmax: Inside(classes.softmax, ("dim",), single=True, returns=(1,)),  # noqa: SLF001
    aten._log_softmax: Inside(classes.log_softmax, ("dim",), single=True, returns=(1,)),  # noqa: SLF001
    aten.scaled_dot_product_attention: Inside(
        attention.causal_attention, ("queries",), allows=_is_without_dropout, by_place=True, sends=(), returns=()
    ),
    aten.cross_entropy_loss: Inside(
        classes.cross_entropy, ("classes",), allows=_is_of_class_numbers, by_place=True, single=True, sends=(1, 1, 1), returns=()
    ),
}
"""Operator -> how it is cut inside."""


def inside_of(node: fx.Node, factor: str) -> Inside | None:
    """How a call is cut over a factor that its rule calls whole; None when it is not."""
    found = _INSIDE.get(packet(node.target))
    if found is None or not factor.startswith(found.factors) or not found.allows(bound_arguments(node)):
        return None
    return found
