"""Decide how a training step computes its loss: inspect each loss function once, and let all ranks agree on the result."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from partitioner.model.effects.left_attributes import LeftAttributes, attribute_results, loss_with_attributes
from partitioner.model.losses.form import LossDependence, LossFunction, ResultSizes, loss_dependence, refuse_shared_memory
from partitioner.model.losses.proof import Counter, Proof, has_rows, prove
from partitioner.model.losses.reachable_state import loss_key, reads_tensors
from partitioner.model.losses.target_rows import rows_first
from partitioner.options.batch_rows import RowParts
from partitioner.runtime.arguments import BoundInputs, check_target
from partitioner.runtime.base import Runtime
from partitioner.specialize.programs import Programs
from partitioner.specialize.request import Request
from partitioner.specialize.sharded_model import ShardedModel
from partitioner.tracing.inputs.batch_dims import BatchDims
from passes.emit.programs import LossForm, LossReduction
from passes.ir.comm.microbatch import microbatch_sizes, split_target
from passes.ir.errors import ConfigError, PartitionError, Place, level_of_caller
from passes.ir.graph import Attribute, ModelGraph, Output, Results
from passes.ir.torch_private import pytree
from passes.normalize.loss_alone import results_of_step

_BATCH_REMEDY = 'pass loss_reduction="batch": the loss is then taken of all rows at once, and is exact'


@dataclass(frozen=True)
class PreparedLoss:
    """How one training step computes its loss.

    Attributes:
        request: of a forward of the batch, with the results that the loss reads.
        sharded: the model, sharded for this request.
        options: ``in_parts``, ``results`` and ``kept``, by which ``Programs.request`` gives the same for a batch of another size.
        is_own_loss: whether the model itself returns the loss.
        outputs: nodes of the model's results that the loss depends on differentiably.
        form: reduction and dtype of the loss, for the programs.
        extra: rank of this process -> arguments of its program besides inputs of the model.
        takes_whole_target: whether each rank gets the target of the batch, or that of its own rows.
        combination: how the loss of the batch follows from its parts; None: there is one part, or the loss takes all rows.
        questions: what ranks agreed on, with the answers of this process, if a step of the same kind is prepared alike but for what
            follows from values (``Losses.again``); else None.
    """

    request: Request
    sharded: ShardedModel
    options: Mapping[str, Any]
    is_own_loss: bool
    outputs: frozenset[str]
    form: LossForm
    extra: Mapping[int, Mapping[str, Any]]
    takes_whole_target: bool
    combination: str | None = None
    questions: tuple[tuple[str, object], ...] | None = None


@dataclass(frozen=True)
class _Step:
    """The arguments of a training step, and the indices of the results in attributes of modules that its loss reads.

    Attributes:
        asked: receives the questions on which ranks agree, with the answers of this process.
    """

    inputs: BoundInputs
    target: Any
    loss_fn: LossFunction | None
    reduction: LossReduction
    attributes: tuple[int, ...] = ()
    asked: list[tuple[str, object]] = field(default_factory=list)


@dataclass(frozen=True)
class _Combination:
    """How the loss of the batch is combined from the losses of its parts: the microbatches of all ranks.

    Attributes:
        kind: ``"mean"``: weighted by rows; ``"sum"``: added; ``"counted"``: weighted by the targets that count; ``"batch"``: not
            at all, the loss takes all rows at once; ``"neither"``: none of these is proved.
        problem: for ``"neither"``, the reason.
        counts: for ``"counted"``, the targets of each microbatch that are not ignored, or the sum of their weights.
        counter: of these counts; None on a rank that has no target.
        targets_per_row: text that all ranks must agree on besides ``kind``.
    """

    kind: str
    problem: str = ""
    counts: tuple[float, ...] = ()
    counter: Counter | None = None
    targets_per_row: str = ""


def check_loss(loss_fn: object, loss_reduction: object) -> None:
    """Raise ConfigError for a loss function that cannot be called, or an unknown reduction."""
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is {loss_fn!r}, which cannot be called",
            remedy="pass a function of the model's output and the target: loss_fn=torch.nn.functional.cross_entropy",
        )
    if loss_reduction not in ("mean", "sum", "batch"):
        raise ConfigError(f"there is no loss_reduction {loss_reduction!r}", remedy='choose "mean", "sum" or "batch"')


class Losses:
    """Decides how training steps compute their loss. Caches the inspection of each loss function.

    Args:
        runtime: runs the programs.
        graph: the model.
        rows: of the batch that each process passes.
        left: the attributes that calls leave on modules, which a loss function may read.
        batch_dims: the batch dimension of the target, and of inputs, by name.
    """

    def __init__(self, runtime: Runtime, graph: ModelGraph, rows: RowParts, left: LeftAttributes, batch_dims: BatchDims) -> None:
        self._runtime = runtime
        self._graph = graph
        self._rows = rows
        self._left = left
        self._batch_dims = batch_dims
        self._attributes: dict[Any, tuple[int, ...]] = {}
        self._dependences: dict[Any, LossDependence] = {}
        self._proofs: dict[Any, Proof] = {}
        self._warned: set[Proof] = set()

    @property
    def _here(self) -> int:
        """The rank whose results this process returns."""
        return self._runtime.local_ranks[0]

    def prepare(
        self, inputs: BoundInputs, target: Any, loss_fn: LossFunction | None, reduction: LossReduction, programs: Programs
    ) -> PreparedLoss:
        """Decide how a step computes its loss: from the parts of the batch if that gives the same number, else from all rows at once.

        Raises:
            ConfigError: the loss is no number, is not what ``reduction`` says, or the target does not fit.
        """
        given = target, loss_fn
        graph = self._traced(inputs.batch, lambda: programs.sharded(programs.request(inputs.batch)))
        if loss_fn is not None:
            target, loss_fn = rows_first(self._batch_dims, graph, target, loss_fn, self._rows.rows_passed(inputs.batch))
        attributes = self._read_attributes(graph, inputs, target, loss_fn)
        if attributes and loss_fn is not None:
            loss_fn = functools.partial(loss_with_attributes, self._left, self._graph.edits, attributes, loss_fn)
        step = _Step(inputs, target, loss_fn, reduction, attributes)
        mixed = [graph.outputs[place] for place in attributes if graph.outputs[place].combine == "mixed"]
        if mixed and programs.request(inputs.batch).n_microbatches > 1:
            raise ConfigError(
                f"loss_fn reads {mixed[0].label}, which microbatches cannot compute: {mixed[0].reason}",
                place=Place(module=mixed[0].name.rpartition(".")[0]),
                remedy="partition with n_microbatches=1",
            )
        mixes_rows = bool(mixed) or any(output.combine == "mixed" for output in graph.leaves)
        takes_all_rows = loss_fn is not None and (mixes_rows or reduction == "batch")
        prepared = self._prepare(step, programs, "whole" if mixes_rows or takes_all_rows else "loss")
        is_cut = prepared.request.n_microbatches > 1 or prepared.sharded.rows.count > 1
        if loss_fn is not None and is_cut and not (takes_all_rows or prepared.is_own_loss):
            prepared = self._combined(step, prepared, programs)
        is_alike = step.target is given[0] and step.loss_fn is given[1] and not attribute_results(graph)
        is_known = all(answer is not None for _, answer in step.asked)
        return replace(prepared, questions=tuple(step.asked) if is_alike and is_known and prepared.combination != "batch" else None)

    def again(
        self,
        known: PreparedLoss,
        inputs: BoundInputs,
        extra: Mapping[int, Mapping[str, Any]],
        target: Any,
        reduction: LossReduction,
        programs: Programs,
    ) -> PreparedLoss:
        """Return how a step computes its loss that is like an earlier one but for the targets that count.

        Args:
            extra: rank of this process -> its target and the loss function.
            target: of the batch.
        """
        step = _Step(inputs, target, extra[self._here]["loss_fn"], reduction)
        return self._combined(step, replace(known, extra=extra), programs)

    def _combined(self, step: _Step, prepared: PreparedLoss, programs: Programs) -> PreparedLoss:
        """Return how a loss is combined from those of the parts of the batch; from all rows at once if there is no other way."""
        combination = self._agreed_combination(step, prepared)
        if combination.kind == "batch":
            return replace(self._prepare(step, programs, "whole"), combination="batch")
        prepared = replace(prepared, combination=combination.kind)
        if combination.kind != "counted":
            return prepared
        step.asked.pop()  # the answer follows from the values of the target
        weights = self._weights(step, prepared, combination)
        extra = {rank: {**arguments, "loss_weights": weights.get(rank)} for rank, arguments in prepared.extra.items()}
        return replace(prepared, form=replace(prepared.form, is_weighted=True), extra=extra)

    def _traced(self, batch: int, sharded: Callable[[], ShardedModel]) -> ModelGraph:
        """Return the model as it was traced for a batch, which may differ from the plan's graph if that does not serve it."""
        return self._graph if self._graph.serves(batch) else sharded().whole

    def _read_attributes(self, graph: ModelGraph, inputs: BoundInputs, target: Any, loss_fn: LossFunction | None) -> tuple[int, ...]:
        """Return the indices of the results in attributes of modules that a loss reads; every rank must call it.

        It is called once on results of zeros. A rank without a target learns them from the others.
        """
        places = attribute_results(graph)
        if not places or loss_fn is None:
            return ()
        key = loss_key(loss_fn)
        if key not in self._attributes:
            packed = functools.partial(loss_with_attributes, self._left, graph.edits, places, loss_fn)
            found = None
            if target is not None or self._runtime.n_ranks == len(self._runtime.local_ranks):
                batch = self._rows.rows_passed(inputs.batch)
                with self._left.recorded() as read:
                    self._inspect(graph, frozenset(), packed, target, ResultSizes(batch, 1, batch), batch)
                found = " ".join(str(place) for place in places if _key_of(graph.outputs[place]) in read)
            agreed = self._runtime.agree("attributes that the loss reads", found, in_step=True)
            self._attributes[key] = tuple(int(place) for place in str(agreed or "").split())
        return self._attributes[key]

    def _prepare(self, step: _Step, programs: Programs, results: Results) -> PreparedLoss:
        """Shard the model for a loss that takes ``results`` of each rank, and find the results that the loss depends on.

        A loss that the model itself returns is lowered for the model's own results: it is combined exactly over parts of the batch. It is
        the only result, unless a loss_fn picks it, which may look at others.
        """
        batch = step.inputs.batch
        takes_all_rows = results == "whole" and step.loss_fn is not None
        kept = results_of_step(self._graph, step.attributes, has_own_loss=step.loss_fn is None)
        own: dict[str, Any] = {"kept": kept}
        options = own if step.loss_fn is None else {"in_parts": takes_all_rows, "results": results, "kept": kept}
        request = programs.request(batch, **options)
        sharded = programs.sharded(request)
        check_target(step.target, sharded.rows, batch, request.n_microbatches, results)
        targets = {
            rank: step.target if results == "whole" else sharded.rows.target_of_rank(step.target, batch, rank)
            for rank in self._runtime.local_ranks
        }
        dependence = self._agreed_dependence(step, sharded, targets[self._here], None if takes_all_rows else request.n_microbatches)
        extra = {rank: {"target": targets[rank], "loss_fn": step.loss_fn} for rank in self._runtime.local_ranks}
        if dependence.own is None:
            form = LossForm(
                "batch" if takes_all_rows else step.reduction, dependence.dtype, draws=dependence.draws, changes=dependence.changes
            )
            return PreparedLoss(request, sharded, options, False, dependence.outputs, form, extra, results == "whole")
        index = sharded.graph.returned.index(dependence.own)
        request = programs.request(batch, **own)
        sharded = programs.sharded(request)
        loss = sharded.graph.returned[index]
        outputs = frozenset({loss}) if dependence.outputs else frozenset[str]()  # without outputs, the loss has no gradient
        form = LossForm("sum" if sharded.graph.combine(loss) == "sum" else "mean", dependence.dtype)
        return PreparedLoss(request, sharded, own, True, outputs, form, extra, results == "whole")

    def _agreed_dependence(self, step: _Step, sharded: ShardedModel, target: Any, n_microbatches: int | None) -> LossDependence:
        """Return which results the loss depends on. A rank that computes no loss and has no target learns it from the others.

        ``target`` is for the rows of this rank; if ``n_microbatches`` is None, the loss takes all rows at once, and it is for all.
        """
        text = None
        try:
            text = _encode_dependence(self._local_dependence(step, sharded, target, n_microbatches))
        except ConfigError:  # where a loss needs a target that this rank has no need of, the others say the answer
            if target is not None or not sharded.collectors.isdisjoint(self._runtime.local_ranks):
                raise
        agreed = self._agreed(step, "dependence of the loss", text)
        assert agreed is not None  # a collector has answered
        return _decode_dependence(agreed)

    def _local_dependence(self, step: _Step, sharded: ShardedModel, target: Any, n_microbatches: int | None) -> LossDependence:
        """Return which results the loss of this rank depends on, inspected on the first microbatch, or on all rows; cached."""
        leaves, tree = pytree.tree_flatten(target)
        kinds = (str(tree), *(leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves))
        # The names of results are part of the key: they differ where the batch is not cut.
        names, requiring = tuple(sharded.graph.returned), sharded.requiring(step.inputs.requiring_gradient)
        key = (loss_key(step.loss_fn), requiring, names, n_microbatches is None, kinds)
        if key not in self._dependences:
            part, sizes = _inspected_part(sharded, target, step.inputs.batch, n_microbatches)
            self._dependences[key] = self._inspect(sharded.graph, requiring, step.loss_fn, part, sizes, step.inputs.batch)
            if self._dependences[key].changes:
                refuse_shared_memory(self._traced(step.inputs.batch, lambda: sharded))
        return self._dependences[key]

    def _inspect(
        self, graph: ModelGraph, requiring: frozenset[str], loss_fn: LossFunction | None, target: Any, sizes: ResultSizes, batch: int
    ) -> LossDependence:
        """Call the loss on results of these sizes, of a batch of ``batch`` rows; raise ConfigError, with a remedy, if it fails."""
        try:
            return loss_dependence(graph, requiring, loss_fn, target, sizes, self._runtime.devices[self._here])
        except PartitionError:
            raise
        except Exception as error:
            rows = f"{sizes.rows} of {batch} rows" if sizes.rows < batch else f"{batch} rows"
            of_all_rows = f"; if it takes all {batch} rows, {_BATCH_REMEDY}" if sizes.rows < batch else ""
            without = "; without target= the second argument is None" if target is None else ""
            raise ConfigError(
                f"loss_fn fails on outputs of {rows}: {type(error).__name__}: {error}",
                remedy=f"call it as train_step does, loss_fn(model(x), target){without}{of_all_rows}",
            ) from error

    def _agreed(self, step: _Step, question: str, answer: str | None) -> str | None:
        """Return the answer of all ranks."""
        step.asked.append((question, answer))
        return self._runtime.agree(question, answer, in_step=True)

    def _agreed_combination(self, step: _Step, prepared: PreparedLoss) -> _Combination:
        """Return how the loss of the batch is combined, agreed by all ranks; raise ConfigError if it is not the stated reduction."""
        proof = self._proof(step, prepared)
        local = None if proof is None else self._local_combination(step, prepared, proof)
        text = None if local is None else local.kind + local.targets_per_row
        agreed = self._agreed(step, "reduction of the loss", text)
        kind, stated = (agreed or "").partition(" ")[0], step.reduction
        if kind in ("mean", "sum") and kind != stated:
            hint = "leave loss_reduction out" if kind == "mean" else 'pass loss_reduction="sum"'
            raise ConfigError(f"loss_fn is a {kind} over the rows of the batch, and loss_reduction says a {stated}", remedy=hint)
        if kind == "neither":
            problem = "a rank that has the target says why" if local is None else local.problem
            raise ConfigError(f"loss_fn is not proved to be a {stated} over the rows of the batch: {problem}", remedy=_BATCH_REMEDY)
        return local or _Combination(kind)

    def _proof(self, step: _Step, prepared: PreparedLoss) -> Proof | None:
        """Return the proved form of the loss; None on a rank that has no target and needs none."""
        target, sharded = prepared.extra[self._here]["target"], prepared.sharded
        if target is None and sharded.collectors.isdisjoint(self._runtime.local_ranks):
            return None
        rows_of_rank = step.inputs.batch // sharded.rows.count
        shapes = tuple(_kind_of_leaf(leaf, rows_of_rank) for leaf in pytree.tree_leaves(target))
        requiring = sharded.requiring(step.inputs.requiring_gradient)
        key = (loss_key(step.loss_fn, exact=False), requiring, tuple(sharded.graph.returned), shapes)
        assert step.loss_fn is not None
        held = self._proofs.get(key)
        if held is None or not reads_tensors(step.loss_fn, held.weights):  # functions with one key may read other weights
            device = self._runtime.devices[self._here]
            model = self._traced(step.inputs.batch, lambda: sharded)
            self._proofs[key] = prove(model, sharded.graph, requiring, step.loss_fn, target, rows_of_rank, device)
        return self._proofs[key]

    def _local_combination(self, step: _Step, prepared: PreparedLoss, proof: Proof) -> _Combination:
        """Return how the loss of the batch is combined from its parts, as it is proved."""
        if proof.kind is None:
            return _Combination("neither", proof.reason)
        batch, parts = step.inputs.batch, prepared.sharded.rows.count
        unproved = proof.first_unproved((batch, *microbatch_sizes(batch // parts, prepared.request.n_microbatches)))
        if unproved is not None:
            return _Combination("neither", f"its computation depends on the number of rows, and {unproved} rows take another branch")
        if proof.kind != "counted" or step.reduction != "mean":
            return _Combination("mean" if proof.kind == "counted" else proof.kind)
        is_local = _has_local_rows(prepared.sharded.rows)
        sizes = _passed_microbatches(prepared.sharded.rows, step.inputs.batch, prepared.request.n_microbatches)
        counts = [counter.counts(step.target, sizes) for counter in proof.counters]
        first = proof.counters[0]
        # Parts that have equal weights in all means leave a value that is equal for all rows as it is, if their weights add up to 1.
        has_equal_weights = proof.is_one_mean or (
            not proof.row_means and proof.divides_by_counts and all(each == counts[0] for each in counts)
        )
        if has_equal_weights and all(map(first.can_weigh, counts[0])):
            return _Combination("counted", counts=counts[0], counter=first, targets_per_row=" equal" * (len(counts) > 1))
        if proof.divides_by_counts and all(_is_proportional(each, sizes) for each in counts):
            targets_per_row = "".join(f" {of_mean[0] / sizes[0]}" for of_mean in counts) if is_local else ""
            return _Combination("counted", counts=counts[0], counter=first, targets_per_row=targets_per_row)
        if not has_equal_weights:
            return _Combination("neither", _unequal_weights(proof))
        if is_local:
            return _Combination("neither", 'a part of the batch has no weight; with inputs="local" no rank has the target of all rows')
        if proof not in self._warned:
            self._warned.add(proof)
            warnings.warn(
                "a part of the batch has no weight in loss_fn, so it is taken of all rows at once: each rank holds the activations of all "
                'microbatches. loss_reduction="batch" says so without this warning',
                stacklevel=level_of_caller(),
            )
        return _Combination("batch")

    def _weights(self, step: _Step, prepared: PreparedLoss, combination: _Combination) -> Mapping[int, tuple[float, ...]]:
        """Return rank -> the weight of each of its microbatches: its fraction of the divisor of the batch's mean.

        A process that has no target computes no loss, and its weights are not used.
        """
        rows, batch, n_microbatches = prepared.sharded.rows, step.inputs.batch, prepared.request.n_microbatches
        divisor = float if combination.counter is None else combination.counter.divisor
        total = divisor(self._total_count(prepared.sharded, combination.counts))
        if total:
            weights = tuple(divisor(count) / total for count in combination.counts)
        else:  # no target counts: the loss is NaN with any weights, as without partitions
            weights = tuple(size / batch for size in _passed_microbatches(rows, batch, n_microbatches))
        starts = {rank: 0 if _has_local_rows(rows) else rows.part_index(rank) * n_microbatches for rank in self._runtime.local_ranks}
        return {rank: weights[start : start + n_microbatches] for rank, start in starts.items()}

    def _total_count(self, sharded: ShardedModel, counts: tuple[float, ...]) -> float:
        """Return the number of targets of the batch that are not ignored, or the sum of their weights; local inputs: over all processes."""
        if not _has_local_rows(sharded.rows):
            return sum(counts)
        own = sum(counts) if self._here in sharded.collectors else 0.0
        total = self._runtime.reduce(torch.tensor(own, dtype=torch.float64, device=self._runtime.devices[self._here]), "sum")
        counted_by = len(sharded.collectors) / sharded.rows.count  # ranks that compute the loss of the same rows
        return float(total) / counted_by


def _key_of(output: Output) -> tuple[str, str]:
    """Return path of the module, and name, of an attribute."""
    assert isinstance(output.destination, Attribute)
    return output.destination.module, output.destination.attribute


def _has_local_rows(rows: RowParts) -> bool:
    """Return whether each process has the target of its own rows alone."""
    return rows.inputs == "local" and rows.count > 1


def _passed_microbatches(rows: RowParts, batch: int, n_microbatches: int) -> tuple[int, ...]:
    """Return the rows of each microbatch whose target a process passes: those of all ranks, or with local inputs its own."""
    of_rank = microbatch_sizes(batch // rows.count, n_microbatches)
    return of_rank if _has_local_rows(rows) else of_rank * rows.count


def _inspected_part(sharded: ShardedModel, target: Any, batch: int, n_microbatches: int | None) -> tuple[Any, ResultSizes]:
    """Return the target of the first microbatch, or of all rows if ``n_microbatches`` is None, and the sizes of the results for it."""
    rows_of_rank = batch // sharded.rows.count
    if n_microbatches is None:
        repeats = rows_of_rank // sharded.graph.batch_size if sharded.graph.batch is None else 1
        return target, ResultSizes(rows_of_rank, repeats, batch)
    sizes = microbatch_sizes(rows_of_rank, n_microbatches)
    return split_target(target, sizes)[0], ResultSizes(sizes[0], 1, sizes[0])


def _unequal_weights(proof: Proof) -> str:
    """Say which terms of a loss weigh parts of the batch differently."""
    means = " and ".join(counter.mean.name for counter in proof.counters)
    if proof.row_means or proof.divides_by_counts:
        others = f", and {' and '.join(proof.row_means)} over rows" if proof.row_means else ""
        return f"it adds means over different numbers of targets: {means} over the targets that count{others}"
    return f"it adds a term to {means}, which does not divide by the weights of its targets alone"


def _is_proportional(counts: Sequence[float], sizes: Sequence[int]) -> bool:
    """Return whether every microbatch has as many counted targets a row as the first."""
    return all(count * sizes[0] == counts[0] * size for count, size in zip(counts, sizes, strict=True))


def _kind_of_leaf(leaf: object, rows: int) -> Any:
    """Return the key of one leaf of a target: a proof holds for all targets with equal keys (dtype and shape without samples)."""
    if not isinstance(leaf, Tensor):
        return type(leaf), repr(leaf)
    is_cut = has_rows(leaf, rows)
    return leaf.dtype, is_cut, tuple(leaf.shape[1:] if is_cut else leaf.shape)


def _encode_dependence(dependence: LossDependence) -> str:
    """Encode a dependence as one line for ranks that compute no loss: ``"float32: out_1 out_2 = out_1"``.

    After the dtype, ``*``: it draws numbers; ``!``: it changes results in place.
    """
    dtype = str(dependence.dtype).removeprefix("torch.") + "*" * dependence.draws + "!" * dependence.changes
    own = [f"= {dependence.own}"] if dependence.own is not None else []
    return " ".join([f"{dtype}:", *sorted(dependence.outputs), *own])


def _decode_dependence(text: str) -> LossDependence:
    dtype, _, rest = text.partition(":")
    outputs, _, own = rest.partition("=")
    name = dtype.rstrip("*!")
    return LossDependence(frozenset(outputs.split()), getattr(torch, name), own.strip() or None, "*" in dtype, "!" in dtype)
