"""Guarantees of a traced graph: form, names, batch, notes, and a model left as it was."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import transformers
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_unflatten

from partitioner.tracing.export import guards
from partitioner.tracing.trace import trace
from passes.graph.provenance import module_path, source_line
from passes.ir.errors import TraceError
from passes.ir.graph import ModelGraph, RowMixing
from passes.ir.torch_private import Mod
from tests.support.models.zoo import case_named
from tests.support.running.traced import assert_equal_runs, run_model, run_traced


class Call(nn.Module):
    """A linear layer beside any function: the function takes the layer and the inputs."""

    def __init__(self, function: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, *args, **kwargs)


def names_of(graph: ModelGraph) -> list[str]:
    return [node.name for node in graph.graph.nodes if node.op == "placeholder"]


# -- form --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt", marks=pytest.mark.slow),
        "batch_norm_convolution",
        "nested_outputs",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("lstm", marks=pytest.mark.slow),
    ],
)
def test_form(name: str) -> None:
    instance = case_named(name).build()
    graph = trace(instance.model, instance.args, instance.kwargs)
    inputs = [leaf.placeholder for leaf in graph.inputs if leaf.placeholder is not None]
    assert names_of(graph) == ["batch", *graph.parameters, *graph.buffers, *graph.constants, *inputs]
    assert set(graph.parameters.values()) == {key for key, _ in instance.model.named_parameters()}
    assert set(graph.buffers.values()) == {key for key, _ in instance.model.named_buffers()}
    for node in graph.computing_nodes():
        assert node.op == "call_function"
        assert not isinstance(node.target, HigherOrderOperator)
        assert "sym_size" not in str(node.target)
        assert "val" in node.meta
        assert node.meta["nn_module_stack"]
        items = [user for user in node.users if user.target is operator.getitem]
        behind = node
        for item in items:
            assert behind.next is item
            behind = item
    results: Any = graph.graph.output_node().args[0]
    assert [output.node for output in graph.outputs] == [leaf.name if isinstance(leaf, torch.fx.Node) else None for leaf in results]
    assert not dict(graph.module.named_parameters())


@pytest.mark.slow
def test_names_are_the_same_every_time() -> None:
    def text(model: nn.Module) -> str:
        return str(trace(model, instance.args, instance.kwargs).module.code)

    instance = case_named("llama").build()
    first = text(instance.model)
    assert first == text(instance.model) == text(copy.deepcopy(instance.model))
    assert "linear_1" in first


def test_a_tied_parameter_is_one_placeholder_under_its_first_name() -> None:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("first", torch.zeros(2))
    model.register_buffer("second", model.get_buffer("first"))
    graph = trace(model, (torch.zeros(3, 5, dtype=torch.int64),))
    assert list(graph.parameters.values()) == ["0.weight", "1.weight", "1.bias"]
    assert list(graph.buffers.values()) == ["first"]
    assert dict(graph.aliases) == {"2.weight": "0.weight", "second": "first"}


def test_parameters_over_the_same_memory_are_one_and_said_to_be() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model.get_parameter("0.weight").data)
    graph = trace(model, (torch.zeros(3, 6),))
    assert graph.aliases == {"1.weight": "0.weight"}
    assert any("1.weight shares the memory of 0.weight" in note for note in graph.notes)


def test_dead_code_goes_and_random_draws_stay() -> None:
    def function(layer: nn.Module, x: Tensor) -> Tensor:
        layer(x).sin()
        torch.rand(2)
        return nn.functional.dropout(x, 0.5) + nn.functional.dropout(x, 0.0).to(x.dtype).detach()[:]

    operations = [str(node.target) for node in trace(Call(function), (torch.zeros(3, 6),)).computing_nodes()]
    assert operations == ["aten.rand.default", "aten.dropout.default", "aten.detach.default", "aten.add.Tensor"]


# -- inputs and outputs ------------------------------------------------------------------------------------------------------------


def test_inputs_are_named_as_the_signature_names_them() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *rest: Tensor, mask: dict[str, Any], scale: float = 1.0, **more: Any) -> Tensor:
            return (x + rest[0] * rest[1]) * mask["keep"][0] * scale + more["last"]

    x = torch.zeros(3, 2)
    graph = trace(Model(), (x, x, x), {"mask": {"keep": [x, None]}, "scale": 2.0, "last": x})
    assert [leaf.name for leaf in graph.inputs] == ["x", "rest[0]", "rest[1]", "mask['keep'][0]", "mask['keep'][1]", "scale", "last"]
    assert [leaf.constant for leaf in graph.inputs if leaf.placeholder is None] == [None, 2.0]
    assert len({leaf.placeholder for leaf in graph.inputs} - {None}) == 5, "one tensor passed several times is several inputs"
    assert {leaf.shape for leaf in graph.inputs if leaf.placeholder is not None} == {(graph.batch, 2)}
    assert {leaf.batch_dim for leaf in graph.inputs} == {0, None}


def test_an_input_may_be_called_batch() -> None:
    class Model(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            return batch.reshape(batch.shape[0] * 2, 3)

    graph = trace(Model(), (torch.zeros(4, 6),))
    assert graph.inputs[0].name == "batch"
    assert names_of(graph) == ["batch", graph.inputs[0].placeholder]
    torch.testing.assert_close(graph.module(2, torch.arange(12.0).view(2, 6))[0], torch.arange(12.0).view(4, 3))


def test_outputs_are_named_by_their_path() -> None:
    def function(layer: nn.Module, x: Tensor) -> dict[str, Any]:
        return {"logits": layer(x), "states": (x * 2, {"deep": x.sum()}), "loss": None, "rows": x.shape[0], "n": 3}

    graph = trace(Call(function), (torch.zeros(3, 6),))
    assert [output.name for output in graph.outputs] == ["logits", "states[0]", "states[1]['deep']", "loss", "rows", "n"]
    assert [output.combine for output in graph.outputs] == ["concatenate", "concatenate", "sum", "same", "same", "same"]
    assert [output.constant for output in graph.outputs] == [None, None, None, None, graph.batch, 3]
    assert trace(Call(lambda layer, x: layer(x)), (torch.zeros(3, 6),)).outputs[0].name == ""


@pytest.mark.slow
def test_the_caches_of_transformers_come_out() -> None:
    instance = case_named("gpt2_with_cache").build()
    graph = trace(instance.model, instance.args, instance.kwargs)
    run = run_traced(graph, instance.model, instance.args, instance.kwargs)
    result = tree_unflatten(list(run.leaves), graph.output_tree)
    assert isinstance(result.past_key_values, transformers.DynamicCache)
    assert result.past_key_values.get_seq_length() == instance.args[0].shape[1]
    assert "cache[0][1]" in [output.name for output in graph.outputs]


# -- batch -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_mask_as_long_as_the_batch_is_no_batch(batch_size: int) -> None:
    """Of (sequence, sequence) with as many tokens as rows; the key mask of (batch, sequence) beside it is one."""

    def function(layer: nn.Module, x: Tensor, causal: Tensor, keep: Tensor) -> Tensor:
        scores = layer(x) @ x.transpose(1, 2) + causal
        return scores.masked_fill(~keep.unsqueeze(1), 0.0)

    length = batch_size
    model = Call(function).double()

    def inputs(rows: int) -> tuple[Tensor, ...]:
        return torch.randn(rows, length, 6, dtype=torch.float64), torch.ones(length, length).double(), torch.rand(rows, length) > 0.3

    graph = trace(model, inputs(batch_size))
    assert [leaf.batch_dim for leaf in graph.inputs] == [0, None, 0] or batch_size == 1
    for rows in (1, 3, 6):
        if batch_size != 1 or rows == 1:
            args = inputs(rows)
            assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))


def test_a_batch_of_one_leaves_the_batch_open() -> None:
    graph = trace(Call(lambda layer, x: layer(x)), (torch.zeros(1, 6),))
    assert graph.batch is not None
    assert graph.batch_size == 1
    assert graph.module(4, torch.eye(6), torch.zeros(6), torch.ones(4, 6))[0].shape == (4, 6)


def eight_rows(layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = layer(x) * torch.ones(8, 1, dtype=x.dtype)
    return result


def test_a_model_for_one_batch_size_is_traced_for_it() -> None:
    graph = trace(Call(eight_rows), (torch.zeros(8, 6),))
    assert graph.batch is None
    assert graph.batch_size == 8
    assert "batch" not in names_of(graph)
    assert [output.combine for output in graph.outputs] == ["mixed"]
    assert "fixed at 8" in graph.notes[0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda layer, x: layer(x).view(int(x.shape[0]), 6), "turns it into a constant"),
        (lambda layer, x: layer(x) if x.shape[0] % 2 == 0 else x, "% 2"),
        (lambda layer, x: layer(x) if x.shape[0] >= 4 else x, "batch >= 4"),
    ],
    ids=["constant", "even", "bound"],
)
def test_a_batch_that_cannot_be_open_is_found_by_comparing_traces(function: Callable[..., Any], reason: str) -> None:
    model = Call(function)
    graph = trace(model, (torch.zeros(4, 6),))
    assert graph.batch is None
    assert reason in graph.notes[0]
    assert [(leaf.batch_dim, leaf.shape) for leaf in graph.inputs] == [(0, (4, 6))]
    assert [(output.combine, output.batch_dim) for output in graph.outputs] == [("concatenate", 0)]
    other = trace(model, (torch.zeros(4, 6),), batch_size=2)
    assert (other.batch, other.batch_size) == (None, 2)
    args = (torch.randn(2, 6),)
    assert_equal_runs(run_traced(other, model, args, {}), run_model(model, args, {}))


@pytest.mark.parametrize(
    ("function", "limit"),
    [
        (lambda layer, x: layer(x) if x.shape[0] < 64 else x, 63),
        (lambda layer, x: layer(x) if x.shape[0] <= 1000 else x, 1000),
        (lambda layer, x: layer(x) if x.shape[0] != 7 else x, 6),
    ],
    ids=["bound", "large", "seven"],
)
def test_a_batch_is_open_up_to_the_size_at_which_the_model_branches(function: Callable[..., Any], limit: int) -> None:
    graph = trace(Call(function), (torch.zeros(4, 6),))
    assert graph.batch is not None
    assert (graph.batch_limit, graph.serves(limit), graph.serves(limit + 1)) == (limit, True, False)
    assert f"a batch of more than {limit} rows is traced anew" in graph.notes[0]
    fixed = trace(Call(function), (torch.zeros(limit + 1, 6),))
    assert (fixed.batch, fixed.batch_size) == (None, limit + 1)


def test_an_assumption_that_divides_by_zero_for_some_sizes_does_not_hold_for_them() -> None:
    batch = sympy.Symbol("batch", positive=True, integer=True)
    assert guards._largest_that_holds(sympy.Eq(Mod(24 * batch, 5 - batch), 0), batch) == 4


@pytest.mark.parametrize(
    ("forward", "exports", "batch_dims"),
    [
        (lambda x, y: (x * 2, y * 3), 1, [0, 0]),  # the two never meet
        (lambda x, y: (x * 2, y.reshape(4, 3).sum()), 4, [0, None]),
        (lambda x, y: (x * 2, y.take_along_dim(y.argmax(1, keepdim=True), 1)), 5, [0, 0]),  # an operation of torch fixes the size
        (lambda x, y: (x * int(x.shape[0]), y * int(y.shape[0])), 4, [0, 0]),
    ],
    ids=["open", "one of two", "fixed by one of two", "fixed"],
)
def test_how_often_a_model_is_exported(
    forward: Callable[..., Any], exports: int, batch_dims: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return forward(x, y)

    calls, original = [], torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    graph = trace(Model(), (torch.zeros(4, 6), torch.zeros(4, 3)))
    assert ([leaf.batch_dim for leaf in graph.inputs], len(calls)) == (batch_dims, exports)


def test_what_is_always_true_is_no_reason_to_fix_the_batch() -> None:
    def function(layer: nn.Module, x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(-1, 6).view(4, x.shape[0], 6).transpose(0, 1)

    graph = trace(Call(function), (torch.zeros(5, 4, 6),))
    assert graph.batch is not None
    assert not any("_assert" in str(node.target) for node in graph.computing_nodes())


def test_the_batch_is_the_second_dimension_where_layers_expect_it_there() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0).double()
    graph = trace(model, (torch.zeros(5, 3, 8, dtype=torch.float64),))
    assert [leaf.batch_dim for leaf in graph.inputs] == [1]
    assert [(output.combine, output.batch_dim) for output in graph.outputs] == [("concatenate", 1)]
    args = (torch.randn(5, 2, 8, dtype=torch.float64),)
    assert_equal_runs(run_traced(graph, model, args, {}), run_model(model, args, {}))


def test_sizes_are_expressions_in_the_batch() -> None:
    graph = trace(Call(lambda layer, x: layer(x).reshape(-1, 3)), (torch.zeros(4, 6),))
    node = next(node for node in graph.computing_nodes() if "reshape" in node.name)
    size = node.meta["val"].shape[0].node.expr
    assert isinstance(graph.batch, sympy.Symbol)
    assert size == 2 * graph.batch


# -- notes -------------------------------------------------------------------------------------------------------------------------


def test_notes_name_what_the_user_should_know() -> None:
    class Model(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.register_buffer("seen", torch.zeros(6))
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            with torch.no_grad():
                self.seen += x.mean(0)
            self.last = x
            x = x.unsqueeze(1).squeeze()
            return x if x.shape[0] == 1 else x * 2

    graph = trace(Model(), (torch.zeros(4, 6),))
    parts = ("one row (" + __file__, "squeezes")
    assert len(graph.notes) == len(parts)
    assert all(part in note for part, note in zip(parts, graph.notes, strict=True)), graph.notes
    assert graph.mixing == RowMixing(normalizations=("norm",))
    assert graph.updates == {"b_norm_num_batches_tracked": "same", "b_seen": "mean"}


@pytest.mark.parametrize("is_turned", [False, True], ids=["row_major", "turned"])
def test_a_note_says_where_the_order_of_random_numbers_is_open(*, is_turned: bool) -> None:
    def function(_: nn.Module, x: Tensor) -> Tensor:
        spread = x.unsqueeze(1).expand(-1, 2, -1, -1)
        return nn.functional.dropout(spread.transpose(-1, -2) if is_turned else spread, 0.4)

    notes = trace(Call(function), (torch.zeros(4, 3, 6),)).notes
    assert any("one row they may differ" in note and "dropout" in note for note in notes) == is_turned


# -- the model is left as it was ---------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.BatchNorm1d(6).eval()
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.seen: list[Tensor] = []
        self.kept = {"x": torch.zeros(1)}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.kept["x"] = x
        self.late = x * 2
        return self.dropout(self.frozen(self.norm(x)))


@pytest.mark.parametrize("training", [pytest.param(None, marks=pytest.mark.slow), True, False])
def test_the_model_is_left_as_it_was(training: bool | None) -> None:
    model = Stateful()
    seen, kept, attributes = model.seen, model.kept, set(vars(model))
    state = copy.deepcopy(model.state_dict())
    flags = {name: module.training for name, module in model.named_modules()}
    graph = trace(model, (torch.zeros(4, 6),), training=training)
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert model.calls == 0
    assert model.seen is seen
    assert seen == []
    assert model.kept is kept
    assert kept["x"].shape == (1,)
    assert set(vars(model)) == attributes
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert graph.training is (training is not False)
    normalizations = [node.args[5] for node in graph.computing_nodes() if node.target is torch.ops.aten.batch_norm.default]
    assert normalizations == ([False, False] if training is False else [True, False])


def test_grad_mode_and_autocast_of_the_caller_do_not_matter() -> None:
    model = Call(lambda layer, x: layer(x).relu())
    expected = trace(model, (torch.zeros(4, 6),)).module.code
    with torch.no_grad():
        assert trace(model, (torch.zeros(4, 6),)).module.code == expected
    with torch.inference_mode():
        assert trace(model, (torch.zeros(4, 6),)).module.code == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert trace(model, (torch.zeros(4, 6),)).module.code == expected


def test_threads_may_trace_at_once() -> None:
    expected = trace(Call(lambda layer, x: layer(x)), (torch.zeros(4, 6),)).module.code
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(trace(Call(lambda layer, x: layer(x)), (torch.zeros(4, 6),)).module.code))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_without_memory_are_traced(name: str) -> None:
    case = case_named(name)
    with torch.device("meta"):
        model = case.model()
    instance = case.build()
    graph = trace(model, instance.args, instance.kwargs)
    assert graph.batch is not None
    assert list(graph.parameters.values()) == [key for key, _ in instance.model.named_parameters()]
    values = [node.meta["val"] for node in graph.computing_nodes()]
    assert {value.device.type for value in values if isinstance(value, Tensor)} == {"cpu"}


def test_layers_dropped_with_probability_zero_are_followed() -> None:
    """As the encoders of transformers write it; the number is still drawn."""

    def function(layer: nn.Module, x: Tensor) -> Tensor:
        result: Tensor = x if torch.rand([]) < 0.0 else layer(x)
        return result

    assert [str(node.target) for node in trace(Call(function), (torch.zeros(4, 6),)).computing_nodes()] == [
        "aten.rand.default",
        "aten.linear.default",
    ]


def test_a_forward_that_was_set_on_the_model_is_followed_in_the_same_way() -> None:
    model = Call(lambda layer, x: layer(x))
    own = model.forward

    def forward(x: Tensor) -> Tensor:
        result: Tensor = x if torch.rand([]) < 0.0 else own(x)
        return result

    model.forward = forward  # type: ignore[method-assign]
    assert [str(node.target) for node in trace(model, (torch.zeros(4, 6),)).computing_nodes()] == [
        "aten.rand.default",
        "aten.linear.default",
    ]
    assert model.forward is forward


def test_a_trace_that_fails_leaves_class_and_modes_as_they_were() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("not today")

    model = Fails(6, 6)
    before = _get_current_function_mode_stack()
    with pytest.raises(TraceError, match="not today"):
        trace(model, (torch.zeros(4, 6),))
    assert type(model) is Fails
    assert _get_current_function_mode_stack() == before


def test_paths_of_a_shared_module_are_told_apart() -> None:
    shared = nn.Linear(6, 6)
    graph = trace(nn.Sequential(shared, nn.Tanh(), shared), (torch.zeros(4, 6),))
    paths = [module_path(node) for node in graph.computing_nodes()]
    assert paths == ["0", "1", "2"]


def test_nodes_are_said_to_come_from_the_model_alone() -> None:
    """Not from what stands around its forward: also with several inputs whose sizes are compared, or passed by other names."""

    def function(layer: nn.Module, *inputs: Tensor, **others: Tensor) -> Tensor:
        return layer(sum((*inputs, *others.values())))

    x = torch.zeros(4, 6)
    for args, kwargs in (((x,), {}), ((x, x), {}), ((x,), {"other": x})):
        graph = trace(Call(function), args, kwargs)
        lines = [source_line(node) for node in graph.computing_nodes()]
        assert all(line is not None and line.startswith(__file__) for line in lines), lines
        assert not any("partitioner/tracing/export" in node.meta["stack_trace"] for node in graph.computing_nodes())
