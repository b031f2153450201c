"""A slice of the fuzzer's seeds, and the fuzzer itself: it finds what is planted, reduces it, and prints a script that runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from partitioner import ConfigError, PartitionedModel
from tests.fuzz.configuration import Configuration
from tests.fuzz.derivative import is_fault_of_model
from tests.fuzz.generator import Case, generate
from tests.fuzz.outcome import DifferenceError, LargestValue, Outcome, compare, run_case
from tests.fuzz.program import Input, Layer, Program, Statement, build, loss_of, make_inputs
from tests.fuzz.reduction import reduce_case, reproduction
from tests.support.running.slow_values import all_but

pytestmark = pytest.mark.filterwarnings("ignore")
"""Random programs are warned of; the comparison decides."""

SLICE = range(45)
"""Seeds of the full matrices, of which every ninth is quick; ``make fuzz SEEDS=0:5000`` runs more."""

REFUSED: dict[int, str] = {11: "ConfigError: the model has no axis "}
"""Seeds of the slice that are refused by name: seed -> the beginning of the reason."""


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", all_but(SLICE[::9], SLICE))
def test_seed_equals_the_model_in_one_piece(seed: int) -> None:
    case = generate(seed)
    outcome = run_case(case)
    if seed in REFUSED:
        assert (outcome.kind, outcome.reason[: len(REFUSED[seed])]) == ("refused", REFUSED[seed])
    else:
        assert outcome.kind == "equal", reproduction(case, outcome)


def test_case_is_of_its_seed_alone() -> None:
    first = repr([generate(seed) for seed in range(30, 34)])
    torch.manual_seed(5)
    assert repr([generate(seed) for seed in range(30, 34)]) == first


def chain(length: int) -> Case:
    """Linear layers and functions in turn, on two ranks."""
    layers = tuple(Layer(f"linear{place}", f"self.linear{place} = nn.Linear(4, 4)") for place in range(length))
    statements = []
    for place in range(length):
        statements.append(Statement(f"v{2 * place} = self.linear{place}({f'v{2 * place - 1}' if place else 'x0'})", (f"v{2 * place}",)))
        statements.append(Statement(f"v{2 * place + 1} = torch.tanh(v{2 * place})", (f"v{2 * place + 1}",)))
    inputs = (Input("x0", "torch.randn(rows, 4)"),)
    program = Program(1, 4, 8, inputs, layers, tuple(statements), (f"v{2 * length - 1}", None, {"first": "v1"}), training=True)
    return Case(program, Configuration(2, (("data", 2), ("pipeline", 2)), 2, "1F1B", "full"))


@pytest.mark.parametrize("part", ["loss", "gradient", "error", "refusal"])
def test_planted_defect_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_step, real_gradients = PartitionedModel.train_step, PartitionedModel.full_gradients

    def step(pm: PartitionedModel, *args: Any, **kwargs: Any) -> Any:
        if part == "error":
            raise KeyError(part)
        if part == "refusal":
            raise ConfigError(part)
        loss = real_step(pm, *args, **kwargs)
        return loss * (1 + 1e-6) if part == "loss" else loss

    def gradients(pm: PartitionedModel) -> dict[str, Tensor | None]:
        found = dict(real_gradients(pm))
        return found | {"linear0.weight": None} if part == "gradient" else found

    monkeypatch.setattr(PartitionedModel, "train_step", step)
    monkeypatch.setattr(PartitionedModel, "full_gradients", gradients)
    outcome = run_case(Case(chain(1).program, Configuration(2, "data")))
    expected = {
        "loss": ("wrong", "loss of train_step"),
        "gradient": ("wrong", "gradients of parameters"),
        "error": ("raw", "KeyError at fuzz/outcome.py:step"),
        "refusal": ("refused", "ConfigError: refusal"),
    }
    assert (outcome.kind, outcome.reason.replace("test_fuzz.py", "outcome.py")) == expected[part]


def test_rounding_is_allowed_by_what_was_computed_on_the_way() -> None:
    with LargestValue() as largest:
        x = torch.tensor([3.0], requires_grad=True)
        x.masked_fill(torch.tensor([False]), torch.finfo(x.dtype).min).mul(-50.0).sub(1e300).sum().backward()
    assert largest.value == 150.0
    one = torch.tensor([1.0])
    compare("output", one, one + 5e-9, rounding=1e-8)
    with pytest.raises(DifferenceError):
        compare("output", one, one + 5e-9, rounding=1e-9)


@pytest.mark.parametrize(("wanted", "got", "expected"), [(1.5, 1.0, True), (1.0, 1.5, False), (1.5, 1.5, False), (1.0, 1.0, False)])
def test_gradient_that_is_no_derivative_is_told(wanted: float, got: float, expected: bool) -> None:
    """Gradients, multiplied by these factors, are what the model and its partitions are said to compute."""
    program = dataclasses.replace(chain(1).program, returned="v1")
    model = build(program)
    args, kwargs, target = make_inputs(program, program.rows)
    loss_of(model(*args, **kwargs), target).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    scaled = [{name: factor * gradient for name, gradient in found.items() if gradient is not None} for factor in (wanted, got)]
    assert is_fault_of_model(program, model, *scaled) is expected


def test_failure_reduces_to_the_statement_behind_it() -> None:
    def run(case: Case) -> Outcome:
        fails = any("self.linear3" in each.code for each in case.program.live())
        return Outcome("wrong", "planted") if fails else Outcome("equal")

    found = reduce_case(chain(6), Outcome("wrong", "planted"), run=run)
    assert [each.code.partition(" = ")[2].partition("(")[0] for each in found.program.statements] == ["self.linear3"]
    assert [layer.name for layer in found.program.layers] == ["linear3"]
    assert isinstance(found.program.returned, str)
    assert found.configuration.devices == 2
    assert found.configuration.recompute is None


def test_reproduction_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(chain(1).program, Configuration(2, "data"))
    script = reproduction(case, Outcome("wrong", "loss of train_step", "figures"))
    exec(compile(script, "<reproduction>", "exec"), {})  # noqa: S102  text of our own
    assert "linear0.weight" in capsys.readouterr().out
