"""Normalisation, recurrent layers, losses: rules that depend on flags of the call."""

from __future__ import annotations

from collections.abc import Callable

from passes.graph.schemas import MEAN, NO_REDUCTION, SUM
from passes.rules.bind import MisfitError, dimension, dimensions, numbered, rank_and_dimension, whole, write
from passes.rules.call import Call, Operand
from passes.rules.loops import Reduction
from passes.rules.ops.indexing import everything

__all__ = [
    "along",
    "batch_norm",
    "classification",
    "compared",
    "difference",
    "dropout",
    "elementwise_loss",
    "embedding",
    "feature_dropout",
    "glu",
    "instance_norm",
    "prelu",
    "recurrent",
    "recurrent_cell",
    "reduced",
    "selected_along",
    "transformed",
    "vector_loss",
    "weight_norm",
]


_NORMALISED = "batch{0} channels space*{0}, channels, channels, channels, channels -> batch{0} channels space*{0}"


def batch_norm(call: Call) -> str:
    """In training each channel needs the statistics of its whole batch; with stored statistics it is elementwise."""
    return _NORMALISED.format("!" if call["training"] else "") + ("" if call["training"] else _stored(call))


def _stored(call: Call) -> str:
    """With stored statistics and neither mean nor bias the result would be linear; with them it is affine."""
    return "; linear weight" if call.get("weight") is not None and call.get("bias") is None else ""


def instance_norm(call: Call) -> str:
    """Each image for itself. Stored statistics that are updated are a mean over the batch."""
    if not call["use_input_stats"]:
        return _NORMALISED.format("")
    batch = "batch" if call["running_mean"] is None else "batch!"
    return f"{batch} channels space*!, channels, channels, channels, channels -> {batch} channels space*!"


def embedding(call: Call) -> str:
    """Rows of a table. Gradients that are scaled by how often a row was looked up need all indices."""
    batch = "batch*!" if call.get("scale_grad_by_freq") else "batch*"
    return f"vocab! embedding, {batch} -> {batch} embedding; linear weight"


def weight_norm(call: Call) -> str:
    """Directions divided by their norms over all dimensions but one, times magnitudes."""
    rank = len(call.operand("v").shape)
    kept = None if call["dim"] == -1 else dimension(rank, call["dim"])
    both = numbered(rank, {index: "!" for index in range(rank) if index != kept})
    magnitudes = both if len(call.operand("g").shape) == rank else []
    return write([both, magnitudes], [both], "linear g")


def dropout(call: Call) -> str:
    """Elementwise; linear where nothing is drawn (with a mask that is drawn, each call has its own)."""
    drawn = call["train"] and call["p"] != 0
    return "..." if drawn else "...; linear input"


def feature_dropout(call: Call) -> str:
    """A channel is dropped as a whole."""
    drawn = call["train"] and call["p"] != 0
    return "batch channels space*! -> batch channels space*!" if drawn else "...; linear input"


def prelu(call: Call) -> str:
    """A slope for each channel, or one for all."""
    rank = len(call.operand("self").shape)
    both = ["batch", "channels", "space*"] if rank > 1 else ["channels"] * rank
    one = call.operand("weight").shape in ((), (1,))
    return write([both, (["1"] if call.operand("weight").shape else []) if one else ["channels"]], [both])


def elementwise_loss(call: Call) -> str:
    """Between elements of tensors that are broadcast together; then their mean or sum."""
    if call["reduction"] == NO_REDUCTION:
        return "..."
    reduction = {MEAN: "mean", SUM: "sum"}.get(call["reduction"])
    if reduction is None:
        raise MisfitError("an unknown reduction")
    return f"{', '.join(['dim*:' + reduction] * len(call.slots))} -> "


def classification(call: Call) -> str:
    """Cross entropy and negative log likelihood of ``(batch, classes, space*)``.

    A mean over class numbers divides by how many are not ignored, weighted by class: means of parts do not tell that, so the batch is not
    cut. A mean over probabilities divides by their number.
    """
    source, target = call.operand("self"), call.operand("target")
    probabilities = target.known_dtype.is_floating_point
    mark = {NO_REDUCTION: "", SUM: ":sum", MEAN: ":mean" if probabilities else "!"}.get(call["reduction"])
    if mark is None:
        raise MisfitError("an unknown reduction")
    batch, space = ([f"batch{mark}"], [f"space*{mark}"]) if len(source.shape) > 1 else ([], [])
    classes = [*batch, "classes!", *space]
    picked = classes if probabilities else [*batch, *space]
    result = [*batch, *space] if call["reduction"] == NO_REDUCTION else []
    return write([classes, picked, ["classes!"]], [result])


def recurrent(call: Call) -> str:
    """``(length, batch, features)``, or the first two in the other order; states are ``(layers, batch, features)``."""
    source = call.operand("input")
    if len(source.shape) != 3 or "batch_first" not in call.arguments:
        return everything(call)
    order = ["batch", "length!"] if call["batch_first"] else ["length!", "batch"]
    states = call["hx"] if isinstance(call["hx"], tuple) else (call["hx"],)
    state_terms = [["layers!", "batch", f"hidden{index}!"] for index in range(len(states))]
    parameters = [whole(len(each.shape), name=f"weight{index}_") for index, each in enumerate(call["params"])]
    return write([[*order, "in!"], *state_terms, *parameters], [[*order, "out!"], *state_terms])


def recurrent_cell(call: Call) -> str:
    """One step: ``(batch, features)``."""
    if len(call.operand("input").shape) != 2:
        return everything(call)
    states = call["hx"] if isinstance(call["hx"], tuple) else (call["hx"],)
    state_terms = [["batch", f"hidden{index}!"] for index in range(len(states))]
    weights = [["gates!", "in!"], ["gates!", "hidden0!"], ["gates!"], ["gates!"]]
    return write([["batch", "in!"], *state_terms, *weights], [["batch", f"hidden{index}!"] for index in range(len(call.results))])


def vector_loss(*names: str) -> Callable[[Call], str]:
    """Between vectors: the last dimension is needed whole.

    Args:
        names: the parameters that hold vectors; others hold a number for each.
    """

    def rule(call: Call) -> str:
        mark = {NO_REDUCTION: "", MEAN: ":mean", SUM: ":sum"}[call["reduction"]]
        batch = f"batch*{mark}"
        terms = [[batch, "features!"] if name in names else [batch] for name, value in call.values if isinstance(value, Operand)]
        return write(terms, [["batch*"] if call["reduction"] == NO_REDUCTION else []])

    return rule


# -- operations along dimensions ---------------------------------------------------------------------------------------------------


def reduced(by: Reduction, *clauses: str) -> Callable[[Call], str]:
    """The named dimensions leave, or all of them.

    Args:
        by: how the results of parts are combined.
        clauses: of the line.
    """

    def rule(call: Call) -> str:
        source = call.operand("self", "input", "x")
        leaving = set(dimensions(source, call.get("dim")))
        mark = "!" if by == "whole" else f":{by}"
        before = numbered(len(source.shape), dict.fromkeys(leaving, mark))
        keep = call.get("keepdim", False)
        after = [name if index not in leaving else "1" for index, name in enumerate(before) if keep or index not in leaving]
        return write([before], [after], *clauses)

    return rule


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
    """Some elements of a dimension, in an order of their own: ``topk``, ``kthvalue``."""
    rank, chosen = rank_and_dimension(call)
    before, after = numbered(rank, {chosen: "!"}), numbered(rank, {chosen: "'!"})
    if len(call.results[0]) == rank:
        return write([before], [after])
    return write([before], [[name for index, name in enumerate(after) if index != chosen]])


def difference(call: Call) -> str:
    """Differences of neighbours; what is put in front or behind has a size of its own."""
    rank, chosen = rank_and_dimension(call)
    own, result, front, behind = (numbered(rank, {chosen: f"{chr(39) * primes}!"}) for primes in range(4))
    return write([own, front, behind], [result], "linear self prepend append")


def transformed(call: Call) -> str:
    """Fourier transforms: the size of a transformed dimension may change. All dimensions when none is named."""
    source = call.operand("self")
    chosen = dimensions(source, call["dim"])
    before, after = (numbered(len(source.shape), dict.fromkeys(chosen, mark)) for mark in ("!", "'!"))
    return write([before], [after], "linear self")


def compared(call: Call) -> str:
    """Two broadcast operands are compared along one dimension, the last when none is named."""
    ranks = [len(operand.shape) for operand in call.operands]
    chosen = dimension(max(ranks), call.get("dim", -1))
    names = numbered(max(ranks), {chosen: "!"})
    after = [name if index != chosen else "1" for index, name in enumerate(names) if index != chosen or call.get("keepdim", False)]
    return write([names[max(ranks) - rank :] for rank in ranks], [after])


def glu(call: Call) -> str:
    """Two halves of a dimension, one gates the other."""
    rank, chosen = rank_and_dimension(call)
    before, after = numbered(rank), numbered(rank)
    before[chosen] = f"(half! dim{chosen})"
    return write([before], [after])
