"""Write recurrent layers with dropout between them as one call a layer: a draw inside of an operator is out of reach of every pass.

Before:                                                  After:

    y, h = gru(x, h0, weights, .., 2 layers, dropout p)      x_time = transpose(x, 0, 1)                      where the batch comes first
                                                             y_0, h_0 = gru(x_time, h0[0:1], weights[0], ..)  one layer
                                                             y_1, h_1 = gru(dropout(y_0, p), h0[1:2], weights[1], ..)
                                                             y, h = transpose(y_1, 0, 1), cat(h_0, h_1)

The operators of PyTorch for CPU compute just this, and draw the same numbers. (cuDNN draws from a state of its own.)
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from passes.graph.fake_tensors import call_like, fake_mode
from passes.graph.schemas import bound_arguments, draws, packet

aten = torch.ops.aten

_RECURRENT = frozenset({aten.gru, aten.lstm, aten.rnn_relu, aten.rnn_tanh})


def call_layer_by_layer(graph: fx.Graph) -> None:
    """Rewrite in place the calls of several recurrent layers that draw numbers between them."""
    for node in list(graph.nodes):
        if packet(node.target) in _RECURRENT and draws(node) and bound_arguments(node)["num_layers"] > 1:
            with fake_mode(graph), graph.inserting_before(node):
                results = _Layers(graph, node).results()
            for item in list(node.users):
                assert item.target is operator.getitem, f"{item.name} takes all results of {node.name} at once"
                item.replace_all_uses_with(results[item.args[1]])
                graph.erase_node(item)
            graph.erase_node(node)


class _Layers:
    """Writes the calls that take the place of one."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.node = node
        self._call = functools.partial(call_like, graph, node)
        self.given = bound_arguments(node)

    def results(self) -> list[fx.Node]:
        """Return the output of the last layer, and every state of all layers."""
        first, *_ = self.given
        is_batch_first = self.given.get("batch_first", False)
        output = self.given[first]
        if is_batch_first:
            output = self._call(aten.transpose.int, output, 0, 1)
        states: list[tuple[fx.Node, ...]] = []
        n_layers = self.given["num_layers"]
        for layer in range(n_layers):
            if layer:
                output = self._call(aten.dropout.default, output, self.given["dropout"], True)
            output, *state = self._layer(layer, output)
            states.append(tuple(state))
        if is_batch_first:
            output = self._call(aten.transpose.int, output, 0, 1)
        return [output, *(self._call(aten.cat.default, list(each)) for each in zip(*states, strict=True))]

    def _layer(self, layer: int, source: fx.Node) -> list[fx.Node]:
        first, *_ = self.given
        arguments = {**self.given, first: source, "num_layers": 1, "dropout": 0.0}
        if "batch_first" in arguments:
            arguments["batch_first"] = False
        n_weights = len(self.given["params"]) // self.given["num_layers"]
        arguments["params"] = self.given["params"][layer * n_weights : (layer + 1) * n_weights]
        directions = 2 if self.given["bidirectional"] else 1
        start = self.given["hx"]
        starts = [self._call(aten.slice.Tensor, each, 0, layer * directions, (layer + 1) * directions) for each in _listed(start)]
        arguments["hx"] = starts if isinstance(start, list | tuple) else starts[0]
        made = self._call(self.node.target, *arguments.values())  # type: ignore[arg-type]
        return [self._call(operator.getitem, made, place) for place in range(len(made.meta["val"]))]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
