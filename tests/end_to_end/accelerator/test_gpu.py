"""All ranks on one accelerator: losses, gradients, weights and random numbers are those of the model on that accelerator."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, PartitionError, partition
from tests.support.models.zoo import ZOO, case_named
from tests.support.running.transparency import N_MICROBATCHES, first_difference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no accelerator")]

GPU = "cuda:0"

EXACT = 1e-9
FLOAT32_INSIDE = 4
"""Models that compute in float32 inside add up in another order on an accelerator: so many times the tolerance on the CPU."""

MESHES: Mapping[str, Mapping[str, int]] = {
    "pipeline": {"pipeline": 2},
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "sequence": {"sequence": 2},
    "tile": {"tile": 2},
    "data x tensor": {"data": 2, "tensor": 2},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2},
}


UNFIT = (
    "no space that tiles could cut",
    "no axis 'sequence'",
    "hx and cx should also be 3-D",  # of an LSTM on an accelerator: the fake kernel of PyTorch 2.11 gives its state four dimensions
)
"""Refusals where a mode does not fit a model, or this version of PyTorch cannot trace it."""


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """Use full float32 precision, and one algorithm for each size, in convolutions and products."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [case.name for case in ZOO])
def test_training_is_that_of_the_model(name: str, mesh: str) -> None:
    case, mode = case_named(name), dict(MESHES[mesh])
    case = dataclasses.replace(case, tolerance=case.tolerance * (FLOAT32_INSIDE if case.tolerance > EXACT else 1))
    count = N_MICROBATCHES if "pipeline" in mode else 1
    try:
        found = first_difference(case, n_microbatches=count, device=GPU, devices=[GPU] * math.prod(mode.values()), mode=mode)
    except PartitionError as refusal:
        reason = str(refusal).splitlines()[0]
        if not any(each in reason for each in UNFIT):  # any other refusal is a failure
            raise
        pytest.skip(reason)
    assert found is None


class Block(nn.Module):
    """Dropout before, inside and after attention, and in a feed-forward."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.token, self.qkv, self.project = nn.Embedding(50, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(rate)
        self.feed_forward = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(rate), nn.Linear(64, 32))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, length) to (batch, length, 32)."""
        x = self.dropout(self.token(tokens))
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.rate, is_causal=True)
        x = x + self.dropout(self.project(attended.transpose(1, 2).reshape(batch, length, width)))
        result: Tensor = x + self.feed_forward(x)
        return result


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


TOKENS, TARGET = torch.randint(50, (8, 16), generator=torch.Generator().manual_seed(1)), torch.zeros(8, 16, 32)


def network(rate: float, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model with dropout of a rate, its input and a target."""
    torch.manual_seed(0)
    return Block(rate).to(GPU, dtype), TOKENS.to(GPU), TARGET.to(GPU, dtype)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("mode", ["model", "data", "fsdp", "tensor", "sequence"])
def test_dropout_draws_the_masks_of_the_model(mode: str, recompute: str) -> None:
    model, tokens, target = network(0.2, torch.float64)
    pm = partition(model, [GPU] * 2, mode, example_inputs=(tokens,), recompute=recompute)
    torch.manual_seed(7)
    loss = pm.train_step(tokens, target=target, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(7)
    wanted = nn.functional.mse_loss(model(tokens), target)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-12)
    gradients = pm.full_gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize("mode", ["pipeline", "data", "fsdp", "tensor", "sequence", {"data": 2, "tensor": 2}], ids=str)
def test_mixed_precision_is_that_of_autocast(mode: str | Mapping[str, int]) -> None:
    """Within what bfloat16 rounds: the loss to a thousandth, each gradient to a fiftieth of its largest element."""
    model, tokens, target = network(0.0, torch.float32)
    ranks = 2 if isinstance(mode, str) else 4
    pm = partition(model, [GPU] * ranks, mode, example_inputs=(tokens,), precision="bf16-mixed")
    loss = pm.train_step(tokens, target=target, loss_fn=mean_square)
    with torch.autocast("cuda", torch.bfloat16):
        wanted = mean_square(model(tokens), target)
    wanted.backward()
    torch.testing.assert_close(loss.float(), wanted.detach().float(), rtol=1e-3, atol=1e-3)
    for name, gradient in pm.full_gradients().items():
        given = model.get_parameter(name).grad
        assert gradient is not None
        assert given is not None
        assert float((gradient - given).abs().max()) <= 0.02 * float(given.abs().max()), name


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("mode", ["fsdp", "tensor", "pipeline"])
def test_optimizers_of_the_accelerator_update_shards(mode: str, fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5)).to(GPU, torch.float64)
    x, target = torch.randn(8, 16, device=GPU, dtype=torch.float64), torch.randn(8, 5, device=GPU, dtype=torch.float64)
    pm = partition(model, [GPU] * 2, mode, example_inputs=(x,))
    ours = torch.optim.AdamW(pm.parameters(), lr=1e-2, fused=fused)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        nn.functional.mse_loss(model(x), target).backward()
        ours.step()
        theirs.step()
    for name, value in pm.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-12)


def _peak_of_step(pm: PartitionedModel, x: Tensor, target: Tensor) -> int:
    """Return the peak bytes of the accelerator during a step."""
    for _ in range(2):
        pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
        pm.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_holds_what_the_plan_says(recompute: str) -> None:
    """Parameters, gradients and activations of one device, to a tenth: the simulation knows no workspace of kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU())])
    x, target = torch.randn(8192, 2048, device=GPU), torch.zeros(8192, 2048, device=GPU)
    before = torch.cuda.memory_allocated()
    pm = partition(model, [GPU], "model", example_inputs=(x,), recompute=recompute, optimizer="none")
    held = _peak_of_step(pm, x, target) - before
    assert held == pytest.approx(max(pm.simulate().peak_memory), rel=0.1)


SCRIPT = """
import torch
from torch import nn
from partitioner import partition

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double()
x, target = torch.randn(6, 8).double(), torch.randn(6, 4).double()
for mode in ("model", "data", "fsdp", "pipeline"):
    pm = partition(model, 1, mode, example_inputs=(x,))
    loss = pm.train_step(x.cuda(), target=target.cuda(), loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss.cpu(), nn.functional.mse_loss(model(x), target).detach())
    assert all(parameter.is_cuda for parameter in pm.parameters())
"""


def test_one_process_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(script)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(Path.cwd())}
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_check_finds_no_difference() -> None:
    model, tokens, _ = network(0.0, torch.float64)
    report = partition(model, [GPU] * 2, "tensor", example_inputs=(tokens,)).check(tokens)
    assert report, str(report)


def test_a_model_on_the_cpu_takes_examples_on_the_accelerator() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).double(), torch.randn(6, 8, dtype=torch.float64)
    pm = partition(model, [GPU] * 2, "tensor", example_inputs=(x.to(GPU),))
    torch.testing.assert_close(pm(x.to(GPU)).cpu(), model(x))
