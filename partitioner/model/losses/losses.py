"""Decide how a step computes its loss: inspect each loss function once, and let all ranks agree on the result."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partitioner.lowering.lowering import Lowering
from partitioner.model.losses.evidence import contradiction
from partitioner.model.losses.form import LossDependence, LossFunction, ResultSizes, loss_dependence
from partitioner.model.losses.proof import Proof, prove
from partitioner.model.losses.reachable_state import loss_key
from partitioner.runtime.arguments import BoundInputs, check_target
from partitioner.runtime.base import Runtime
from passes.emit.programs import LossForm, LossReduction
from passes.ir.comm.microbatch import microbatch_sizes, split_target
from passes.ir.errors import ConfigError, PartitionError
from passes.ir.graph import ModelGraph, Results
from passes.ir.torch_private import pytree

__all__ = ["Losses", "PreparedLoss", "check_loss"]

LoweringFor = Callable[..., tuple[int, Lowering]]
"""``PartitionedModel.lowering_for``."""

_BATCH_REMEDY = 'pass loss_reduction="batch": the loss is then taken of all rows at once, and is exact'


@dataclass(frozen=True)
class PreparedLoss:
    """How one training step computes its loss.

    Attributes:
        n_microbatches: of the batch.
        lowering: the model, lowered for this loss.
        results: what ranks return to the loss.
        own: whether the model returns the loss.
        in_parts: whether means that the model returns are sums of parts.
        outputs: nodes of the model's results that the loss depends on differentiably.
        form: what programs know of it.
        extra: rank of this process -> what its program takes besides inputs of the model.
    """

    n_microbatches: int
    lowering: Lowering
    results: Results
    own: bool
    in_parts: bool
    outputs: frozenset[str]
    form: LossForm
    extra: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class _Asked:
    """The arguments of a training step."""

    inputs: BoundInputs
    target: Any
    loss_fn: LossFunction | None
    reduction: LossReduction


@dataclass(frozen=True)
class _Verdict:
    """How the loss of all rows follows from that of parts.

    Attributes:
        kind: ``"mean"``: weighted by their rows; ``"sum"``: added; ``"counted"``: weighted by the targets that count; ``"batch"``: it is
            taken of all rows; ``"neither"``: values show that it is not what was said.
        problem: what they show.
        counts: of each microbatch, the targets that count.
        per_row: what ranks must agree on besides.
    """

    kind: str
    problem: str = ""
    counts: tuple[float, ...] = ()
    per_row: str = ""


def check_loss(loss_fn: object, loss_reduction: object) -> None:
    """Raise ConfigError for a loss function that cannot be called, or a reduction that there is not."""
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is {loss_fn!r}, which cannot be called",
            remedy="pass a function of the model's output and the target: loss_fn=torch.nn.functional.cross_entropy",
        )
    if loss_reduction not in ("mean", "sum", "batch"):
        raise ConfigError(f"there is no loss_reduction {loss_reduction!r}", remedy='choose "mean", "sum" or "batch"')


class Losses:
    """What is known of losses."""

    def __init__(self, runtime: Runtime, graph: ModelGraph) -> None:
        self._runtime = runtime
        self._graph = graph
        self._known: dict[Any, LossDependence] = {}
        self._proofs: dict[Any, Proof] = {}
        self._contradictions: dict[tuple[Proof, tuple[int, ...]], str | None] = {}
        self._warned: set[Proof] = set()

    @property
    def _here(self) -> int:
        return self._runtime.local_ranks[0]

    def prepare(
        self, inputs: BoundInputs, target: Any, loss_fn: LossFunction | None, reduction: LossReduction, lowering_for: LoweringFor
    ) -> PreparedLoss:
        """Decide how a step computes its loss.

        Raises:
            ConfigError: the loss is no number, is not what ``reduction`` says, or the target does not fit.
        """
        asked = _Asked(inputs, target, loss_fn, reduction)
        mixed = any(output.combine == "mixed" for output in self._traced(lambda: lowering_for(inputs.batch)[1]).outputs)
        whole = loss_fn is not None and (mixed or reduction == "batch")
        prepared = self._prepare(asked, lowering_for, "whole" if mixed or whole else "loss")
        if loss_fn is None or whole or prepared.own or not _is_cut(prepared):
            return prepared
        verdict = self._checked(asked, prepared)
        if verdict.kind == "batch":
            return self._prepare(asked, lowering_for, "whole")
        if verdict.kind != "counted":
            return prepared
        weights = self._weights(asked, prepared, verdict.counts)
        extra = {rank: {**given, "loss_weights": weights.get(rank)} for rank, given in prepared.extra.items()}
        return replace(prepared, form=replace(prepared.form, is_weighted=True), extra=extra)

    def _traced(self, lowering: Callable[[], Lowering]) -> ModelGraph:
        """The model as it was traced for a batch; one that is fixed to a size may compute something else for another."""
        return self._graph if self._graph.batch is not None else lowering().whole

    def _prepare(self, asked: _Asked, lowering_for: LoweringFor, results: Results) -> PreparedLoss:
        batch = asked.inputs.batch
        of_all_rows = results == "whole" and asked.loss_fn is not None
        if asked.loss_fn is None:
            count, lowering = lowering_for(batch)
        else:
            count, lowering = lowering_for(batch, in_parts=of_all_rows, results=results)
        check_target(asked.target, lowering.rows, batch, count, results)
        targets = {
            rank: asked.target if results == "whole" else lowering.rows.of_target(asked.target, batch, rank)
            for rank in self._runtime.local_ranks
        }
        dependence = self._dependence(asked, lowering, targets[self._here], None if of_all_rows else count)
        outputs, reduction = dependence.outputs, "batch" if of_all_rows else asked.reduction
        if dependence.own is not None:
            # The model's own loss: its graph knows better than a weight per row what each microbatch counts.
            place = lowering.graph.returned.index(dependence.own)
            count, lowering = lowering_for(batch)
            own = lowering.graph.returned[place]
            outputs = frozenset({own}) if outputs else outputs
            results, reduction = "rows", "sum" if lowering.graph.combine(own) == "sum" else "mean"
        form = LossForm(reduction, dependence.dtype)
        extra = {rank: {"target": targets[rank], "loss_fn": asked.loss_fn} for rank in self._runtime.local_ranks}
        own_loss = dependence.own is not None
        return PreparedLoss(count, lowering, results, own_loss, own_loss or of_all_rows, outputs, form, extra)

    # -- what it depends on --------------------------------------------------------------------------------------------------------

    def _dependence(self, asked: _Asked, lowering: Lowering, target: Any, n_microbatches: int | None) -> LossDependence:
        """What a loss depends on. A rank that computes no loss may be without a target: the others tell it.

        Args:
            target: for the rows of this rank, or for all where results are whole.
            n_microbatches: None: the loss takes all rows at once.
        """
        known, error = None, None
        try:
            known = self._own_dependence(asked, lowering, target, n_microbatches)
        except Exception as raised:
            if target is not None or not lowering.collectors.isdisjoint(self._runtime.local_ranks):
                raise
            error = raised
        told = self._runtime.agree("dependence of the loss", None if known is None else _text(known), in_step=True)
        if told is None:
            assert error is not None
            raise error
        return _dependence(told)

    def _own_dependence(self, asked: _Asked, lowering: Lowering, target: Any, n_microbatches: int | None) -> LossDependence:
        wanted = asked.inputs.requiring_gradient
        leaves, tree = pytree.tree_flatten(target)
        kinds = (str(tree), *(leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves))
        # A batch that is not cut has other names.
        key = (loss_key(asked.loss_fn), wanted, tuple(lowering.graph.returned), n_microbatches is None, kinds)
        if key in self._known:
            return self._known[key]
        device = self._runtime.devices[self._here]
        requiring = lowering.requiring(wanted)
        batch = asked.inputs.batch
        local = batch // lowering.rows.count

        def look(part: Any, sizes: ResultSizes) -> LossDependence:
            return loss_dependence(lowering.graph, requiring, asked.loss_fn, part, sizes, device)

        of_microbatch = microbatch_sizes(local, n_microbatches or 1)
        if n_microbatches is None:
            repeats = local // lowering.graph.batch_size if lowering.graph.batch is None else 1
            part, sizes = target, ResultSizes(local, repeats, batch)
        else:
            part, sizes = split_target(target, of_microbatch)[0], ResultSizes(of_microbatch[0], 1, of_microbatch[0])
        try:
            self._known[key] = look(part, sizes)
        except PartitionError:
            raise
        except Exception as error:
            of = f"{sizes.rows} of {batch} rows" if sizes.rows < batch else f"{batch} rows"
            hint = "call it as train_step does: loss_fn(model(x), target)"
            can_ask = sizes.rows < batch and lowering.graph.batch is not None
            if can_ask and _succeeds(lambda: look(asked.target, ResultSizes(batch, 1, batch))):
                hint = f"it takes all {batch} rows: {_BATCH_REMEDY}"
            raise ConfigError(f"loss_fn fails on outputs of {of}: {type(error).__name__}: {error}", remedy=hint) from error
        return self._known[key]

    # -- whether it is what it is said to be ---------------------------------------------------------------------------------------

    def _checked(self, asked: _Asked, prepared: PreparedLoss) -> _Verdict:
        """Return how the loss of the batch follows from its parts, agreed by all ranks; ``"batch"`` if nothing is proved.

        Raises:
            ConfigError: the loss contradicts the ``loss_reduction`` of the user.
        """
        proof = self._proof(asked, prepared)
        found = None if proof is None else self._verdict(asked, prepared, proof)
        told = self._runtime.agree("reduction of the loss", None if found is None else found.kind + found.per_row, in_step=True)
        kind, said = (told or "").partition(" ")[0], asked.reduction
        if kind in ("mean", "sum") and kind != said:
            hint = "leave loss_reduction out" if kind == "mean" else 'pass loss_reduction="sum"'
            raise ConfigError(f"loss_fn is a {kind} over the rows of the batch, and loss_reduction says a {said}", remedy=hint)
        if kind == "neither":
            problem = "a rank that has the target says why" if found is None else found.problem
            raise ConfigError(f"loss_fn is no {said} over the rows of the batch: {problem}", remedy=_BATCH_REMEDY)
        return found or _Verdict(kind)

    def _proof(self, asked: _Asked, prepared: PreparedLoss) -> Proof | None:
        """Return the proved form of the loss; None on a rank that has no target and needs none."""
        target, lowering = prepared.extra[self._here]["target"], prepared.lowering
        if target is None and lowering.collectors.isdisjoint(self._runtime.local_ranks):
            return None
        local = asked.inputs.batch // lowering.rows.count
        shapes = tuple(_kind_of_leaf(leaf, local) for leaf in pytree.tree_leaves(target))
        key = (loss_key(asked.loss_fn, exact=False), tuple(lowering.graph.returned), shapes)
        if key not in self._proofs:
            assert asked.loss_fn is not None
            device = self._runtime.devices[self._here]
            self._proofs[key] = prove(self._traced(lambda: lowering), lowering.graph, asked.loss_fn, target, local, device)
        return self._proofs[key]

    def _verdict(self, asked: _Asked, prepared: PreparedLoss, proof: Proof) -> _Verdict:
        """Return how the loss of the batch follows from its parts: proved, or else tested on the step's target and random outputs."""
        rows = prepared.lowering.rows
        is_local = rows.inputs == "local" and rows.count > 1
        sizes = microbatch_sizes(asked.inputs.batch // rows.count, prepared.n_microbatches) * (1 if is_local else rows.count)
        if proof.kind == "counted" and asked.reduction == "mean":
            counts = [counter.counts(asked.target, sizes) for counter in proof.counters]
            follow_rows = all(count * sizes[0] == each[0] * size for each in counts for count, size in zip(each, sizes, strict=True))
            per_row = "".join(f" {each[0] / sizes[0]}" for each in counts) if is_local and not proof.is_sole else ""
            if proof.is_sole or follow_rows:
                return _Verdict("counted", counts=counts[0], per_row=per_row)
            reason = "it adds means over unlike numbers of targets"
        elif proof.kind is not None and not (proof.is_fitted and self._contradicted(asked, prepared, proof, sizes)):
            return _Verdict("mean" if proof.kind == "counted" else proof.kind)
        else:
            reason = proof.reason
        if is_local:
            return _Verdict("neither", f'{reason}; with inputs="local" no rank has the target of all rows')
        if (found := self._contradicted(asked, prepared, proof, sizes)) is not None:
            return _Verdict("neither", f"{found} ({reason})" if reason else found)
        if proof not in self._warned:
            self._warned.add(proof)
            warnings.warn(
                f"loss_fn cannot be proved to be a {asked.reduction} over rows ({reason}), so it is taken of all rows at once: "
                'each rank holds the activations of all microbatches. loss_reduction="batch" says so without this warning',
                stacklevel=6,
            )
        return _Verdict("batch")

    def _contradicted(self, asked: _Asked, prepared: PreparedLoss, proof: Proof, sizes: tuple[int, ...]) -> str | None:
        """Return how values contradict the stated reduction; computed once for each division of a batch."""
        if (proof, sizes) not in self._contradictions:
            assert asked.loss_fn is not None
            device = self._runtime.devices[self._here]
            found = contradiction(prepared.lowering.graph, asked.loss_fn, asked.target, sizes, asked.reduction, device)
            self._contradictions[proof, sizes] = found
        return self._contradictions[proof, sizes]

    def _weights(self, asked: _Asked, prepared: PreparedLoss, counts: tuple[float, ...]) -> Mapping[int, tuple[float, ...]]:
        """For each rank that computes a loss, what each of its microbatches counts: its part of the targets that are not ignored.

        Args:
            counts: of the microbatches of all ranks, or of this process's rows; empty on a rank that has no target.
        """
        rows, batch = prepared.lowering.rows, asked.inputs.batch
        sizes = microbatch_sizes(batch // rows.count, prepared.n_microbatches)
        is_local = rows.inputs == "local" and rows.count > 1
        total = sum(counts)
        if is_local:
            collectors = prepared.lowering.collectors
            own = torch.tensor(total if self._here in collectors else 0.0, dtype=torch.float64, device=self._runtime.devices[self._here])
            total = float(self._runtime.reduce(own, "sum")) * rows.count / len(collectors)
        if not total:  # the loss is no number; so it is in one piece
            counts, total = tuple(map(float, sizes * (1 if is_local else rows.count))), float(batch)
        weights = tuple(count / total for count in counts)
        starts = {rank: 0 if is_local else rows.place(rank) * len(sizes) for rank in self._runtime.local_ranks}
        return {rank: weights[start : start + len(sizes)] for rank, start in starts.items()}


def _is_cut(prepared: PreparedLoss) -> bool:
    return prepared.n_microbatches > 1 or prepared.lowering.rows.count > 1


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001  whatever a user's loss raises
        return False
    return True


def _kind_of_leaf(leaf: object, rows: int) -> Any:
    """Return the key of one leaf of a target: a proof holds for all targets with equal keys (dtype and shape without samples)."""
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)
    has_rows = leaf.dim() > 0 and leaf.shape[0] == rows
    return leaf.dtype, has_rows, tuple(leaf.shape[1:] if has_rows else leaf.shape)


def _text(dependence: LossDependence) -> str:
    """Encode a dependence as one line, to send it to the ranks that compute no loss."""
    dtype = str(dependence.dtype).removeprefix("torch.")
    return " ".join([f"{dtype}:", *sorted(dependence.outputs), *([f"= {dependence.own}"] if dependence.own is not None else [])])


def _dependence(text: str) -> LossDependence:
    dtype, _, rest = text.partition(":")
    outputs, _, own = rest.partition("=")
    return LossDependence(frozenset(outputs.split()), getattr(torch, dtype), own.strip() or None)
