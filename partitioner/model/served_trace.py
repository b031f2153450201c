"""A trace of a partitioned model, and the objects that run its calls and steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from partitioner.model.calls import Calls
from partitioner.model.effects.left_attributes import LeftAttributes
from partitioner.model.losses.losses import Losses
from partitioner.runtime.arguments import BoundInputs
from partitioner.specialize.request import Request
from partitioner.specialize.trace import Trace


@dataclass(eq=False)
class ServedTrace:
    """A trace, and the objects that run its calls and steps.

    Attributes:
        trace: the graph, its plan, its tensors and its programs.
        calls: runs its programs.
        losses: what was proved of loss functions.
        steps: kind of a training step, or of a call -> what was prepared for it.
        last_step: the last training step, for the plan's batch; None: there was none.
    """

    trace: Trace
    calls: Calls
    losses: Losses
    steps: dict[Hashable, Any] = field(default_factory=dict)
    last_step: Request | None = None

    @classmethod
    def of(cls, trace: Trace, left: LeftAttributes) -> ServedTrace:
        """Return a served trace; ``left``: the attributes that calls leave on modules."""
        rows = trace.programs.rows
        calls = Calls(trace.arguments, trace.graph, trace.runtime, trace.state, rows, left, trace.dtype)
        return cls(trace, calls, Losses(trace.runtime, trace.graph, rows, left, trace.tracing.batch_dims))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundInputs:
        """Return the tensors of one call. Ranks agree on the size of the batch and on the inputs that require gradients."""
        return self.calls.bind(args, kwargs)

    @property
    def binds_alike(self) -> bool:
        """Whether calls of one signature are bound alike; False where results share memory with each other, or inputs are written."""
        return not (self.calls.views or self.trace.graph.writes)
