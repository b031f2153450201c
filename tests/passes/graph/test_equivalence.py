"""Graphs of equal keys have equal results, on fake and on real tensors; what computes something else has another key."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from partitioner.tracing.trace import trace
from passes.graph.equivalence import (
    IN_MEMORY,
    LAID_OUT,
    TRACED,
    ValueKey,
    argument_key,
    by_value,
    call_key,
    constant_key,
    graph_digest,
    graph_key,
)
from passes.ir.torch_private import FakeTensorMode
from tests.support.models.zoo import case_named
from tests.support.processes.processes import Workers

aten = torch.ops.aten

SIZE = 4
"""All values are square matrices of this size, so that every operation takes every value."""

CONSTANTS: Sequence[Any] = (0.0, -0.0, 0, 1, 1.0, True, 2)
STRIDES = ((SIZE, 1), (1, SIZE))
TABLES = (torch.ones(SIZE, SIZE), torch.full((SIZE, SIZE), 2.0))

OPERATIONS: Mapping[str, Callable[[fx.Node, fx.Node, Any], tuple[Any, ...]]] = {
    "add": lambda one, other, constant: (aten.add.Tensor, (one, other), {"alpha": int(constant)}),
    "sub": lambda one, other, _: (aten.sub.Tensor, (one, other)),
    "divide": lambda one, _, constant: (aten.div.Tensor, (one, constant)),
    "clamp": lambda one, _, constant: (aten.clamp_max.default, (one, constant)),
    "transpose": lambda one, *_: (aten.t.default, (one,)),
    "clone": lambda one, *_: (aten.clone.default, (one,), {"memory_format": torch.contiguous_format}),
    "cast": lambda one, *_: (aten._to_copy.default, (one,), {"dtype": torch.float64}),
    "random": lambda one, *_: (aten.rand_like.default, (one,)),
    "random_in_place": lambda one, *_: (aten.uniform_.default, (one,)),
    "write": lambda one, _, constant: (aten.add_.Tensor, (one, constant)),
    "flip": lambda one, _, constant: (aten.flip.default, (one, [int(constant) % 2])),
}
"""Name -> the call with two values and a constant. ``table`` reads an attribute."""


@dataclass(frozen=True)
class Given:
    """An input; ``shared``: it has the storage of the first input, from the second element."""

    strides: tuple[int, int] = STRIDES[0]
    dtype: torch.dtype = torch.float32
    shared: bool = False


@dataclass(frozen=True)
class Call:
    """An operation on values before it, given by their numbers from the last, and a constant."""

    name: str
    first: int
    second: int = 0
    constant: Any = 1


@dataclass(frozen=True)
class Program:
    """A graph as data; ``output`` is the number of the value that is returned, counted from the last."""

    inputs: tuple[Given, ...]
    calls: tuple[Call, ...]
    output: int

    def example(self) -> list[Tensor]:
        """Return inputs of this form; where strides are equal, numbers do not depend on their storage."""
        made: list[Tensor] = []
        for place, each in enumerate(self.inputs):
            start = min(place, 1)
            if each.shared and made:
                made.append(made[0].as_strided((SIZE, SIZE), each.strides, start))
                continue
            numbers = torch.linspace(-1, 2, 2 * SIZE * SIZE, dtype=each.dtype)[start:]
            matrix = numbers.clone().as_strided((SIZE, SIZE), each.strides)
            made.append(matrix.copy_(numbers.as_strided((SIZE, SIZE), STRIDES[0])))
        return made


@dataclass(frozen=True)
class Built:
    """The graph of a program with fake values, under names of its own."""

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    output: fx.Node
    example: list[Tensor]

    def key(self, value_key: ValueKey) -> Hashable:
        return graph_key({node: value_key(node.meta["val"]) for node in self.inputs}, self.nodes, [self.output])

    def fake_results(self, *, strides: bool) -> list[Hashable]:
        values: list[Tensor] = [node.meta["val"] for node in (self.output, *self.inputs)]
        return [(value.shape, value.dtype, value.stride() if strides else None) for value in values]

    def results(self) -> list[Tensor]:
        """Return the output of a run, and the inputs after it."""
        torch.manual_seed(0)
        values: dict[fx.Node, Any] = dict(zip(self.inputs, self.example, strict=True))
        for node in self.nodes:
            values[node] = getattr(node.graph.owning_module, str(node.target)) if node.op == "get_attr" else run(node, values.__getitem__)
        return [values[node].clone() for node in (self.output, *self.inputs)]


def run(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    arguments, keywords = fx.map_arg((node.args, node.kwargs), value_of)
    return node.target(*arguments, **keywords)  # type: ignore[operator]


def built(program: Program, prefix: str = "") -> Built:
    graph = fx.Graph()
    root = nn.Module()
    graph.owning_module = root  # type: ignore[assignment]
    with FakeTensorMode():
        inputs = [graph.placeholder(f"{prefix}x{place}") for place in range(len(program.inputs))]
        for node, value in zip(inputs, program.example(), strict=True):
            node.meta["val"] = value
        values = list(inputs)
        for call in program.calls:
            if call.name == "table":
                name = f"{prefix}table{len(values)}"
                setattr(root, name, TABLES[int(call.constant) % len(TABLES)])
                node = graph.create_node("get_attr", name)
                node.meta["val"] = torch.empty(SIZE, SIZE)
            else:
                node = graph.call_function(
                    *OPERATIONS[call.name](values[-1 - call.first % len(values)], values[-1 - call.second % len(values)], call.constant)
                )
                node.meta["val"] = run(node, lambda each: each.meta["val"])
            values.append(node)
    return Built(tuple(inputs), tuple(values[len(inputs) :]), values[-1 - program.output], program.example())


NUMBERS = st.sampled_from((0, 0, 1, 2, 3, 4))
GIVEN = st.builds(Given, st.sampled_from(STRIDES), st.sampled_from((torch.float32, torch.float64)), st.booleans())
CALLS = st.builds(Call, st.sampled_from((*OPERATIONS, "table")), NUMBERS, NUMBERS, st.sampled_from(CONSTANTS))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Program, Program]:
    """Draw a program, and one that differs from it in one input or call, or in names alone."""
    inputs, calls = draw(st.lists(GIVEN, min_size=2, max_size=3)), draw(st.lists(CALLS, min_size=1, max_size=4))
    # Memory is shared by tensors of one dtype.
    inputs = [dataclasses.replace(each, dtype=inputs[0].dtype) if each.shared else each for each in inputs]
    program = Program(tuple(inputs), tuple(calls), draw(st.sampled_from((0, 0, 0, 1))))
    place = draw(st.integers(-1, len(calls) - 1))
    if place < 0:
        inputs[-1] = draw(GIVEN.filter(lambda each: each.dtype == inputs[0].dtype or not each.shared))
    else:
        call = calls[place]
        changes: Sequence[Mapping[str, Any]] = (
            {},
            {"constant": draw(st.sampled_from(CONSTANTS))},
            {"first": call.second, "second": call.first},
            {"name": draw(st.sampled_from((*OPERATIONS, "table")))},
        )
        calls[place] = dataclasses.replace(call, **draw(st.sampled_from(changes)))
    return program, Program(tuple(inputs), tuple(calls), program.output)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_equal_keys_give_equal_results() -> None:
    """Both kinds of pairs occur: a key that is equal for all graphs, or for none, fails."""
    found: Counter[tuple[bool, bool]] = Counter()

    @settings(max_examples=80, deadline=None, database=None, derandomize=True)
    @given(pairs())
    def check(pair: tuple[Program, Program]) -> None:
        one, other = built(pair[0]), built(pair[1], "other_")
        has_equal_inputs = all(map(same_bits, one.example, other.example))
        is_equal = all(map(same_bits, one.results(), other.results()))
        for value_key in (IN_MEMORY, LAID_OUT, TRACED):
            has_equal_keys = one.key(value_key) == other.key(value_key)
            fakes = (each.fake_results(strides=value_key.strides) for each in (one, other))
            assert not has_equal_keys or next(fakes) == next(fakes)
            assert not has_equal_keys or not has_equal_inputs or is_equal
            assert has_equal_keys or repr(pair[0]) != repr(pair[1])
            found[has_equal_keys, is_equal] += has_equal_inputs

    check()
    assert min(found[True, True], found[False, False]) > 10


ADD = Call("add", 1, 0)


@pytest.mark.parametrize(
    ("value_key", "inputs", "calls"),
    [
        (TRACED, {"dtype": torch.float64}, None),
        (LAID_OUT, {"strides": STRIDES[1]}, None),
        (IN_MEMORY, {"shared": True}, None),
        (TRACED, {"shared": True}, Call("write", 1)),
        (TRACED, {}, Call("add", 0, 1)),
        (TRACED, {}, Call("add", 1, 0, 2)),
        (TRACED, {}, Call("random", 0)),
        (TRACED, {}, Call("table", 0)),
    ],
    ids=["dtype", "strides", "offset", "written memory", "order", "keyword", "random", "attribute"],
)
def test_another_input_or_call_has_another_key(value_key: ValueKey, inputs: Mapping[str, Any], calls: Call | None) -> None:
    other_call = calls or ADD
    call = other_call if inputs else ADD
    one = Program((Given(), Given()), (call,), 0)
    other = Program((Given(), dataclasses.replace(Given(), **inputs)), (other_call,), 0)
    assert built(one).key(value_key) == built(one, "other_").key(value_key)
    assert built(one).key(value_key) != built(other).key(value_key)


def test_another_output_has_another_key() -> None:
    last, earlier = (built(Program((Given(), Given()), (ADD, Call("sub", 0, 2)), output)) for output in (0, 1))
    assert last.key(TRACED) != earlier.key(TRACED)


def test_memory_counts_where_a_call_writes() -> None:
    """Two inputs in one memory and two of their own: a sum is the same, a sum after a write is not."""
    for calls, is_equal in (((ADD,), True), ((Call("write", 1), Call("add", 2, 1)), False)):
        own, shared = (built(Program((Given(), Given(shared=each)), calls, 0)) for each in (False, True))
        assert (own.key(TRACED) == shared.key(TRACED)) == is_equal


def test_attributes_count_by_identity_and_nested_graphs_by_their_calls() -> None:
    """Equal tensors may be written later; a nested graph is a program, whatever its constants are named."""

    def key(table: Tensor, operation: Any, name: str) -> Hashable:
        inner = fx.Graph()
        inner.output(inner.call_function(operation, (inner.placeholder(f"{name}_x"), inner.get_attr(name))))
        module, graph = nn.Module(), fx.Graph()
        nested = nn.Module()
        setattr(nested, name, table)
        module.body = fx.GraphModule(nested, inner)
        graph.owning_module = module  # type: ignore[assignment]
        return call_key(graph.create_node("get_attr", "body"), id)

    assert key(TABLES[0], aten.add.Tensor, "a") == key(TABLES[0], aten.add.Tensor, "b")
    assert key(TABLES[0], aten.add.Tensor, "a") != key(TABLES[0].clone(), aten.add.Tensor, "a")
    assert key(TABLES[0], aten.add.Tensor, "a") != key(TABLES[0], aten.sub.Tensor, "a")


def test_constants_count_by_type_and_digits() -> None:
    keys = [constant_key(value) for value in (*CONSTANTS, None, "1", torch.float32, TABLES[0], TABLES[0].clone())]
    assert len(set(keys)) == len(keys)
    assert constant_key(float("nan")) == constant_key(float("nan"))
    assert by_value(TABLES[0]) == by_value(TABLES[0].clone()) != by_value(TABLES[1])
    nodes = [fx.Graph().placeholder("x") for _ in range(2)]
    assert argument_key([slice(nodes[0], 2)], lambda _: 0) == argument_key((slice(nodes[1], 2),), lambda _: 0)
    assert argument_key(slice(nodes[0], 2), lambda _: 0) != argument_key(slice(nodes[0], 2), lambda _: 1)


# -- digests -------------------------------------------------------------------------------------------------------------------------


NAMES = ("perceptron", "gpt", "batch_norm_convolution", "nested_outputs", "integers_and_flags")


def digests(names: Sequence[str]) -> list[str]:
    """Return the digests of models of the zoo, in this order."""
    instances = [case_named(name).build() for name in names]
    return [graph_digest(trace(each.model, each.args, each.kwargs, training=None)) for each in instances]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(180)
def test_processes_have_the_same_digests(workers: Callable[[int], Workers]) -> None:
    """Strings hash differently there, functions have other addresses, and earlier traces differ."""
    found = digests(NAMES)
    assert workers(2).values(digests, NAMES[::-1]) == [found[::-1]] * 2
    assert len(set(found)) == len(NAMES)


class Positions(nn.Module):
    """Adds numbers that it makes where its inputs are."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], device=x.device)


def digest(model: nn.Module, x: Tensor) -> str:
    return graph_digest(trace(model, (x,), {}, training=True))


def test_where_tensors_are_does_not_count() -> None:
    x = torch.zeros(4, 8)
    assert digest(Positions(), x) == digest(Positions(), x.to("meta"))


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (nn.Sequential(nn.Linear(8, 8), nn.GELU()), (4, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1)), (4, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2)), (6, 8)),
        (nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2)), (4, 3, 8)),
        (nn.Sequential(nn.Linear(8, 8, bias=False), nn.LeakyReLU(0.2)), (4, 8)),
    ],
    ids=["operation", "number", "batch", "sizes", "weights"],
)
def test_another_model_or_batch_has_another_digest(model: nn.Module, sizes: tuple[int, ...]) -> None:
    assert digest(nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2)), torch.zeros(4, 8)) != digest(model, torch.zeros(sizes))


def test_a_digest_counts_frozen_weights_on_request() -> None:
    trained, frozen = (trace(nn.Linear(8, 8).requires_grad_(each), (torch.zeros(4, 8),), {}, training=True) for each in (True, False))
    assert graph_digest(trained) == graph_digest(frozen)
    assert graph_digest(trained, requires_grad=True) != graph_digest(frozen, requires_grad=True)
