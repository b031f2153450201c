"""The key of programs: what a call runs of one trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partitioner.options.batch_rows import Inputs
from passes.autograd.staged_model import Differentiation
from passes.emit.place_on_mesh import Gradients
from passes.emit.programs import LossForm
from passes.ir.graph import Results
from passes.pipeline import Kind


@dataclass(frozen=True)
class Variant:
    """Options by which the model is sharded for a kind of batch.

    Attributes:
        batch_size: for a batch that the traced graph does not serve, the rows of one microbatch over all ranks; else None.
        whole_batch: for such a batch, the rows of all microbatches; else None.
        in_parts: whether returned means over the batch are computed as sums of parts (``passes.spmd.mean_to_sum``): of microbatches, of the
            rows of ranks, or of the part of each row that a rank has.
        results: what each rank of a sharded batch returns.
        rows: whether the batch is sharded over ranks; False if it does not divide.
        inputs: whether processes pass the whole batch and get whole results, or pass and get their own rows.
        kept: the indices of the results that are returned, for a step that reads no others; None: all are.
    """

    batch_size: int | None
    whole_batch: int | None
    in_parts: bool
    results: Results
    rows: bool
    inputs: Inputs
    kept: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Request:
    """The programs that a call runs. Calls with equal requests run the same programs.

    Attributes:
        kind: what the programs do.
        variant: of the model, by the rows of the batch and the results that are read.
        n_microbatches: of the batch.
        differentiation: what gets a gradient; None: a forward without autograd.
        loss: of a training step; None: the caller computes it.
        given: of a backward, the outputs whose gradients it takes.
        gradients: whether gradients of parameters are summed over ranks.
    """

    kind: Kind
    variant: Variant
    n_microbatches: int
    differentiation: Differentiation | None = None
    loss: LossForm | None = None
    given: frozenset[str] = frozenset()
    gradients: Gradients = "sum"

    def training_forward(self, differentiation: Differentiation) -> Request:
        """Return the request of a forward that also returns the saved values that ``backward`` takes."""
        return replace(self, kind="training_forward", differentiation=differentiation)

    def backward(self, differentiation: Differentiation, given: frozenset[str], gradients: Gradients = "sum") -> Request:
        """Return the request of the backward of ``training_forward``; ``given`` names the outputs whose gradients it takes."""
        return replace(self, kind="backward", differentiation=differentiation, given=given, gradients=gradients)

    def train_step(self, differentiation: Differentiation, loss: LossForm, gradients: Gradients = "sum") -> Request:
        """Return the request of one training step by the plan's schedule."""
        return replace(self, kind="train_step", differentiation=differentiation, loss=loss, gradients=gradients)

    def call(self, differentiation: Differentiation) -> Request:
        """Return the request of ``training_forward``, a loss and ``backward`` as one program on each rank, to inspect."""
        return replace(self, kind="call", differentiation=differentiation)
