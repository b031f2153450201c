"""Train a LightningModule with Lightning's Trainer over two devices, beside the same Trainer on one.

    python examples/lightning_trainer.py                                                  # both ranks here
    python examples/lightning_trainer.py --mode tensor
    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py                # a process a rank

    Trainer(strategy=PartitionStrategy(devices=2, mode="fsdp"))        the LightningModule is as it would be for one device

After half of the epochs training stops, and a new Trainer goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from partitioner.integrations.lightning import PartitionStrategy


class Classifier(lightning.LightningModule):
    """Tells which product of two inputs is largest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def trained(strategy: Any, epochs: int, folder: Path, resumed: Path | None = None) -> Classifier:
    """Train a new module, from a checkpoint if there is one."""
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:8]).argmax(dim=1))
    checkpoints = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=epochs, callbacks=[checkpoints], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Classifier()
    trainer.fit(module, DataLoader(data, batch_size=64), DataLoader(data, batch_size=64), ckpt_path=resumed)
    return module


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="fsdp", help="pipeline, data, fsdp, tensor, ...")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(argv)

    def strategy() -> Any:
        return PartitionStrategy(devices=2, mode=options.mode)

    folder = Path(tempfile.gettempdir()) / "lightning_trainer"
    first = trained(strategy(), options.epochs // 2, folder)
    second = trained(strategy(), options.epochs, folder, resumed=folder / "last.ckpt")
    whole = trained("auto", options.epochs, folder / "whole")
    if os.environ.get("RANK", "0") != "0":
        return
    print("  step    one device    two devices")
    pairs = list(zip(whole.losses, first.losses + second.losses, strict=True))
    for step, (expected, loss) in enumerate(pairs, start=1):
        if step % 8 == 0:
            print(f"{step:6d}{expected:14.6f}{loss:15.6f}")
    print(f"largest difference {max(abs(expected - loss) for expected, loss in pairs):.1e}")


if __name__ == "__main__":
    main()
