"""Guarantees of a traced graph: form, names, batch, notes, and a model left as it was."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import inspect
import operator
import threading
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_unflatten

from partitioner.tracing.trace import trace
from passes.graph.provenance import module_path, source_line
from passes.ir.errors import TraceError
from passes.ir.graph import ModelGraph, RowMixing
from tests.support.models.zoo import case_named
from tests.support.running.traced import Call, run_traced


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
        assert all(line is not None and line.startswith((__file__, inspect.getfile(Call))) for line in lines), lines
        assert not any("partitioner/tracing/export" in node.meta["stack_trace"] for node in graph.computing_nodes())
