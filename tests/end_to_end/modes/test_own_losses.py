"""A step of a model that returns its loss: nothing else is returned, gathered or kept, and the loss stays cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partitioner import Constraints, partition
from partitioner.tracing.trace import trace
from passes.ir.comm.primitives import COLLECTIVES, all_gather, all_reduce, reduce_scatter
from passes.normalize.loss_alone import graph_of_step, own_loss

transformers = pytest.importorskip("transformers")

ROWS, LENGTH, VOCABULARY, WIDTH, LAYERS, HEADS = 4, 16, 96, 32, 2, 4
SIZES = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SIZES))


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_key_value_heads=2, head_dim=8, **SIZES))


def gpt2() -> Any:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCABULARY, loss_type="ForCausalLM", **dropout)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES)
    return transformers.BertForMaskedLM(config)


def t5() -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": VOCABULARY}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes))


MODELS = [llama, qwen3, gpt2, bert, t5]


def made(make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model in float64, and a batch: two rows are padded, and some tokens of the rest are no targets."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, 2:5], labels[1, 10:], mask[1, 10:], labels[3, 3:], mask[3, 3:] = -100, -100, 0, -100, 0
    return make().double().train(), {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def cases() -> list[Any]:
    modes: list[Any] = ["tensor", "sequence", "data", "fsdp", "pipeline", {"data": 2, "tensor": 2}, {"sequence": 2, "tensor": 2}]
    return [pytest.param(make, mode, id=f"{make.__name__}-{mode}") for make in MODELS for mode in modes]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "mode"), cases())
def test_a_step_is_that_of_the_model(make: Callable[[], Any], mode: Any) -> None:
    """Loss and gradients; then the forward, which returns everything, and its backward. Models normalise, and take losses, in float32."""
    model, batch = made(make)
    pm = partition(copy.deepcopy(model), 4, mode, example_kwargs=batch)
    wanted = model(**batch)
    wanted.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(pm.train_step(**batch), wanted.loss.detach(), rtol=1e-6, atol=1e-7)
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-7)
    pm.zero_grad()
    found = pm(**batch)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=1e-7)
    found.loss.backward()
    for name, gradient in pm.full_gradients().items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-6, atol=1e-7)


def messages(pm: Any) -> list[tuple[Any, int]]:
    """Return the collectives of the first rank's step: each with its bytes. Numbers (losses, counts) are left out."""
    nodes = [node for node in pm.graph(0).graph.nodes if node.target in COLLECTIVES and node.meta["bytes"] > 8]
    return [(node.target, node.meta["bytes"]) for node in nodes]


@pytest.mark.slow
def test_tensor_parallel_sends_what_megatron_does() -> None:
    """Four sums of activations a layer; the vocabulary: a sum after the embedding, one of its gradient, and three numbers a token."""
    model, batch = made(gpt2)
    pm = partition(model, 4, "tensor", example_kwargs=batch)
    pm.train_step(**batch)
    activation, numbers = ROWS * LENGTH * WIDTH * 8, ROWS * LENGTH * 8
    sums = [size for kind, size in messages(pm) if kind is all_reduce]
    assert {kind for kind, _ in messages(pm)} == {all_reduce}
    assert [size for size in sums if size > numbers] == [activation] * (4 * LAYERS + 2)
    assert sum(size for size in sums if size <= numbers) <= 3 * numbers


@pytest.mark.slow
def test_context_parallel_sends_keys_values_and_gradients() -> None:
    """Nothing else: no logits, no positions, no masks."""
    model, batch = made(gpt2)
    pm = partition(copy.deepcopy(model), 4, "sequence", example_kwargs=batch, constraints=Constraints(attention="gather"))
    pm.train_step(**batch)
    activation, parameters = ROWS * LENGTH * WIDTH * 8, sum(parameter.numel() for parameter in model.parameters()) * 8
    by_kind = {kind: sum(size for each, size in messages(pm) if each is kind) for kind in {kind for kind, _ in messages(pm)}}
    assert by_kind == {
        all_gather: 2 * LAYERS * activation // 4,
        reduce_scatter: 2 * LAYERS * activation,
        all_reduce: parameters,
    }


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_rank_keeps_its_share_of_the_activations(make: Callable[[], Any], attention: str) -> None:
    model, tokens = make().train(), torch.zeros(8, 256, dtype=torch.int64)

    def kept(devices: int, mode: str, constraints: Constraints | None = None) -> int:
        inputs = {"input_ids": tokens, "labels": tokens}
        pm = partition(copy.deepcopy(model), devices, mode, example_kwargs=inputs, recompute="none", constraints=constraints)
        return max(int(memory.highest["activations"][0]) for memory in pm.simulate().memory)

    alone = kept(1, "model")
    assert kept(4, "sequence", Constraints(attention=attention)) <= 1.2 * alone / 4
    assert kept(4, "data") <= 1.2 * alone / 4


# -- which output is the loss ------------------------------------------------------------------------------------------------------


class Returning(nn.Module):
    def __init__(self, returned: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.returned = nn.Linear(4, 3), returned

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.returned(y.square().mean(), y)


RETURNS: list[tuple[Callable[[Tensor, Tensor], Any], int | None]] = [
    (lambda loss, y: loss, 0),
    (lambda loss, y: {"logits": y, "loss": loss}, 1),
    (lambda loss, y: {"aux": y.abs().mean(), "loss": loss}, 1),
    (lambda loss, y: {"loss": loss, "same": loss}, 0),
    (lambda loss, y: (loss, y), None),
    (lambda loss, y: y, None),
    (lambda loss, y: {"loss": y}, None),
    (lambda loss, y: {"loss": None, "logits": y}, None),
]


@pytest.mark.parametrize(("returned", "index"), RETURNS)
def test_which_output_is_the_loss(returned: Callable[[Tensor, Tensor], Any], index: int | None) -> None:
    graph = trace(Returning(returned), (torch.randn(6, 4),))
    assert own_loss(graph) == index
    alone = graph_of_step(graph)
    assert len(alone.outputs) == len(graph.outputs)
    assert [output.node for output in alone.outputs if output.node] == (
        [graph.outputs[index].node] if index is not None else alone_nodes(graph)
    )


def alone_nodes(graph: Any) -> list[str]:
    return [output.node for output in graph.outputs if output.node]


def test_another_result_as_the_loss() -> None:
    """A loss_fn that picks another number than the loss of the model."""
    torch.manual_seed(0)
    model, x = (
        Returning(lambda loss, y: {"loss": loss, "aux": y.abs().mean(), "logits": y}).double(),
        torch.randn(6, 4, dtype=torch.float64),
    )
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,))
    loss = pm.train_step(x, loss_fn=lambda out, _: out["aux"])
    wanted = model(x)["aux"]
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(pm.full_gradients()["layer.weight"], model.layer.weight.grad)


def test_a_loss_fn_that_looks_at_other_results() -> None:
    """It returns the loss of the model, and logs how many are right."""
    seen = []

    def log(out: Any, target: Tensor) -> Any:
        seen.append(out["logits"].detach().argmax(-1) == target)
        return out["loss"]

    torch.manual_seed(0)
    model, x = Returning(lambda loss, y: {"loss": loss, "logits": y}).double(), torch.randn(6, 4, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,))
    loss = pm.train_step(x, target=torch.zeros(6, dtype=torch.long), loss_fn=log)
    torch.testing.assert_close(loss, model(x)["loss"].detach())
    assert seen[-1].shape[0] in (3, 6)


@dataclass
class Checked:
    """Looks at what it holds."""

    loss: Tensor
    logits: Tensor

    def __post_init__(self) -> None:
        assert self.logits.shape[-1] == 3


torch.export.register_dataclass(Checked)


def test_a_structure_that_cannot_hold_the_loss_alone() -> None:
    torch.manual_seed(0)
    model, x = Returning(Checked).double(), torch.randn(6, 4, dtype=torch.float64)
    pm = partition(copy.deepcopy(model), 2, "data", example_inputs=(x,))
    torch.testing.assert_close(pm.train_step(x), model(x).loss.detach())
    torch.testing.assert_close(pm(x).logits, model(x).logits)


@pytest.mark.slow
def test_a_head_that_the_loss_does_not_read_has_no_gradient() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.other = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Any:
            y = torch.tanh(self.first(x))
            return {"loss": self.last(y).square().mean(), "other": self.other(y)}

    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(6, 4, dtype=torch.float64)
    for mode in ("data", "tensor", "pipeline", "fsdp"):
        model.zero_grad()
        pm = partition(copy.deepcopy(model), 2, mode, example_inputs=(x,))
        torch.testing.assert_close(pm.train_step(x), model(x)["loss"].detach())
        model(x)["loss"].backward()
        assert pm.full_gradients()["other.weight"] is None
        torch.testing.assert_close(pm.full_gradients()["first.weight"], model.first.weight.grad)
        torch.testing.assert_close(pm(x)["other"], model(x)["other"])


class MaskedByConstant(nn.Module):
    """A mean over the positions that a constant of forward leaves in, as of masked autoencoders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.ones(x.shape[0], 8, dtype=x.dtype) * torch.tensor([0.0, 0, 1, 1, 1, 1, 1, 1])
        loss: Tensor = (self.layer(x).mean(-1) * kept).sum() / kept.sum()
        return loss


@pytest.mark.parametrize("mode", ["data", {"pipeline": 2, "data": 2}])
def test_a_divisor_that_is_counted_from_a_constant(mode: Any) -> None:
    """The count takes the constant and the rows of the batch."""
    torch.manual_seed(0)
    model, x = MaskedByConstant().double(), torch.randn(4, 8, 6, dtype=torch.float64)
    pm = partition(model, 2 if mode == "data" else 4, mode, example_inputs=(x,), progress=False)
    loss = pm(x)
    loss.backward()
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(pm.full_gradients()["layer.weight"], model.layer.weight.grad)
