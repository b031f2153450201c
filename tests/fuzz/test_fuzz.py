"""A slice of the fuzzer's seeds, and the fuzzer itself: it finds what is planted, reduces it, and prints a script that runs."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import ConfigError, PartitionedModel
from tests.fuzz.programs.configuration import Configuration
from tests.fuzz.programs.generator import Case, generate
from tests.fuzz.programs.program import Input, Layer, Program, Statement, Usage, build, loss_of, make_inputs
from tests.fuzz.programs.structures import Record
from tests.fuzz.running.comparison import DifferenceError, LargestValue, compare
from tests.fuzz.running.derivative import is_fault_of_model
from tests.fuzz.running.observations import Reference, observations
from tests.fuzz.running.outcome import Outcome, run_case
from tests.fuzz.running.ranks import run_on_rank
from tests.fuzz.running.reduction import reduce_case
from tests.fuzz.running.reproduction import reproduction
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import all_but, slow

pytestmark = pytest.mark.filterwarnings("ignore")
"""Random programs are warned of; the comparison decides."""

SLICE = (0, 2, 5, 6, 8, 10, 11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 23, 24, 26, 27, 3001515)
"""Seeds of the full matrices, of which every tenth is quick; ``make fuzz SEEDS=0:5000`` runs more."""

REFUSED: dict[int, str] = {19: "ConfigError: the batch cannot be cut into "}
"""Seeds of the slice that are refused by name: seed -> the beginning of the reason."""

COUNTED = {
    *("writes arguments", "keeps", "kept in loss", "changed outputs", "complex", "dropouts", "dataclass", "taken dataclass"),
    *("accident", "batch second", "switch called", "freezes"),
}
"""Features of what callers pass, get and do."""


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", all_but(SLICE[:1], SLICE))
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
    """Linear layers and functions, alternating, on two ranks."""
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
        "error": ("raw", "KeyError at running/observations.py:step"),
        "refusal": ("refused", "ConfigError: refusal"),
    }
    assert (outcome.kind, outcome.reason.replace("fuzz/test_fuzz.py", "running/observations.py")) == expected[part]


class Separated(nn.Module):
    """A model that is called with copies of its arguments, or on a copy of itself: its caller sees no effect of the call."""

    def __init__(self, model: nn.Module, part: str) -> None:
        super().__init__()
        self.keeps1 = model.keeps1
        self.linear0 = model.linear0
        self.part = part
        self.called: nn.Module | None = copy.deepcopy(model) if part == "kept" else None
        self.models = [model]

    def forward(self, *args: Any) -> Any:
        args = copy.deepcopy(args) if self.part == "arguments" else args
        output = (self.called or self.models[0])(*args)
        return {"output": output} if self.part == "dataclass" else output


def effects() -> Program:
    """Return a program that writes its second argument, keeps a tensor for the loss, and returns a dataclass that the caller changes."""
    inputs = (Input("x0", "torch.randn(rows, 4)"), Input("x5", "[torch.zeros(rows, 4)]", is_float=False, is_written=True))
    layers = (Layer("linear0", "self.linear0 = nn.Linear(4, 4)"), Layer("keeps1", "self.keeps1 = Keeps(nn.Linear(4, 4))"))
    statements = (
        Statement("v0 = self.keeps1(self.linear0(x0))", ("v0",)),
        Statement("x5[0].add_(v0.detach())"),
        Statement("v1 = (v0 * 2.0).unsqueeze(1)", ("v1",)),
    )
    usage = Usage(kept=("keeps1.l_aux",), in_loss=("keeps1.l_aux",), changes=((0, "leaf += 1"),))
    return Program(1, 4, 8, inputs, layers, statements, Record(last="v1", other=None), training=True, usage=usage)


def test_changes_that_pytorch_leaves_undefined_are_no_case() -> None:
    statement = Statement("v0 = (x0 * 2).unfold(1, 2, 1)", ("v0",))
    usage = Usage(changes=((0, "leaf.add_(0.3)"),))
    program = Program(1, 4, 8, (Input("x0", "torch.randn(rows, 4)"),), (), (statement,), "v0", training=True, usage=usage)
    assert run_case(Case(program, Configuration(2, "data"))).kind == "invalid"


def first_difference(wanted: Iterator[tuple[str, Any]], got: Iterator[tuple[str, Any]]) -> str | None:
    """Return the name of the first observation that differs."""
    for (what, one), (_, other) in zip(wanted, got, strict=True):
        try:
            compare(what, one, other)
        except DifferenceError as error:
            return error.what
    return None


@pytest.mark.parametrize("part", ["arguments", "kept", "dataclass"])
def test_lost_effect_is_found(part: str) -> None:
    model = build(effects())
    wanted = observations(Reference(copy.deepcopy(model), is_partitioned=False), effects())
    separated = Separated(model, part)
    separated.keeps1.l_aux = torch.zeros(())  # type: ignore[union-attr]
    got = observations(Reference(separated, is_partitioned=False), effects())
    found = first_difference(wanted, got)
    expected = {"arguments": "arguments after a call", "kept": "kept tensors after a call", "dataclass": "names in output"}
    assert found == expected[part]


def test_reproduction_of_effects_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    script = reproduction(Case(effects(), Configuration(2, "data")), Outcome("wrong", "output", "figures"))
    script = re.sub(r"pm = partition.*", "pm = model", script).partition("pm.train_step")[0]
    exec(compile(script, "<reproduction>", "exec"), {"__name__": __name__})  # noqa: S102  text of our own
    assert "keeps1.l_aux" in capsys.readouterr().out


@pytest.mark.slow
def test_themes_are_drawn_alone_and_together() -> None:
    """Of 2,000 seeds each theme is to have at least 60."""
    found = Counter[str]()
    n_seeds = 400
    for seed in range(n_seeds):
        features = generate(seed).program.features & COUNTED
        found.update(features)
        found["several"] += len(features) > 1
    assert {name for name in COUNTED if found[name] < n_seeds * 60 / 2000} == set()
    assert found["several"] > n_seeds / 5


@pytest.mark.slow
def test_ways_to_train_are_drawn() -> None:
    """Of 2,000 seeds, each is to have at least 40."""
    n_seeds = 200
    found = Counter(feature for seed in range(n_seeds) for feature in generate(seed).program.features)
    expected = ("own reentrant", "own checkpoint", "by module", "bf16-mixed", "bf16-true", "32-true", "recompute=full")
    assert {name: found[name] for name in expected if found[name] < n_seeds * 40 / 2000} == {}


@pytest.mark.parametrize("use_reentrant", [True, *slow(False)])
def test_checkpoint_around_statements(*, use_reentrant: bool) -> None:
    """Two statements, of which a later line reads the first, too; and a layer that is called alone."""
    program = chain(2).program
    inner = "(v0 := self.linear0(x0)), (v1 := torch.tanh(v0))"
    first = f"v0, v1 = checkpoint(lambda x0: ({inner}, v0, v1)[2:], x0, use_reentrant={use_reentrant})"
    second = f"v2 = checkpoint(self.linear1, v1, use_reentrant={use_reentrant})"
    statements = (Statement(first, ("v0", "v1")), Statement(second, ("v2",)))
    program = dataclasses.replace(program, statements=statements, returned=("v2", "v0"))
    outcome = run_case(Case(program, Configuration(2, "fsdp", recompute=None)))
    assert outcome.kind == "equal", outcome


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true"])
def test_precisions_are_compared_with_the_model_in_them(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is a quarter too large is found; rounding is none."""
    case = Case(chain(2).program, Configuration(2, "fsdp", recompute=(("linear*", "full"),), precision=precision))
    assert run_case(case).kind == "equal"
    real = PartitionedModel.full_gradients

    def gradients(pm: PartitionedModel) -> dict[str, Tensor | None]:
        return {name: None if each is None else each * 1.25 for name, each in real(pm).items()}

    monkeypatch.setattr(PartitionedModel, "full_gradients", gradients)
    assert (run_case(case).kind, run_case(case).reason) == ("wrong", "gradients of parameters")


@pytest.mark.slow
@pytest.mark.gloo
def test_case_runs_over_processes(workers: Callable[[int], Workers]) -> None:
    case = dataclasses.replace(chain(2), configuration=Configuration(2, "pipeline", 2, "1F1B"))
    assert [answer.kind for answer in workers(2).values(run_on_rank, case, timeout=120)] == ["equal", "equal"]


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
