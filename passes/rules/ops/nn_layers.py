"""Rules of normalization, recurrent layers, losses, and ops along dimensions, which depend on flags of the call."""

from __future__ import annotations

from collections.abc import Callable

from passes.graph.schemas import MEAN, NO_REDUCTION, SUM
from passes.rules.bind import MisfitError, dimension, dimensions, numbered, rank_and_dimension, whole, write
from passes.rules.call import Call, Operand
from passes.rules.loops import Reduction
from passes.rules.ops.indexing import all_whole

_NORMALIZED = "batch{0} channels space*{0}, channels, channels, channels, channels -> batch{0} channels space*{0}"
"""Normalization of each channel; ``{0}`` is the mark of the dimensions that statistics are computed over."""


def batch_norm(call: Call) -> str:
    """Normalize each channel by its whole batch in training; with running statistics it is elementwise."""
    if call["training"]:
        return _NORMALIZED.format("!")
    scales_only = call.get("weight") is not None and call.get("bias") is None
    return _NORMALIZED.format("") + ("; linear weight" if scales_only else "")


def instance_norm(call: Call) -> str:
    """Normalize each image by its own statistics. Updating running statistics needs the whole batch."""
    if not call["use_input_stats"]:
        return _NORMALIZED.format("")
    batch = "batch" if call["running_mean"] is None else "batch!"
    return f"{batch} channels space*!, channels, channels, channels, channels -> {batch} channels space*!"


def embedding(call: Call) -> str:
    """Look up rows of a table; with ``scale_grad_by_freq`` the backward counts all indices, so the batch is not cut."""
    batch = "batch*!" if call.get("scale_grad_by_freq") else "batch*"
    return f"vocab! embedding, {batch} -> {batch} embedding; linear weight"


def weight_norm(call: Call) -> str:
    """Normalize weights: ``g * v / norm(v)``, with norms over all dimensions but ``dim``."""
    rank = len(call.operand("v").shape)
    dim = None if call["dim"] == -1 else dimension(rank, call["dim"])
    term = numbered(rank, {index: "!" for index in range(rank) if index != dim})
    magnitudes = term if len(call.operand("g").shape) == rank else []
    return write([term, magnitudes], [term], "linear g")


def dropout(call: Call) -> str:
    """Elementwise; linear if nothing is dropped (otherwise two calls draw different masks)."""
    drops = call["train"] and call["p"] != 0
    return "..." if drops else "...; linear input"


def feature_dropout(call: Call) -> str:
    """Drop whole channels."""
    drops = call["train"] and call["p"] != 0
    return "batch channels space*! -> batch channels space*!" if drops else "...; linear input"


def prelu(call: Call) -> str:
    """Scale negative values by a slope for each channel, or one for all."""
    rank, weight_shape = len(call.operand("self").shape), call.operand("weight").shape
    term = ["batch", "channels", "space*"] if rank > 1 else ["channels"] * rank
    weight = ["1"] * len(weight_shape) if weight_shape in ((), (1,)) else ["channels"]
    return write([term, weight], [term])


def elementwise_loss(call: Call) -> str:
    """Elementwise on tensors that are broadcast together, then the mean or sum."""
    if call["reduction"] == NO_REDUCTION:
        return "..."
    reduction = {MEAN: "mean", SUM: "sum"}.get(call["reduction"])
    if reduction is None:
        raise MisfitError("an unknown reduction")
    return f"{', '.join(['dim*:' + reduction] * len(call.slots))} -> "


def classification(call: Call) -> str:
    """Cross entropy and negative log likelihood of ``(batch, classes, space*)``.

    Targets are class indices or probabilities. The mean over indices divides by the sum of the class weights of the targets that are not
    ignored, which means of parts do not give, so the batch is not cut. The mean over probabilities divides by their number.
    """
    logits, target = call.operand("self"), call.operand("target")
    probabilities = target.known_dtype.is_floating_point
    mark = {NO_REDUCTION: "", SUM: ":sum", MEAN: ":mean" if probabilities else "!"}.get(call["reduction"])
    if mark is None:
        raise MisfitError("an unknown reduction")
    batch, space = ([f"batch{mark}"], [f"space*{mark}"]) if len(logits.shape) > 1 else ([], [])
    logits_term, samples = [*batch, "classes!", *space], [*batch, *space]
    target_term = logits_term if probabilities else samples
    return write([logits_term, target_term, ["classes!"]], [samples if call["reduction"] == NO_REDUCTION else []])


def recurrent(call: Call) -> str:
    """Only the batch is cut, of inputs ``(length, batch, features)`` or batch first, and states ``(layers, batch, features)``."""
    if len(call.operand("input").shape) != 3 or "batch_first" not in call.arguments:
        return all_whole(call)  # no batch dimension
    order = ["batch", "length!"] if call["batch_first"] else ["length!", "batch"]
    states = call["hx"] if isinstance(call["hx"], tuple) else (call["hx"],)
    state_terms = [["layers!", "batch", f"hidden{index}!"] for index in range(len(states))]
    parameters = [whole(len(parameter.shape), name=f"weight{index}_") for index, parameter in enumerate(call["params"])]
    return write([[*order, "in!"], *state_terms, *parameters], [[*order, "out!"], *state_terms])


def recurrent_cell(call: Call) -> str:
    """Compute one step of a recurrent layer: only the batch is cut."""
    if len(call.operand("input").shape) != 2:
        return all_whole(call)  # no batch dimension
    states = call["hx"] if isinstance(call["hx"], tuple) else (call["hx"],)
    state_terms = [["batch", f"hidden{index}!"] for index in range(len(states))]
    weights = [["gates!", "in!"], ["gates!", "hidden0!"], ["gates!"], ["gates!"]]
    return write([["batch", "in!"], *state_terms, *weights], [["batch", f"hidden{index}!"] for index in range(len(call.results))])


def vector_loss(*names: str) -> Callable[[Call], str]:
    """Return the rule of a loss of vectors, the named parameters, whose last dimension is not cut; others have a number for each."""

    def rule(call: Call) -> str:
        mark = {NO_REDUCTION: "", MEAN: ":mean", SUM: ":sum"}[call["reduction"]]
        batch = f"batch*{mark}"
        terms = [[batch, "features!"] if name in names else [batch] for name, value in call.values if isinstance(value, Operand)]
        return write(terms, [["batch*"] if call["reduction"] == NO_REDUCTION else []])

    return rule


# -- operations along dimensions ---------------------------------------------------------------------------------------------------


def reduced(by: Reduction, *clauses: str) -> Callable[[Call], str]:
    """Return the rule of a reduction over the dimensions of the argument ``dim``, or all of them.

    sum(x, dim=1) of three dimensions    "dim0 dim1:sum dim2 -> dim0 dim2"

    Args:
        by: how the results of parts are combined.
        clauses: of the line.
    """

    def rule(call: Call) -> str:
        operand = call.operand("self", "input", "x")
        reduced_dims = set(dimensions(operand, call.get("dim")))
        mark = "!" if by == "whole" else f":{by}"
        before = numbered(len(operand.shape), dict.fromkeys(reduced_dims, mark))
        return write([before], [_without(before, reduced_dims, keepdim=call.get("keepdim", False))], *clauses)

    return rule


def _without(term: list[str], reduced_dims: set[int], *, keepdim: bool) -> list[str]:
    """Return a term without the reduced dimensions, or with ``1`` in their place."""
    return ["1" if index in reduced_dims else name for index, name in enumerate(term) if keepdim or index not in reduced_dims]


def along(name: str = "dim", *clauses: str) -> Callable[[Call], str]:
    """Return the rule of ops that keep the shape, and need one dimension whole for each element.

    softmax(x, dim=1) of three dimensions    "dim0 dim1! dim2 -> dim0 dim1! dim2"

    Args:
        name: the parameter that says which dimension.
        clauses: of the line.
    """

    def rule(call: Call) -> str:
        rank = len(call.operand("self", "input").shape)
        whole_dimension = call.get(name)
        if whole_dimension is None:
            raise MisfitError(f"no {name} is named")
        term = numbered(rank, {dimension(rank, whole_dimension): "!"})
        return write([term], [term], *clauses)

    return rule


def selected_along(call: Call) -> str:
    """Select elements of a dimension by their order, as ``topk``: it is not cut."""
    rank, dim = rank_and_dimension(call)
    before, after = numbered(rank, {dim: "!"}), numbered(rank, {dim: "'!"})
    if len(call.results[0]) != rank:
        del after[dim]
    return write([before], [after])


def difference(call: Call) -> str:
    """Subtract neighbours along a dimension, which is not cut."""
    rank, dim = rank_and_dimension(call)
    operand, result, prepend, append = (numbered(rank, {dim: mark}) for mark in ("!", "'!", "''!", "'''!"))
    return write([operand, prepend, append], [result], "linear self prepend append")


def transformed(call: Call) -> str:
    """Fourier transform: the transformed dimensions are not cut, and may change their size."""
    operand = call.operand("self")
    dims = dimensions(operand, call["dim"])
    before, after = (numbered(len(operand.shape), dict.fromkeys(dims, mark)) for mark in ("!", "'!"))
    return write([before], [after], "linear self")


def compared(call: Call) -> str:
    """Compare vectors of two broadcast operands along a dimension (default: the last), which is not cut."""
    ranks = [len(operand.shape) for operand in call.operands]
    dim = dimension(max(ranks), call.get("dim", -1))
    term = numbered(max(ranks), {dim: "!"})
    after = _without(term, {dim}, keepdim=call.get("keepdim", False))
    return write([term[max(ranks) - rank :] for rank in ranks], [after])


def glu(call: Call) -> str:
    """Gate one half of a dimension by the other; both may be cut equally."""
    rank, dim = rank_and_dimension(call)
    before, after = numbered(rank), numbered(rank)
    before[dim] = f"(half! dim{dim})"
    return write([before], [after])
