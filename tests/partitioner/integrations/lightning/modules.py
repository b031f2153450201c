"""LightningModules as their users write them, and runs of the Trainer that record the losses of steps."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from partitioner.integrations.lightning import PartitionStrategy
from tests.support.models.attention.gpt import LENGTH, VOCABULARY, Gpt

ROWS = 8


class Recording(lightning.LightningModule):
    """Records the loss of each training step and of each batch that validates."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.rate = 1e-2

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.validated.append(loss.item())

    def configure_optimizers(self) -> Any:
        trained = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        decayed = [parameter for name, parameter in trained if not name.endswith("bias")]
        biases = [parameter for name, parameter in trained if name.endswith("bias")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.rate, eps=1e-4)  # gradients that are rounding noise do not move weights
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OfTokens(Recording):
    """A language model as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(width=8, heads=2, depth=1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.last(self.second(torch.relu(self.norm(self.first(x))))))


class OfImages(Recording):
    """A small ResNet whose layers are attributes of the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 1e-3
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(Residual(8), nn.MaxPool2d(2), Residual(8))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class OfTwoModels(Recording):
    """Encoder and decoder that the step calls one by one, and a forward of the encoder alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.0), nn.Linear(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.decoder(self(batch[0])), batch[0])


class OfTeacher(Recording):
    """A student, and a teacher that averages it parameter by parameter and validates."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        model = self if self.training else self.teacher
        return nn.functional.mse_loss(model(batch[0]), batch[0])

    def on_train_batch_end(self, *_args: Any) -> None:
        with torch.no_grad():
            for average, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.lerp_(parameter, 0.3)


def _tokens(rows: int) -> tuple[Tensor, ...]:
    return torch.randint(VOCABULARY, (rows, LENGTH)), torch.randint(VOCABULARY, (rows, LENGTH))


def _images(rows: int) -> tuple[Tensor, ...]:
    return torch.randn(rows, 3, 8, 8, dtype=torch.float64), torch.randint(5, (rows,))


def _vectors(rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 6, dtype=torch.float64),)


MODULES: dict[str, tuple[Callable[[], Recording], Callable[[int], tuple[Tensor, ...]]]] = {
    "gpt": (OfTokens, _tokens),
    "resnet": (OfImages, _images),
    "two models": (OfTwoModels, _vectors),
    "teacher": (OfTeacher, _vectors),
}
"""Name -> the module, and so many rows of data."""


def loader(name: str, batches: int, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of batches of eight rows."""
    torch.manual_seed(1)
    return DataLoader(TensorDataset(*MODULES[name][1](batches * ROWS)), batch_size=ROWS, shuffle=shuffle)


def partitioned(mode: Any, **options: Any) -> Any:
    """Return the strategy for two ranks."""
    return PartitionStrategy(devices=2, mode=mode, **options)


def fit(
    name: str,
    strategy: Any,
    folder: Path,
    *,
    epochs: int = 2,
    resumed: Path | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int = 3,
    **options: Any,
) -> tuple[Recording, lightning.Trainer]:
    """Train a module for epochs of five steps, in float64; validate before the first and after each."""
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "enable_model_summary": False, "log_every_n_steps": 1, **options},
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[LearningRateMonitor(), *callbacks],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )
    training, validation = loader(name, 5, shuffle=seed != 3), loader(name, 2)
    torch.manual_seed(2)
    module = MODULES[name][0]().double()  # not by the Trainer: it would load a checkpoint in float32 first
    torch.manual_seed(seed)
    trainer.fit(module, training, validation, ckpt_path=None if resumed is None else str(resumed))
    return module, trainer
