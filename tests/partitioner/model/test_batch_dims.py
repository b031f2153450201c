"""Batch dimension of inputs and targets: found, or named by ``batch_dims=``.

The reference is the original model on the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import partition
from passes.ir.errors import ConfigError
from tests.support.models import batch_dims_cases as cases
from tests.support.models.batch_dims_cases import ROWS, Positions, Recurrent, difference, flat_loss
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import all_but, slow

MODES = ["pipeline", "data", "fsdp", "model"]


@pytest.mark.parametrize("length", [*slow(3, 2 * ROWS), ROWS])
@pytest.mark.parametrize("mode", all_but(["pipeline"], MODES))
def test_targets_with_the_batch_where_results_have_it(mode: str, length: int) -> None:
    """Labels (length, batch): of a length that is not the batch, and of one that is, which the dimension of the results decides."""
    assert cases.recurrent_difference(mode, length) is None


@pytest.mark.slow
def test_several_leaves_of_a_target() -> None:
    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        rows = F.cross_entropy(output.movedim(2, 1), target["labels"], target["weights"], reduction="none").sum(0)
        return (rows * target["of_rows"]).mean()

    torch.manual_seed(0)
    x = torch.randn(3, ROWS, cases.WIDTH, dtype=torch.float64)
    target = {
        "labels": torch.randint(cases.WIDTH, (3, ROWS)),
        "of_rows": torch.rand(ROWS, dtype=torch.float64),
        "weights": torch.rand(cases.WIDTH, dtype=torch.float64),
    }
    options: dict[str, Any] = {"devices": 2, "mode": "pipeline", "n_microbatches": 2, "example_inputs": (x,)}
    pm = partition(Recurrent(), **options, batch_dims={"target['weights']": None})
    for _ in range(2):
        assert difference(Recurrent(), pm, (x,), target, loss_fn) is None
        target["weights"] = target["weights"].flip(0)
    unsaid = partition(Recurrent(), **options)
    with pytest.raises(ConfigError, match=r"target\['weights'\] has shape") as raised:
        unsaid.train_step(x, target=target, loss_fn=loss_fn)
    assert "batch_dims={\"target['weights']\": None}" in str(raised.value)


@pytest.mark.parametrize("mode", all_but(["data"], MODES))
def test_an_input_as_long_as_the_batch(mode: str) -> None:
    tokens, places = torch.randint(8, (ROWS, 6)), torch.arange(ROWS)
    target = torch.randint(cases.WIDTH, (ROWS, 6))
    options: dict[str, Any] = {"devices": 2, "mode": mode, "example_inputs": (tokens, places)}
    options |= {"n_microbatches": 2} if mode == "pipeline" else {}
    pm = partition(Positions(), **options, batch_dims={"places": None})
    assert difference(Positions(), pm, (tokens, places), target, flat_loss) is None
    longer = torch.randint(8, (2 * ROWS, 6))
    assert difference(Positions(), pm, (longer, places), torch.randint(cases.WIDTH, (2 * ROWS, 6)), flat_loss) is None
    pm.eval()
    torch.testing.assert_close(pm(tokens, places), Positions()(tokens, places))
    if mode == "pipeline":
        with pytest.raises(ConfigError, match=r'batch_dims=\{"places": None\}'):
            partition(Positions(), **options)


@pytest.mark.slow
def test_a_named_dimension() -> None:
    x, target = torch.randn(3, 3, cases.WIDTH, dtype=torch.float64), torch.randint(cases.WIDTH, (3, 3))
    for dim in (1, -2):
        pm = partition(Recurrent(), devices=3, mode="data", example_inputs=(x,), batch_dims={"x": dim, "target": 1})
        assert difference(Recurrent(), pm, (x,), target, flat_loss) is None


class Nested(nn.Module):
    """Reads ``*args`` and mappings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(cases.WIDTH, cases.WIDTH).double() for _ in range(2))

    def forward(self, *args: Tensor, **more: dict[str, Tensor]) -> Tensor:
        hidden = torch.tanh(self.first(args[0]) + args[1].sum())
        output: Tensor = self.second(hidden) * more["batch"]["scale"].mean()
        return output


def test_names_are_those_of_errors() -> None:
    x = torch.randn(ROWS, cases.WIDTH, dtype=torch.float64)
    other, scale = torch.randn(ROWS, 2, dtype=torch.float64), torch.rand(ROWS, dtype=torch.float64)
    pm = partition(
        Nested(),
        devices=2,
        mode="pipeline",
        n_microbatches=2,
        example_inputs=(x, other),
        example_kwargs={"batch": {"scale": scale}},
        batch_dims={"args[1]": None, "batch['scale']": None},
    )
    torch.testing.assert_close(pm(x, other, batch={"scale": scale}), Nested()(x, other, batch={"scale": scale}))


class Continued(Recurrent):
    """An LSTM whose state, of the call before, has its batch in dimension 1."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Any]:  # type: ignore[override]
        output, state = self.lstm(x, state)
        return self.head(output), state


@pytest.mark.parametrize("names", all_but([("state[0]", "state[1]")], [("state",), ("state[0]", "state[1]")]))
@pytest.mark.parametrize("example", all_but(["left out"], ["left out", "None", "given"]))
def test_an_input_that_some_calls_leave_out(names: tuple[str, ...], example: str) -> None:
    x, state = torch.randn(3, ROWS, cases.WIDTH, dtype=torch.float64), tuple(torch.randn(2, 1, ROWS, cases.WIDTH, dtype=torch.float64))
    examples = {"left out": (x,), "None": (x, None), "given": (x, state)}
    dims = {"x": 1, **dict.fromkeys(names, 1)}
    pm = partition(Continued(), 2, "pipeline", n_microbatches=2, example_inputs=examples[example], batch_dims=dims)
    for args in examples.values():
        torch.testing.assert_close(pm(*args), Continued()(*args))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"plaecs": None}, "did you mean 'places'"),
    "unknown part": ({"places[0]": None}, r"names 'places\[0\]', and there is no such input"),
    "no such dimension": ({"tokens": 3}, "dimension 3 of tokens is the batch, and tokens has shape"),
    "sizes differ": ({"tokens": 1, "places": 0}, "inputs differ in batch size, as batch_dims says: tokens has 6, places has 4"),
    "no number": ({"tokens": "0"}, r"batch_dims\['tokens'\] must be an int or None"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named(name: str) -> None:
    batch_dims, match = REFUSED[name]
    with pytest.raises(ConfigError, match=match):
        partition(
            Positions(), devices=2, mode="data", example_inputs=(torch.randint(8, (ROWS, 6)), torch.arange(ROWS)), batch_dims=batch_dims
        )


def test_a_dimension_of_one_size_is_refused() -> None:
    x = torch.randn(3, ROWS, cases.WIDTH, dtype=torch.float64)
    with pytest.raises(ConfigError, match="the model takes no other size than 6 there"):
        partition(Recurrent(), devices=2, mode="data", example_inputs=(x,), batch_dims={"x": 2})


@pytest.mark.parametrize(
    ("batch_dims", "match"),
    [({"target": 0}, "dimension 0 of target is the batch, and it has 3 rows there"), ({"target['labels']": 1}, "no such input")],
)
def test_targets_that_do_not_fit_are_named(batch_dims: dict[str, int | None], match: str) -> None:
    x = torch.randn(3, ROWS, cases.WIDTH, dtype=torch.float64)
    pm = partition(Recurrent(), devices=2, mode="data", example_inputs=(x,), batch_dims=batch_dims)
    with pytest.raises(ConfigError, match=match):
        pm.train_step(x, target=torch.randint(cases.WIDTH, (3, ROWS)), loss_fn=flat_loss)


class Carried(nn.Module):
    """Returns the state of a GRU, (layers, batch, width), which a later call takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.head = nn.GRU(cases.WIDTH, 8, 2, batch_first=True), nn.Linear(8, cases.WIDTH)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        z, state = self.gru(x, state)
        return self.head(z), state


def test_a_state_with_its_batch_in_another_dimension_names_the_option() -> None:
    x, state, named = torch.randn(ROWS, 3, cases.WIDTH), torch.randn(2, ROWS, 8), r'say so: batch_dims=\{"state": 1\}'
    options: dict[str, Any] = {"devices": 2, "mode": "pipeline", "n_microbatches": 2, "progress": False}
    with pytest.raises(ConfigError, match=f"(?s)cannot be cut into 2 microbatches.*if the batch of state is in another dimension, {named}"):
        partition(Carried(), example_inputs=(x, state), **options)
    with pytest.raises(ConfigError, match=f"(?s)the call passes other arguments than the example.*{named}"):
        partition(Carried(), example_inputs=(x,), **options)(x, state)
    pm = partition(Carried(), example_inputs=(x,), batch_dims={"state": 1}, **options)
    torch.testing.assert_close(pm(x, state), Carried()(x, state))


def test_inputs_of_unlike_rows_name_the_option() -> None:
    pm = partition(Positions(), devices=2, mode="data", example_inputs=(torch.randint(8, (ROWS, 6)), torch.arange(ROWS)))
    with pytest.raises(ConfigError, match=r'partition\(..., batch_dims=\{"places": None\}\)'):
        pm(torch.randint(8, (2 * ROWS, 6)), torch.arange(ROWS))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_processes(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.in_processes, timeout=120) == [[None] * 5] * 2
