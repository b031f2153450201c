"""``torch.utils.checkpoint`` inside a model changes nothing: what is recomputed is a decision of the plan."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint  # type: ignore[attr-defined]
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from partitioner import partition
from partitioner.tracing.trace import trace
from passes.ir.errors import PartitionWarning, TraceError
from tests.support.running.slow_values import slow

MODES: dict[str, dict[str, Any]] = {
    "model": {"devices": 2, "mode": "model"},
    "pipeline": {"devices": 2, "mode": "pipeline", "n_microbatches": 2},
    "recompute": {"devices": 2, "mode": "pipeline", "n_microbatches": 2, "recompute": "full"},
    "data": {"devices": 2, "mode": "data"},
    "fsdp": {"devices": 2, "mode": "fsdp"},
    "tensor": {"devices": 2, "mode": "tensor"},
    "mesh": {"devices": 4, "mode": {"data": 2, "tensor": 2}},
}


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(p)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        y = self.down(self.dropout(torch.tanh(self.up(x)))) * scale
        return x + (y if mask is None else y * mask)


class Model(nn.Module):
    """Calls its blocks as a test says."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor], p: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.blocks, self.call = nn.Linear(8, 8), nn.ModuleList(Block(p) for _ in range(2)), call

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


def _saves_products(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


_selective = functools.partial(create_selective_checkpoint_contexts, _saves_products)
_outer = functools.partial(checkpoint, use_reentrant=False)
_inner = functools.partial(checkpoint, use_reentrant=True)


def reentrant(block: nn.Module, x: Tensor) -> Any:
    return _inner(block, x)


def keywords(block: nn.Module, x: Tensor) -> Any:
    return _outer(block, x, scale=0.5, mask=torch.full_like(x, 2.0), determinism_check="none", preserve_rng_state=False)


def selective(block: nn.Module, x: Tensor) -> Any:
    return _outer(block, x, context_fn=_selective)


def nested(block: nn.Module, x: Tensor) -> Any:
    return _outer(lambda y: _outer(block, y) * 2, x)


def nested_reentrant(block: nn.Module, x: Tensor) -> Any:
    return _inner(lambda y: _outer(lambda z: _inner(block, z), y) * 2, x)


def sequential(block: nn.Module, x: Tensor) -> Any:
    return checkpoint_sequential([block, nn.Tanh(), block], 2, x, use_reentrant=False)


def offloaded(block: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


CALLS = [reentrant, keywords, selective, nested, nested_reentrant, sequential, offloaded]


def _assert_equal(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Compare results and the gradient of every parameter."""
    pm = partition(copy.deepcopy(model), example_inputs=(x,), progress=False, **options)
    torch.manual_seed(3)
    wanted = model(x)
    wanted.square().sum().backward()
    torch.manual_seed(3)
    found = pm(x)
    found.square().sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)


def _inputs() -> Tensor:
    return torch.randn(4, 3, 8, dtype=torch.float64)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_graphs_are_those_without_checkpoints(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """No call of a checkpoint is left, and nothing is detached."""
    graph = trace(Model(call).double(), (_inputs(),))
    targets = {str(node.target) for node in graph.computing_nodes()}
    assert not any("detach" in target or "higher_order" in target for target in targets), targets


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipeline", "mesh"])
@pytest.mark.parametrize("call", [selective, nested], ids=lambda call: call.__name__)
def test_equal_in_a_pipeline_and_on_a_mesh(call: Callable[[nn.Module, Tensor], Tensor], mode: str) -> None:
    torch.manual_seed(0)
    _assert_equal(Model(call).double(), _inputs(), **MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_equal_in_every_mode(call: Callable[[nn.Module, Tensor], Tensor], mode: str) -> None:
    torch.manual_seed(0)
    _assert_equal(Model(call).double(), _inputs(), **MODES[mode])


@pytest.mark.parametrize("call", [nested, pytest.param(nested_reentrant, marks=pytest.mark.slow)], ids=lambda call: call.__name__)
def test_dropout_draws_as_the_model_does(call: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    _assert_equal(Model(call, 0.5).double(), _inputs(), **MODES["tensor"])


def test_a_module_under_a_composable_checkpoint() -> None:
    torch.manual_seed(0)
    model = Model(lambda block, x: block(x)).double()
    blocks = [composable_checkpoint(block) for block in copy.deepcopy(model.blocks)]
    checkpointed = Model(lambda block, x: block(x)).double()
    checkpointed.load_state_dict(model.state_dict())
    checkpointed.blocks = nn.ModuleList(blocks)
    x = _inputs()
    one, other = (trace(each, (x,)).graph for each in (model, checkpointed))
    assert [str(node.target) for node in one.nodes] == [str(node.target) for node in other.nodes]


def _halved(block: nn.Module, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 0.5, lambda tensor: tensor):
        return block(x)


def _doubles_gradient(block: nn.Module, x: Tensor) -> Any:
    x.register_hook(lambda gradient: gradient * 2)
    return block(x)


def _differentiates(block: nn.Module, x: Tensor) -> Any:
    return x + torch.autograd.grad(block(x).square().sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("call", "reason", "remedy"),
    [
        (_halved, "hooks of its own", "recompute="),
        (_doubles_gradient, "sets a hook on a tensor", "torch.autograd.Function"),
        (_differentiates, "computes a gradient in its forward", "outside of the model"),
    ],
)
def test_what_autograd_would_call_is_refused_with_its_line(call: Callable[[nn.Module, Tensor], Tensor], reason: str, remedy: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        trace(Model(call).double(), (_inputs(),))
    assert remedy in str(caught.value)
    assert "test_checkpoints.py" in str(caught.value)
    assert torch.autograd.grad.__module__ == "torch.autograd"  # what was patched is restored
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    x.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [*slow(True), False])
def test_statistics_that_the_recomputation_updates_again_are_announced(*, use_reentrant: bool) -> None:
    """PyTorch updates them twice a step; the note is not made where nothing is recomputed, or nothing is updated."""

    def checkpointed(block: nn.Module, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=use_reentrant)

    def model(call: Callable[[nn.Module, Tensor], Tensor], momentum: float | None = 0.1) -> nn.Module:
        made = Model(call).double()
        made.blocks[0] = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(8, 8)).double()
        return made

    for momentum in (0.1, None):
        with pytest.warns(PartitionWarning, match="is written under torch.utils.checkpoint"):
            partition(model(checkpointed, momentum), 2, "model", example_inputs=_inputs(), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PartitionWarning)
        partition(model(lambda block, x: block(x)), 2, "model", example_inputs=_inputs(), progress=False)
        partition(model(checkpointed).eval(), 2, "model", example_inputs=_inputs(), progress=False)
