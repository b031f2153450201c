"""A ``device_map`` as accelerate writes it: a module with a tied weight is on the device of the other module of the weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner import Constraints, partition
from passes.ir.errors import ConfigError

VOCABULARY, WIDTH = 40, 8
MAP = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 1, "norm": 1, "head": 0}
THREE = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 2, "norm": 2, "head": 0}


class Decoder(nn.Module):
    """An embedding, three layers, and a head that may share its weight with the embedding."""

    def __init__(self, *, bias: bool = False, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.activation = nn.Tanh()
        self.norm = nn.LayerNorm(WIDTH)
        self.head: nn.Module = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(self.embed(x))
        for layer in self.layers:
            h = self.activation(layer(h))
        y: Tensor = self.head(self.norm(h))
        return y


class Projection(nn.Module):
    """A head that has the embedding as a module of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.embedding.weight)


def projected() -> Decoder:
    model = Decoder()
    model.head = Projection(model.embed)
    return model


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(getattr(output, "logits", output).flatten(0, -2), target.flatten())


def partitioned(model: nn.Module, device_map: Mapping[str, Any], mode: Any = "model", count: int = 2, **options: Any) -> Any:
    x = torch.randint(0, VOCABULARY, (8, 4))
    constraints = Constraints(device_map=device_map)
    return x, partition(model, count, mode, example_inputs=(x,), constraints=constraints, progress=False, **options)


def check_training(model: nn.Module, x: Tensor, pm: Any) -> None:
    """Compare outputs, gradients and updated weights with the model: of a call with a backward pass, and of a step."""
    whole = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (whole, pm)]
    for is_step in (False, True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = pm.train_step(x, target=x, loss_fn=cross_entropy) if is_step else cross_entropy(pm(x), x)
        expected = cross_entropy(whole(x), x)
        torch.testing.assert_close(loss, expected)
        expected.backward()
        if not is_step:
            loss.backward()
        found = dict(pm.named_parameters())
        wanted = {name: parameter.grad for name, parameter in whole.named_parameters()}
        torch.testing.assert_close({name: found[name].grad for name in wanted}, wanted)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(pm.full_state_dict(), dict(whole.state_dict()))


@pytest.mark.parametrize(
    ("make", "device_map", "count", "options", "own"),
    [
        pytest.param(Decoder, MAP, 2, {}, "", marks=pytest.mark.slow),
        (projected, MAP, 2, {}, ""),
        pytest.param(
            lambda: Decoder(bias=True), MAP, 2, {"mode": "pipeline", "n_microbatches": 4}, ", and head.bias", marks=pytest.mark.slow
        ),
        (Decoder, THREE, 3, {"mode": "pipeline", "n_microbatches": 4}, ""),
    ],
    ids=["model", "projection", "bias", "three"],
)
def test_a_tied_head_runs_after_the_layers(
    make: Callable[[], Decoder], device_map: dict[str, int], count: int, options: dict[str, Any], own: str
) -> None:
    torch.manual_seed(0)
    model = make().double()
    x, pm = partitioned(model, device_map, count=count, **options)
    last = max(device_map.values())
    assert pm.plan.stages[last].modules[-1] == "head"
    shares = "'head' shares embed.weight with a module on rank 0"
    assert f"device_map: {shares}: it runs on rank {last}, which holds a copy{own}" in pm.plan.notes
    check_training(model, x, pm)


def test_a_schedule_that_returns_to_the_first_rank_keeps_the_entry() -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    x, pm = partitioned(model, MAP, "pipeline", schedule="ZBV", n_microbatches=4)
    assert (pm.plan.stages[3].ranks, pm.plan.stages[3].modules) == ((0,), ("head",))
    assert not any("device_map" in note for note in pm.plan.notes)
    check_training(model, x, pm)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_module_without_parameters_runs_where_it_is_called(rank: int) -> None:
    torch.manual_seed(0)
    model = Decoder().double()
    x, pm = partitioned(model, {**MAP, "activation": rank})
    assert f"device_map: 'activation' has no parameters: it runs on rank {1 - rank}" in "\n".join(pm.plan.notes)
    check_training(model, x, pm)


@pytest.mark.parametrize(
    ("model", "device_map", "count", "message"),
    [
        (Decoder(is_tied=False), MAP, 2, "'head' is on rank 0, but 'layers.1', computed before it, is on rank 1"),
        (Decoder(), {**THREE, "head": 1}, 3, "'head' is on rank 1, but 'layers.2', computed before it, is on rank 2"),
        (Decoder(), {**MAP, "embed": 1, "head": 1}, 2, "'layers.0' is on rank 0, but 'embed', computed before it, is on rank 1"),
        (Decoder(), {**MAP, "layers": 1, "head": "disk"}, 2, "(?s)'head' on 'disk'.*not offloaded"),
    ],
    ids=["not tied", "tied to another rank", "embedding", "disk"],
)
def test_an_entry_that_holds_weights_of_its_own_does_not_move(model: Decoder, device_map: dict[str, Any], count: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partitioned(model, device_map, count=count)


@pytest.mark.slow
def test_a_map_for_gpt2_as_infer_auto_device_map_writes_it() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).double()
    first = dict.fromkeys(("transformer.wte", "lm_head", "transformer.wpe", "transformer.drop"), 0)
    x, pm = partitioned(model, {**first, "transformer.ln_f": 1, "transformer.h": 1}, "pipeline")
    assert pm.plan.stages[1].modules[-1] == "lm_head"
    check_training(model, x, pm)
