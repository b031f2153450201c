"""TensorBoard's writer shows parameters and gradients of a partitioned model under the names of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from partitioner import partition

MODES = ["fsdp", pytest.param("pipeline", marks=pytest.mark.slow), pytest.param("tensor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("mode", MODES)
def test_scalars_and_histograms(tmp_path: Path, mode: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(), torch.randn(4, 4).double()
    pm = partition(model, 2, mode, example_inputs=(x,), progress=False)
    groups = [{"params": [each for name, each in pm.named_parameters() if name.endswith(end)]} for end in ("weight", "bias")]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(2):
            optimizer.zero_grad()
            writer.add_scalar("loss", pm.train_step(x, target=x[:, :2], loss_fn=nn.functional.mse_loss), step)
            optimizer.step()
            scheduler.step()
            for index, group in enumerate(optimizer.param_groups):
                writer.add_scalar(f"lr/{index}", group["lr"], step)
            for name, parameter in pm.named_parameters():
                writer.add_histogram(name, parameter, step)
                if parameter.grad is not None:
                    writer.add_histogram(f"{name}/gradient", parameter.grad, step)
    written = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    written.Reload()
    names = {name for name, _ in model.named_parameters()}
    assert set(written.Tags()["scalars"]) == {"loss", "lr/0", "lr/1"}
    assert set(written.Tags()["histograms"]) == names | {f"{name}/gradient" for name in names}
    gradients = pm.full_gradients()
    for name, value in pm.full_state_dict().items():
        last, gradient = (written.Histograms(tag)[-1].histogram_value for tag in (name, f"{name}/gradient"))
        assert (last.num, last.sum) == (value.numel(), pytest.approx(value.sum().item()))
        expected = gradients[name]
        assert expected is not None
        assert (gradient.min, gradient.max) == pytest.approx((expected.min().item(), expected.max().item()))
    assert [event.value for event in written.Scalars("lr/1")] == pytest.approx([0.05, 0.025])
