"""Take results that are views of one tensor of that tensor, so that writes in place by the caller reach all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import version_of
from passes.normalize.functional.returned_views import ReturnedViews, returned_views, views_of_state


class ViewsOfCalls:
    """The views among the results of a graph; ``passes.normalize.functional.returned_views`` finds them.

    Args:
        graph: the model before it is sharded.
    """

    def __init__(self, graph: ModelGraph) -> None:
        placeholders = [leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None]
        self._views = returned_views(graph.graph, placeholders)
        names = graph.weights
        self._of_state = {each: names.get(root, root) for each, root in views_of_state(graph.graph, placeholders).items()}
        self._copies: list[tuple[str, Tensor, int | None]] = []
        self._written = {output.node: placeholder for placeholder, output in graph.writes.items()}

    def __bool__(self) -> bool:
        return bool(self._views or self._of_state)

    def check_copies(self) -> None:
        """Check that the caller has not changed results of the last call that are copies of tensors of ranks.

        Raises:
            ConfigError: one was written in place.
        """
        for name, copy, version in self._copies:
            if version_of(copy) != version:
                raise ConfigError(
                    f"a result of the last call was changed in place: it is {name}, or a view of it, and results are copies of it",
                    remedy="change a clone of the result; change parameters and buffers between calls, as modules have them",
                )
        self._copies = []

    def taken(self, by_node: Mapping[str, Tensor], given: Mapping[str, Tensor], rows: int | torch.SymInt) -> dict[str, Tensor]:
        """Return the values of results, views taken of the tensor that they are views of, which may be the caller's.

        Args:
            by_node: the results of the graph, or some of them.
            given: placeholder of an input -> the caller's tensor.
            rows: those of the values.
        """
        values = dict(by_node)
        for shared in self._views:
            base = self._base(shared, values, given)
            if base is not None:
                taken = dict(zip((shared.base, *shared.views), (base, *shared.module(base, rows)), strict=True))
                values |= {name: taken[name] for name in values.keys() & taken.keys()}
        of_state = {each: name for each, name in self._of_state.items() if each in values}
        values |= {each: values[each].clone() for each in of_state}
        self._copies = [(name, values[each].detach(), version_of(values[each])) for each, name in of_state.items()]
        return values

    def _base(self, shared: ReturnedViews, by_node: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensor | None:
        """Return the tensor to take views of: the caller's, or a result; None for an input that this process was not given."""
        own = given.get(self._written.get(shared.base, shared.base))
        devices = {by_node[name].device for name in (shared.base, *shared.views) if name in by_node}
        if own is not None and own.device in devices:
            return own
        return _laid_out(by_node[shared.base], shared.order) if shared.base in by_node else None


def _laid_out(value: Tensor, order: Sequence[int]) -> Tensor:
    """Return a value in memory of its own whose dimensions are in this order: its views are views in any such memory."""
    ordered = value.permute(*order)
    return value if ordered.is_contiguous() else ordered.contiguous().permute(*map(order.index, range(len(order))))
