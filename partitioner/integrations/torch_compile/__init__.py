"""``torch.compile(model, backend="partitioner", options={...})``: partition each graph that Dynamo hands over.

``backend=partitioner_backend`` is the same, from a checkout that is not installed.
"""

from __future__ import annotations

from partitioner.integrations.torch_compile.backend import partitioner_backend

__all__ = ["partitioner_backend"]
