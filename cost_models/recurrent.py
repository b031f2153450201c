"""Products of recurrent layers. Their rules say that nothing but the batch may be cut, not what is multiplied: steps, gates, states."""

from __future__ import annotations

from cost_models.calls import Call
from cost_models.contractions import Products
from cost_models.sizes import Size, numel
from cost_models.work import Product

__all__ = ["cell", "input_gradient", "layers", "weight_gradients"]


def layers(call: Call) -> Products:
    """Every step multiplies with every weight matrix; the list of parameters holds all layers and directions."""
    length, batch = _steps(call)
    return tuple(
        Product(1, length * batch, gates, width) if place % 2 == 0 else Product(length, batch, gates, width)
        for place, (gates, width) in enumerate(_matrices(call))
    )


def weight_gradients(call: Call) -> Products:
    """The gradients of all weights, and those of the states, which flow through all but the first layer's input weights."""
    length, batch = _steps(call)
    first = 2 if call.arguments["bidirectional"] else 1
    states = tuple(
        Product(1 if place % 2 == 0 else length, length * batch if place % 2 == 0 else batch, width, gates)
        for place, (gates, width) in enumerate(_matrices(call))
        if place % 2 or place >= 2 * first
    )
    return (*(Product(1, gates, width, length * batch) for gates, width in _matrices(call)), *states)


def input_gradient(call: Call) -> Products:
    """Through the first layer's input weights, in each direction."""
    length, batch = _steps(call)
    n_first = 2 if call.arguments["bidirectional"] else 1
    gates, width = _matrices(call)[0]
    return (Product(1, length * batch, width, gates),) * n_first


def cell(call: Call) -> Products:
    """One step with both weight matrices."""
    rows = numel(call.shape("input")[:-1])
    return tuple(Product(1, rows, *call.shape(name)) for name in ("w_ih", "w_hh"))


def _steps(call: Call) -> tuple[Size, Size]:
    """How many steps, and how many rows each has."""
    shape = call.shape("input")
    if len(shape) < 3:
        return 1, numel(shape[:-1])
    return (shape[1], shape[0]) if call.arguments.get("batch_first") else (shape[0], shape[1])


def _matrices(call: Call) -> list[tuple[Size, Size]]:
    """Shapes of the weights, layer by layer, direction by direction: input to hidden, hidden to hidden."""
    return [tensor.shape for tensor in call.arguments["params"] if len(tensor.shape) == 2]
