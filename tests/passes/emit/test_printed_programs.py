"""Printed programs: golden texts, the same text every time, and text that computes what the program computes."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, fx, nn

from partitioner import PartitionedModel, partition
from passes.ir.comm.primitives import COMMUNICATION
from passes.ir.program import Program
from tests.support.golden_text import Golden
from tests.support.models.case import Case, Inputs, classes, mean_squared_error, real
from tests.support.running.programs import Kind, programs


class Chain(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class Tied(nn.Module):
    """A word embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


class Skip(nn.Module):
    """The input of the first stage's last layer is read again by the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[1](first))
        return self.layers[2](second + first)


def rows(generator: Generator, batch_size: int) -> Inputs:
    return (real(generator, batch_size, 4),), {}


def tokens(generator: Generator, batch_size: int) -> Inputs:
    return (classes(generator, 7, batch_size, 5),), {}


def target(generator: Generator, batch_size: int) -> Tensor:
    return real(generator, batch_size, 3)


CHAIN = Case("chain", Chain, rows, target, mean_squared_error)
TIED = Case("tied", Tied, tokens)
SKIP = Case("skip", Skip, rows)


@pytest.mark.parametrize(
    ("name", "case", "schedule", "n_ranks", "kind"),
    [
        ("1f1b_two_ranks", CHAIN, "1F1B", 2, "train_step"),
        ("tied_weight_two_ranks", TIED, "GPipe", 2, "train_step"),
        ("zero_bubble_two_ranks", CHAIN, "ZB1P", 2, "train_step"),
        ("skip_over_a_stage", SKIP, "1F1B", 3, "train_step"),
        ("forward_two_ranks", CHAIN, "1F1B", 2, "forward"),
        ("backward_two_ranks", CHAIN, "1F1B", 2, "backward"),
    ],
)
def test_golden_programs(golden: Golden, name: str, case: Case, schedule: str, n_ranks: int, kind: Kind) -> None:
    golden(name, "\n\n".join(str(program.module) for program in programs(case, schedule, n_ranks, 2)[kind]))


@pytest.mark.parametrize(("name", "mode"), [("tensor_two_ranks", "tensor"), ("data_two_ranks", "data")])
def test_golden_programs_of_meshes(golden: Golden, name: str, mode: str) -> None:
    instance = CHAIN.build()
    pm = partition(instance.model, 2, mode, example_inputs=instance.args, n_microbatches=1, progress=False)
    golden(name, "\n\n".join(str(graph) for graph in pm.graphs))


def partitioned(case: Case, **arguments: Any) -> PartitionedModel:
    instance = case.build()
    return partition(instance.model, example_inputs=instance.args, mode="pipeline", n_microbatches=2, progress=False, **arguments)


@pytest.mark.slow
def test_equal_partitions_print_equal_programs() -> None:
    first, second = (partitioned(TIED, devices=2, schedule="ZB1P") for _ in range(2))
    assert [graph.code for graph in first.graphs] == [graph.code for graph in second.graphs]
    assert first.plan == second.plan


def text_of(found: Sequence[Program]) -> list[str]:
    return [program.module.code for program in found]


def test_copies_print_the_same() -> None:
    for program in programs(SKIP, "ZB1P", 3, 2)["train_step"]:
        copied = copy.deepcopy(program.module)
        assert isinstance(copied, fx.GraphModule)
        assert copied.code == program.module.code
        assert [node.name for node in copied.graph.nodes] == [node.name for node in program.module.graph.nodes]
        assert copied.meta["batch_size"] == program.module.meta["batch_size"]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_pickles_print_the_same() -> None:
    for program in programs(TIED, "1F1B", 2, 2)["train_step"]:
        restored = pickle.loads(pickle.dumps(program.module))  # noqa: S301  our own
        assert isinstance(restored, fx.GraphModule)
        assert restored.code == program.module.code
        assert [node.name for node in restored.graph.nodes] == [node.name for node in program.module.graph.nodes]


class Recorder:
    """A transport that has ready what a rank is to receive, and keeps what it sends."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send(self, tensor: Tensor, destination: int, tag: int) -> None:
        self.sent.append(tensor.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> Any:
        return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=dtype).reshape(tuple(shape)) * (tag + 1)

    def all_reduce(self, tensors: Sequence[Tensor], group: tuple[int, ...], operation: str = "sum") -> Any:
        self.sent += [tensor.clone() for tensor in tensors]
        return list(tensors)

    def ready(self, pending: Any) -> bool:
        return True

    def wait(self, pending: Any) -> Any:
        return pending

    def finish(self) -> None:
        """Nothing is under way."""


_NAMES = {function.__name__ for function in COMMUNICATION}


class _Interpreter(fx.Interpreter):
    """Runs a program with a transport."""

    def __init__(self, module: fx.GraphModule, transport: Recorder) -> None:
        super().__init__(module)
        self._transport = transport

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(self._transport, target.__name__) if target in COMMUNICATION else target
        return super().call_function(function, args, kwargs)


@pytest.mark.parametrize(("case", "mode"), [(TIED, "pipeline"), (CHAIN, "tensor")])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_text_computes_what_the_program_computes(rank: int, case: Case, mode: str) -> None:
    """The printed text is run as Python and compared with the graph run by fx."""
    instance = case.build()
    schedule = "ZB1P" if mode == "pipeline" else None
    pm = partition(instance.model, 2, mode, example_inputs=instance.args, n_microbatches=2, schedule=schedule, progress=False)
    module = pm.graph(rank)
    scope: dict[str, Any] = {}
    exec(module.code, scope)  # noqa: S102  the text under test
    values = {
        "batch": 8,
        "tokens": instance.args[0],
        "x": instance.args[0],
        "target": torch.rand_like(instance.model(*instance.args)),
        "loss_fn": mean_squared_error,
    }
    arguments = [values[node.target] for node in module.graph.nodes if node.op == "placeholder"]
    results = []
    recorders = Recorder(), Recorder()
    scope.update({name: getattr(recorders[0], name) for name in scope.keys() & _NAMES})
    runs: list[Callable[..., Any]] = [lambda *given: scope["forward"](module, *given), _Interpreter(module, recorders[1]).run]
    for run in runs:
        pm.zero_grad()
        with torch.no_grad():
            results.append(run(*arguments)[0])
    sent = [recorder.sent for recorder in recorders]
    assert torch.equal(results[0], results[1])
    assert len(sent[0]) == len(sent[1]) > 0
    for one, other in zip(*sent, strict=True):
        assert torch.equal(one, other)


def test_print_readable_is_the_class() -> None:
    module = programs(CHAIN, "1F1B", 2, 2)["train_step"][0].module
    text = module.print_readable(print_output=False)
    assert "class Rank0TrainStep(torch.nn.Module):" in text
    assert "    def forward(self, batch, x):" in text
    assert text == str(module)


def test_print_readable_prints(capsys: pytest.CaptureFixture[str]) -> None:
    module = programs(CHAIN, "1F1B", 2, 2)["train_step"][0].module
    assert module.print_readable() in capsys.readouterr().out
