"""A model that cannot be traced is refused: what it does, in which module, on which line, and what to do instead."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._higher_order_ops import scan

from partitioner.tracing.trace import trace
from passes.ir.errors import ConfigError, TraceError
from tests.support.running.slow_values import all_but


class Rounded(torch.autograd.Function):
    """A straight-through estimator: its backward is not that of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Scaled(torch.autograd.Function):
    """Its forward and its backward are what a test makes of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Any], backward: Callable[[Tensor], Any]) -> Any:
        ctx.rule = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.rule(gradient), None, None


rounded: Callable[[Tensor], Tensor] = Rounded.apply
scaled: Callable[..., Any] = Scaled.apply
WEIGHT = torch.ones(6, requires_grad=True)


class Guilty(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.does = forward

    def forward(self, x: Tensor) -> Any:
        return self.does(self.layer(x))


class Model(nn.Module):
    """The guilty module is the second of a list."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), Guilty(forward)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def counts(x: Tensor) -> Tensor:
    return x[: int(x.abs().max())]


def leaves_torch(x: Tensor) -> Tensor:
    return torch.from_numpy(np.tanh(x.detach().numpy()))


def scaled_by_a_weight(x: Tensor) -> Any:
    return scaled(x, lambda each: each * WEIGHT.detach(), torch.tanh)


def scaled_by_a_draw(x: Tensor) -> Any:
    return scaled(x, lambda each: each * torch.rand_like(each), torch.tanh)


def scaled_in_place(x: Tensor) -> Any:
    return scaled(x, lambda each: each.mul_(2) + 1, torch.tanh)


def scaled_by_a_value(x: Tensor) -> Any:
    return scaled(x, torch.tanh, lambda gradient: gradient * gradient.max().item())


def scaled_outside(x: Tensor) -> Any:
    return scaled(x, torch.tanh, lambda gradient: torch.from_numpy(gradient.numpy() * 2))


def scaled_to_a_number(x: Tensor) -> Any:
    return scaled(x, lambda each: each.dim(), torch.tanh)


def straight_through_rows(x: Tensor) -> Tensor:
    return torch.vmap(Rounded.apply)(x)


def differentiates(x: Tensor) -> Any:
    return torch.func.grad(lambda y: (y**2).sum())(x)


def differentiates_rows(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda y: (y**2).sum()))(x)


def conditional(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: torch.dropout(y, 0.5, True), torch.cos, (x,))


def learns_elsewhere(x: Tensor) -> Tensor:
    return x * WEIGHT


def returns_an_object(x: Tensor) -> Any:
    return re.compile("x"), object(), x


def loops_with_dropout(x: Tensor) -> Any:
    return scan(lambda y, weight: (torch.dropout(torch.tanh(y @ weight), 0.5, True), y * 1), x, torch.eye(6).expand(2, 6, 6).clone())[0]


def loops_with_an_alias(x: Tensor) -> Any:
    return scan(lambda sums, row: (sums + row, row), x[0], x)[0]


def hooks_a_node(x: Tensor) -> Tensor:
    y = x * WEIGHT.detach()
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return y


def hooks_several(x: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook((x,), lambda _: None)
    return x


def keeps_gradients(x: Tensor) -> Tensor:
    x.retain_grad()
    return x


def hooks_a_leaf(x: Tensor) -> Tensor:
    WEIGHT.register_post_accumulate_grad_hook(lambda _: None)
    return x


def connectionist_loss(x: Tensor) -> Tensor:
    labels, sizes = torch.ones(2, 2, dtype=torch.int64), torch.tensor([3, 3])
    return nn.functional.ctc_loss(x.reshape(3, 2, 4).log_softmax(-1), labels, sizes, sizes - 1)


def draws_from_a_distribution(x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, x.exp(), validate_args=True).rsample()


def correlations(x: Tensor) -> Tensor:
    return torch.corrcoef(x)


def fails(x: Tensor) -> Tensor:
    return x @ torch.ones(5, 5)


CASES: dict[Callable[..., Any], tuple[str, str]] = {
    branches: ("the values of a tensor decide", "torch.where"),
    counts: ("the values of a tensor decide", "torch.where"),
    leaves_torch: ("outside of PyTorch", "PyTorch's own operations"),
    scaled_by_a_weight: (f"{__name__}.Scaled, which reads a tensor that is not among its arguments", "on its arguments alone"),
    scaled_by_a_draw: ("Scaled, which draws random numbers", "torch.library"),
    scaled_in_place: ("Scaled, which writes into its arguments", "torch.library"),
    scaled_by_a_value: ("Scaled, which cannot be traced: DataDependentOutputException: aten._local_scalar_dense", "torch.library"),
    scaled_outside: ("Scaled, which cannot be traced: RuntimeError: .numpy()", "torch.library"),
    scaled_to_a_number: ("Scaled, which returns something other than tensors", "torch.library"),
    differentiates: ("torch.func.grad", "outside of the model"),
    differentiates_rows: ("torch.func", "outside of the model"),
    conditional: ("a branch of torch.cond draws random numbers", "outside of torch.cond"),
    loops_with_dropout: ("Cannot call numel() on tensor with symbolic sizes", "call the model itself"),
    loops_with_an_alias: ("Encountered aliasing during higher order op tracing", "call the model itself"),
    hooks_a_node: ("reads the node of autograd that computed a tensor, for its hooks (grad_fn)", "torch.autograd.Function"),
    hooks_several: ("sets a hook on a tensor (register_multi_grad_hook)", "torch.autograd.Function"),
    keeps_gradients: ("keeps the gradient of a tensor by a hook (retain_grad)", "torch.autograd.grad"),
    hooks_a_leaf: ("sets a hook on a tensor (register_post_accumulate_grad_hook)", "torch.autograd.Function"),
    connectionist_loss: ("aten._ctc_loss", "outside of the model"),
    draws_from_a_distribution: ("a distribution of torch check its arguments", "leave validate_args=True out"),
    correlations: ("aten.equal.default, which reads the values of a tensor", "outside of the model"),
    fails: ("RuntimeError", "call the model itself"),
}


@pytest.mark.parametrize(
    "function",
    all_but(CASES.keys() - {loops_with_dropout, loops_with_an_alias, conditional}, CASES),
    ids=lambda function: function.__name__,
)
def test_refused_by_module_and_line(function: Callable[..., Any]) -> None:
    problem, remedy = CASES[function]
    model = Model(function)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError) as caught:
        trace(model, (torch.ones(4, 6),))
    error = caught.value
    assert problem in error.problem
    assert remedy in (error.remedy or "")
    assert error.place is not None
    assert error.place.module == "blocks.1"
    first = inspect.getsourcelines(function)[1]
    lines = range(first, first + len(inspect.getsource(function).splitlines()))
    assert error.place.source in [f"{__file__}:{line}" for line in (*lines, inspect.getsourcelines(Guilty.forward)[1] + 1)]
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


class Packed(nn.Module):
    """A recurrent layer of packed sequences, from a state that it makes itself or from a given one."""

    def __init__(self, with_state: bool) -> None:
        super().__init__()
        self.layer, self.with_state = nn.GRU(6, 6, batch_first=True), with_state

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.layer(packed, x.new_zeros(1, x.shape[0], 6) if self.with_state else None)
        return nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]


@pytest.mark.parametrize("with_state", [False, True])
def test_packed_sequences_are_refused(with_state: bool) -> None:
    with pytest.raises(TraceError, match=r"it packs sequences.*\n.*module layer.*\n.*the padded batch.*lengths - 1"):
        trace(Packed(with_state), (torch.ones(4, 5, 6), torch.tensor([5, 3, 1, 2])))


@pytest.mark.parametrize("function", [straight_through_rows, learns_elsewhere, returns_an_object])
def test_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match=r"blocks\.1|requires a gradient|not made of tensors"):
        trace(Model(function), (torch.ones(4, 6),))


def test_the_cause_is_kept() -> None:
    with pytest.raises(TraceError) as caught:
        trace(Model(branches), (torch.ones(4, 6),))
    assert caught.value.__cause__ is not None
    assert "data-dependent" in str(caught.value.__cause__)


def test_a_custom_function_without_gradients_is_traced() -> None:
    def without_gradients(x: Tensor) -> Tensor:
        with torch.no_grad():
            return rounded(x)

    graph = trace(Model(without_gradients), (torch.ones(4, 6),))
    assert "aten.round.default" in [str(node.target) for node in graph.computing_nodes()]


def test_custom_functions_work_while_another_thread_traces() -> None:
    """The watch is for the thread that traces, and is taken down with the trace."""
    with pytest.raises(TraceError):
        trace(Model(scaled_by_a_draw), (torch.ones(4, 6),))
    x = torch.full((2,), 0.3, requires_grad=True)
    rounded(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2))


def test_a_model_on_several_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6, device="meta"))
    with pytest.raises(TraceError, match=r"several devices already: 0.weight on cpu, 1.weight on meta"):
        trace(model, (torch.ones(4, 6),))


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(TraceError, match=r"0.weight has no shape yet"):
        trace(nn.Sequential(nn.LazyLinear(6)), (torch.ones(4, 6),))


def test_a_distributed_model_is_refused() -> None:
    """A tensor with a mesh is distributed."""
    model = nn.Linear(6, 6)
    model.weight.device_mesh = "cpu"  # type: ignore[attr-defined]
    with pytest.raises(TraceError, match=r"weight is distributed already"):
        trace(model, (torch.ones(4, 6),))


def test_tensors_that_overlap_are_refused() -> None:
    memory = torch.zeros(10)
    model = nn.Linear(2, 2)
    model.register_buffer("left", memory[:6])
    model.register_buffer("right", memory[4:])
    with pytest.raises(TraceError, match=r"left and right share part of their memory"):
        trace(model, (torch.ones(4, 2),))


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"do not fit Linear.forward: too many positional arguments"):
        trace(nn.Linear(6, 6), (torch.ones(4, 6), torch.ones(4, 6)))
    with pytest.raises(ConfigError, match="missing a required argument: 'input'"):
        trace(nn.Linear(6, 6), ())


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch prints tracebacks and partial graphs before it raises."""
    for function in (branches, fails):
        with pytest.raises(TraceError):
            trace(Model(function), (torch.ones(4, 6),))
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


class _Decided(nn.Module):
    def __init__(self, decide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.decide = nn.Linear(8, 8), nn.Linear(8, 8), decide

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.decide(self.first(x)))
        return y


def test_the_remedy_for_self_loops_of_graphs() -> None:
    def with_self_loops(y: Tensor) -> Tensor:
        edges = (y[:2] > 0).long()
        nodes = torch.arange(y.shape[0])
        edges = torch.cat([edges[:, edges[0] != edges[1]], nodes.expand(2, -1)], 1)
        return torch.zeros_like(y).index_add(0, edges[1], y[edges[0]])

    with pytest.raises(TraceError, match="how large another is") as caught:
        trace(_Decided(with_self_loops), (torch.randn(4, 8),))
    assert "add_self_loops=False" in (caught.value.remedy or "")


DECIDED_BY_VALUES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda y: y * y.detach().max().item(),
    "tolist": lambda y: y * y.detach().max().tolist(),
    "nonzero": lambda y: y + y.nonzero().sum(),
    "mask": lambda y: y * y[y > 0].sum(),
    "masked_select": lambda y: y * y.masked_select(y > 0).sum(),
    "unique": lambda y: y * y.detach().unique().sum(),
    "where": lambda y: y + torch.where(y > 0)[0].sum(),
    "repeat_interleave": lambda y: y + y.repeat_interleave((y[0] > 0).long(), dim=1).sum(),
}


@pytest.mark.parametrize("name", DECIDED_BY_VALUES)
def test_what_values_decide_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(TraceError, match="lets the values of a tensor decide") as caught:
        trace(_Decided(DECIDED_BY_VALUES[name]), (torch.randn(4, 8),))
    assert "test_tracing_errors.py" in str(caught.value)
    assert ("y.max()" if name in ("item", "tolist") else "torch.where") in str(caught.value)


def test_products_of_two_dtypes_are_refused_where_they_are() -> None:
    """As the model refuses them, and a trace on tensors without values does not."""
    for x in (torch.ones(4, 6, dtype=torch.long), torch.ones(4, 3, 6).double()):
        with pytest.raises(TraceError, match=f"needs one dtype, and has .*{x.dtype}") as caught:
            trace(nn.Sequential(nn.ReLU(), nn.Linear(6, 6)), (x,))
        assert "module 1" in str(caught.value)
    with pytest.raises(TraceError, match="needs one dtype"):
        trace(nn.Linear(6, 6, bias=False), (torch.ones(4, 6).double(),))


def test_sparse_tensors_are_refused_where_they_are() -> None:
    model = nn.Linear(6, 6)
    model.register_buffer("graph", torch.eye(6).to_sparse())
    with pytest.raises(TraceError, match="graph is sparse"):
        trace(model, (torch.ones(4, 6),))
    with pytest.raises(ConfigError, match="the input input is sparse"):
        trace(nn.Linear(6, 6), (torch.ones(4, 6).to_sparse(),))
    with pytest.raises(TraceError, match="computes with a sparse tensor") as caught:
        trace(Model(lambda x: x.to_sparse()), (torch.ones(4, 6),))
    assert "blocks.1" in str(caught.value)
    with pytest.raises(TraceError, match="asks for a sparse gradient") as caught:
        trace(nn.Sequential(nn.Embedding(6, 6, sparse=True)), (torch.zeros(4, 6, dtype=torch.long),))
    assert "sparse=False" in str(caught.value)


@torch.library.custom_op("tests::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x.clone()


def test_an_operation_without_shapes_is_refused_by_what_is_missing() -> None:
    with pytest.raises(TraceError, match=r"how large its result is.*tests::shapeless") as caught:
        trace(Model(shapeless), (torch.ones(4, 6),))
    assert "register_fake" in str(caught.value)
