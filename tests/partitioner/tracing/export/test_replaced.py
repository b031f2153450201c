"""Each name of torch that a trace replaces exists, is put back, and is needed: a trace without it fails, or gives something else."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from partitioner.tracing.autograd.hooks import GRADIENTS_ON
from partitioner.tracing.export import export, replaced
from partitioner.tracing.repeated.find import TRACED_ONE_BY_ONE
from partitioner.tracing.trace import trace
from passes.graph.provenance import checkpoint_of, is_saved_by_checkpoint
from passes.ir.graph import ModelGraph

WIDTH = 4
FLEX = "torch.nn.attention.flex_attention"


class Calls(nn.Module):
    """Calls a function of a linear layer's result."""

    def __init__(self, function: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer, self.function = layer or nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def traced(function: Callable[[Tensor], Tensor], device: str = "cpu") -> ModelGraph:
    x = torch.zeros(2, 3, WIDTH, device=device)
    return trace(Calls(function).to(device), (x,))


def one_row() -> object:
    graph = traced(lambda x: x * 2 if x.shape[0] == 1 else x * 3)
    return any("one row" in note for note in graph.notes)


def in_checkpoint(context: Any = None) -> ModelGraph:
    keywords = {} if context is None else {"context_fn": context}
    return traced(lambda x: checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False, **keywords))


def is_marked() -> object:
    return [node.target for node in in_checkpoint().graph.nodes if checkpoint_of(node) is not None][-1] == torch.ops.aten.cos.default


def is_selected() -> object:
    context = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    return any(is_saved_by_checkpoint(node) for node in in_checkpoint(context).graph.nodes)


def asks_for_gradients() -> object:
    return GRADIENTS_ON in traced(lambda x: x * 2 if torch.is_grad_enabled() else x * 3).gradient_questions


class Doubled(torch.autograd.Function):
    """Has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def own_gradient() -> object:
    graph = traced(Doubled.apply)
    return not any(node.target is torch.ops.aten.clone.default for node in graph.graph.nodes)


def flexible(x: Tensor) -> Tensor:
    q = x.unsqueeze(1)
    result: Tensor = flex.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * (i - j))
    return result[:, 0]


def flexible_in_training() -> object:
    return len(traced(flexible).outputs)


def index_in_autocast() -> object:
    bias, rows = torch.ones(3), torch.arange(3)

    def masked(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            block_mask = flex.create_block_mask(lambda b, h, i, j: bias[i] >= j, None, None, 3, 3, device="cpu")
            q = x.unsqueeze(1)
            return flex.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[j] + rows[i], block_mask=block_mask)[:, 0]

    return len(traced(masked).outputs)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 1, 4, batch_first=True), 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(x, mask)


def encoder_with_a_mask() -> object:
    return len(trace(Masked(), (torch.zeros(2, 3, WIDTH), torch.zeros(3, 3))).outputs)


def known_mask() -> object:
    return len(traced(lambda x: x * 2 if torch.ones(3, 3).tril().any() else x).outputs)


def copied(function: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor] = torch.sin) -> object:
    """Return whether blocks that call a function are traced once: they must run on the meta device for that."""
    graph = trace(nn.Sequential(Calls(before, nn.Identity()), *(Calls(function) for _ in range(4))), (torch.zeros(2, 3, WIDTH),))
    return not any(note.startswith(TRACED_ONE_BY_ONE) for note in graph.notes)


def compiled_libraries() -> object:
    return copied(lambda x: x if torch.compiler.is_compiling() else x * int(x.sum()))


def autocast_of_meta() -> object:
    def whole(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x * 2

    return copied(torch.sin, before=whole)


def constant_on_meta() -> object:
    graph = traced(lambda x: x * 2 if torch.tensor([1.0, 2.0], device=x.device).sum() > 2 else x, "meta")
    return any(node.target is torch.ops.aten.mul.Tensor for node in graph.graph.nodes)


NEEDED_BY: dict[str, Callable[[], object]] = {
    "torch.SymBool.__bool__": one_row,
    "torch.autograd.graph.saved_tensors_hooks.__enter__": is_marked,
    "torch.autograd.graph.saved_tensors_hooks.__exit__": is_marked,
    "torch.is_grad_enabled": asks_for_gradients,
    "torch.utils.checkpoint._CachingTorchDispatchMode.__init__": is_selected,
    "torch.autograd.function._SingleLevelFunction.apply": own_gradient,
    f"{FLEX}._validate_device": flexible_in_training,
    f"{FLEX}.setup_compilation_env": flexible_in_training,
    f"{FLEX}._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": lambda: copied(flexible),
    "torch._dynamo._trace_wrapped_higher_order_op.mod_index": index_in_autocast,
    "torch.nn.modules.transformer._detect_is_causal_mask": encoder_with_a_mask,
    "torch.fx.experimental.proxy_tensor.proxy_call": known_mask,
    "torch.compiler._is_compiling_flag": compiled_libraries,
    "torch.autocast.__init__": autocast_of_meta,
    "torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor": constant_on_meta,
}
"""A name -> what gives true with all replacements, and something else, or an error, without that of the name."""


def test_every_entry_has_its_test() -> None:
    assert list(NEEDED_BY) == [entry.name for entry in replaced.REPLACED]
    assert len(NEEDED_BY) <= 15, "torch has a name less for us each time, not one more: watch calls by a mode, or refuse the feature"


@pytest.mark.parametrize("name", NEEDED_BY)
def test_torch_has_the_name_and_gets_it_back(name: str) -> None:
    def values() -> dict[str, Any]:
        owners = {entry.name: pkgutil.resolve_name(entry.name.rpartition(".")[0]) for entry in replaced.REPLACED}
        return {each: vars(owner).get(each.rpartition(".")[2], "inherited") for each, owner in owners.items()}

    pkgutil.resolve_name(name)
    before = values()
    with replaced.replaced(replaced.TraceRecord(), [name]):
        during = values()
    assert values() == before
    assert [each for each in before if during[each] is not before[each]] == [name]


@pytest.mark.parametrize("name", NEEDED_BY)
def test_the_replacement_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NEEDED_BY[name]()
    others = [each for each in NEEDED_BY if each != name]
    monkeypatch.setattr(export, "replaced", lambda record: replaced.replaced(record, others))
    with ThreadPoolExecutor(1) as thread:  # modes and hooks that it leaves end with the thread
        without = thread.submit(NEEDED_BY[name])
    assert without.exception() is not None or not without.result()
