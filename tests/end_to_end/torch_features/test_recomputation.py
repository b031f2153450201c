"""Recomputation by region: the numbers of the model under every policy, and memory as with a checkpoint around every block."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.live_storages import LiveStorages
from partitioner import Constraints, partition
from passes.ir.schedule import ActionKind
from passes.normalize.randomness.functional_rng import dropout_mask
from tests.support.running.slow_values import all_but, slow

MODES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "model": (1, "model", {}),
    "pipeline": (2, "pipeline", {"n_microbatches": 2, "schedule": "1F1B"}),
    "data": (2, "data", {}),
    "fsdp": (2, "fsdp", {}),
    "zero2": (2, "zero2", {}),
    "tensor": (2, "tensor", {}),
    "sequence": (2, "sequence", {}),
    "mesh": (4, {"pipeline": 2, "tensor": 2}, {"n_microbatches": 2}),
}
POLICIES: dict[str, Any] = {
    "full": "full",
    "by module": {"blocks.*": "full", "blocks.*.attention": "selective", "blocks.1": "none"},
    "all of them": {"": "full"},
}


class Attention(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.queries(x) @ self.keys(x).transpose(-1, -2) / 4
        return self.dropout(scores.softmax(-1)) @ self.values(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, p)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(p), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def direct(block: nn.Module, x: Tensor) -> Any:
    return block(x)


class Model(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Any] = direct, depth: int = 4, width: int = 8, p: float = 0.2) -> None:
        super().__init__()
        self.blocks, self.head, self.call = nn.ModuleList(Block(width, p) for _ in range(depth)), nn.Linear(width, 3), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)  # type: ignore[no-any-return]


def check_step(model: nn.Module, x: Tensor, devices: int, mode: Any, **options: Any) -> str:
    """Compare the results, the input's gradient and all gradients with the model's; return the plan's policy."""
    pm = partition(copy.deepcopy(model), devices, mode, example_inputs=(x,), training=True, progress=False, **options)
    gradients = []
    for module in (model, pm):
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        result = module(given)
        result.square().sum().backward()
        gradients.append((result.detach(), given.grad))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-9)
    found = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)
    return pm.plan.recompute


@pytest.mark.parametrize("mode", ["model", *slow(*list(MODES)[1:])])
@pytest.mark.parametrize("policy", all_but(["by module"], POLICIES))
def test_gradients_under_every_policy(policy: str, mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    devices, dimensions, options = MODES[mode]
    p = 0.0 if "n_microbatches" in options else 0.2  # microbatches draw masks of their own
    check_step(Model(p=p).double(), x, devices, dimensions, recompute=POLICIES[policy], **options)


class WithLoss(nn.Module):
    """Returns its loss: a mean over targets, over elements, or with weights of the model's own."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.net, self.loss = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)), loss

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        if self.loss == "targets":
            loss = nn.functional.cross_entropy(logits, target)
        elif self.loss == "elements":
            loss = (logits.tanh() - target[:, None]).square().mean()
        else:
            each, mask = nn.functional.cross_entropy(logits, target, reduction="none"), (target > 1).to(logits.dtype)
            loss = (each * mask).sum() / mask.sum().clamp(min=1)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("mode", ["data", *slow("fsdp", "zero2", "tensor", "pipeline", "rows and stages")])
@pytest.mark.parametrize("loss", ["targets", "elements", "own weights"])
def test_selective_recomputation_of_a_model_that_returns_its_loss(loss: str, mode: str) -> None:
    """A plan names what rewrites of the loss computed, and backwards repeat, by the operation that was rewritten."""
    torch.manual_seed(0)
    model, x, target = WithLoss(loss).double(), torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    modes: dict[str, tuple[int, Any, dict[str, Any]]] = MODES | {"rows and stages": (4, {"data": 2, "pipeline": 2}, {"n_microbatches": 2})}
    devices, dimensions, options = modes[mode]
    inputs: dict[str, Any] = {"example_inputs": (x, target), "progress": False}
    pm = partition(copy.deepcopy(model), devices, dimensions, recompute="selective", **inputs, **options)
    again = partition(copy.deepcopy(model), devices, dimensions, plan=pm.plan, **inputs)
    expected = model(x, target)
    expected["loss"].backward()
    for each in (pm, again):
        found = each(x, target)
        found["loss"].backward()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        gradients = each.full_gradients()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)


class Noise(nn.Module):
    """Products and random numbers that only a sum outside of the module reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down(nn.functional.gelu(self.up(x))), torch.randn_like(x)


class NoisyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.noise, self.out = Noise(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        product, noise = self.noise(x)
        return self.out(nn.functional.gelu((x + noise).sin() + product).exp())  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["model", *slow("data")])
@pytest.mark.parametrize("policy", [{"*": "full", "*.noise": "selective"}, *slow("selective", {"*.noise": "selective"})], ids=str)
def test_sums_outside_of_a_selective_module_have_its_random_numbers(policy: Any, mode: str) -> None:
    torch.manual_seed(0)
    devices, dimensions, options = MODES[mode]
    model = nn.Sequential(*(NoisyBlock(8) for _ in range(3))).double()
    check_step(model, torch.randn(4, 6, 8, dtype=torch.float64), devices, dimensions, recompute=policy, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipeline", "model", "data", "fsdp", "tensor", "mesh"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_the_model(mode: str, *, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    devices, dimensions, options = MODES[mode]
    p = 0.0 if "n_microbatches" in options else 0.2  # microbatches draw masks of their own
    model = Model(functools.partial(checkpoint, use_reentrant=use_reentrant), 6, p=p).double()
    assert check_step(model, x, devices, dimensions, **options) == "by region"


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "full", "selective", "none"])
def test_checkpoints_that_transformers_enables(policy: str | None) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=16, use_cache=False)
    model = GPT2LMHeadModel(config).double()
    model.gradient_checkpointing_enable()
    tokens = torch.randint(64, (4, 8))
    pm = partition(copy.deepcopy(model), 2, "fsdp", example_inputs=(tokens,), training=True, recompute=policy, progress=False)
    assert pm.plan.recompute == (policy or "by region")
    for module in (model, pm):
        torch.manual_seed(3)
        module(tokens).logits.square().mean().backward()
    found = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)


def peak_of_step(module: nn.Module, x: Tensor) -> int:
    """Return the peak bytes of a forward and a backward above the start, on the second run."""
    module(x).sum().backward()
    with LiveStorages() as counter:
        module(x).sum().backward()
    return int(counter.peaks[0])


@pytest.mark.parametrize("policy", [None, *slow("full", {"blocks.*": "full"})], ids=str)
def test_peak_memory_is_that_of_a_checkpoint_around_every_block(policy: Any) -> None:
    """Eight blocks of 16 MiB inside; their inputs have 1 MiB."""
    torch.manual_seed(0)
    checkpointed = Model(functools.partial(checkpoint, use_reentrant=False), 8, 64, 0.0)
    model = checkpointed if policy is None else Model(depth=8, width=64, p=0.0)
    x = torch.randn(64, 64, 64)
    pm = partition(model, 1, "model", example_inputs=(x,), training=True, recompute=policy, progress=False)
    assert peak_of_step(pm, x) < 1.05 * peak_of_step(checkpointed, x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(lambda y: self.first(y).relu(), x, use_reentrant=False))  # type: ignore[no-any-return]


def test_sequential_tiles_of_a_model_with_checkpoints() -> None:
    """Every tile is recomputed: the plan has no other regions."""
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert check_step(Convolutions().double(), x, 1, {"tile": 4}) == "full"


def test_selective_recomputation_saves_the_own_part_of_a_mask() -> None:
    """Ranks that share a sequence draw the mask of all of it, and drop values of their positions alone."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out, self.dropout = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.qkv(self.norm(x)).view(-1, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(query, key, value)
            result: Tensor = x + self.dropout(self.out(attended.transpose(1, 2).reshape(-1, 8, 16)))
            return result

    axes = Constraints(axes={"heads": "tensor", "sequence": "tensor"})
    options: dict[str, Any] = {"recompute": "selective", "constraints": axes, "training": True, "progress": False}
    pm = partition(nn.Sequential(Layer(), Layer()), 2, "tensor", example_inputs=(torch.randn(2, 8, 16),), **options)
    masks = [node for node in pm.graphs[0].graph.nodes if dropout_mask in (node.target, *node.args)]
    assert len(masks) == 2
    assert all(user.meta["section"].kind is ActionKind.FORWARD for mask in masks for user in mask.users)
