"""A loop of Lightning Fabric around a partitioned model: accumulate, clip, save, load, beside the same loop on one device.

    python examples/lightning_fabric.py                                                   # both ranks here
    python examples/lightning_fabric.py --mode pipeline
    torchrun --standalone --nproc-per-node 2 examples/lightning_fabric.py                 # a process a rank

    Fabric(strategy=FabricPartitionStrategy())     every process is a rank; without a launcher all ranks are in this one
    fabric.setup(pm, optimizer)                    the partitioned model is one module of the loop; its programs add up gradients

The loop on one device runs in every process; rank 0 prints the losses of both.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from partitioner import partition
from partitioner.integrations.lightning import FabricPartitionStrategy


def train(fabric: Fabric, model: nn.Module, x: Tensor, path: Path) -> list[float]:
    """Return the losses of a loop as its users write it."""
    labels = (x[:, :4] * x[:, 4:8]).argmax(dim=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, labels), batch_size=32))
    losses = []
    for number, (rows, targets) in enumerate(loader, start=1):
        is_accumulating = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = nn.functional.cross_entropy(model(rows), targets)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer})
    fabric.load(path, {"model": model, "optimizer": optimizer})
    return losses


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="tensor", help="pipeline, data, fsdp, tensor, ...")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args(argv)

    fabric = Fabric(accelerator="cpu", strategy=FabricPartitionStrategy())
    fabric.launch()
    torch.manual_seed(0)
    x = torch.randn(32 * options.steps, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    pm = partition(model, 2, options.mode, example_inputs=(x[:32],))
    folder = Path(tempfile.gettempdir())
    losses = train(fabric, pm, x, folder / "lightning_fabric.ckpt")
    expected = train(Fabric(accelerator="cpu", devices=1), model, x, folder / f"lightning_fabric_{fabric.global_rank}.ckpt")
    fabric.print("  step    one device    two devices")
    for step in range(4, options.steps + 1, 4):
        fabric.print(f"{step:6d}{expected[step - 1]:14.6f}{losses[step - 1]:15.6f}")
    fabric.print(f"largest difference {max(abs(one - other) for one, other in zip(expected, losses, strict=True)):.1e}")


if __name__ == "__main__":
    main()
