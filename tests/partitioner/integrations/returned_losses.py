"""Loops of Lightning, transformers and accelerate around a model that returns its loss, in one piece or in a pipeline."""

# A module returns Any when it is called, and classes of the frameworks are Any.
# mypy: no-warn-return-any, allow-subclassing-any

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from partitioner import PartitionedModel, partition
from partitioner.integrations.accelerate import Accelerator
from partitioner.integrations.lightning import PartitionStrategy
from partitioner.integrations.transformers import Trainer
from tests.partitioner.integrations.loops import ROWS, data_of

STEPS = 4
PIPELINE: dict[str, Any] = {"mode": "pipeline", "schedule": "1F1B", "n_microbatches": ROWS}


@dataclass
class Run:
    """Results of a loop.

    Attributes:
        losses: of its steps.
        weights: at its end, by name.
        orders: for each step, the actions of the last rank: ``"FBFBFBFB"``.
        warned: what was said of the schedule.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    orders: list[str]
    warned: list[str]


def gpt2() -> nn.Module:
    """Return a model in float64, without dropout; with the same weights at every call."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 23, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)).double()


class Rows(Dataset[dict[str, Tensor]]):
    """Tokens, which are the labels, too."""

    def __init__(self) -> None:
        self.data = data_of("gpt", STEPS)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.data[index][0]
        return {"input_ids": tokens, "labels": tokens}


def recorded(pm: nn.Module, orders: list[str], step: Callable[[], Any]) -> Any:
    """Run a step; note the order of the actions of the last rank, if the model has ranks."""
    if not isinstance(pm, PartitionedModel):
        return step()
    with pm.record() as recording:
        result = step()
    last = pm.plan.n_ranks - 1
    sections = [each.section for each in recording.timeline.computed if each.rank == last and each.section[1:2] in ("F", "B")]
    orders.append("".join(section[1] for section in dict.fromkeys(sections)))
    return result


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return model.full_state_dict() if isinstance(model, PartitionedModel) else model.state_dict()


def example() -> dict[str, Tensor]:
    tokens = data_of("gpt", 1)[:][0]
    return {"input_ids": tokens, "labels": tokens}


def model_of(is_partitioned: bool) -> nn.Module:
    if not is_partitioned:
        return gpt2()
    return partition(gpt2(), 2, example_kwargs=example(), progress=False, **PIPELINE)


class _OfLightning(lightning.LightningModule):
    """Calls a model of transformers; ``reads``: also counts how many of its predictions are right."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.net = gpt2()
        self.reads = reads
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.orders: list[str] = []

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        output = self.net(**batch)
        if self.reads:
            self.log("right", (output.logits.argmax(-1) == batch["labels"]).double().mean())
        self.log("loss", output.loss)
        self.losses.append(output.loss.item())
        return output.loss

    def on_train_batch_start(self, _batch: Any, _index: int) -> None:
        if isinstance(self.net, PartitionedModel):
            self.recording = self.net.record()
            self.recorded = self.recording.__enter__()

    def on_train_batch_end(self, _outputs: Any, _batch: Any, _index: int) -> None:
        if isinstance(self.net, PartitionedModel):
            self.recording.__exit__(None, None, None)
            sections = [each.section for each in self.recorded.timeline.computed if each.rank == 1 and each.section[1:2] in ("F", "B")]
            self.orders.append("".join(section[1] for section in dict.fromkeys(sections)))

    def on_train_end(self) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights_of(self.net).items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def lightning_loop(is_partitioned: bool, folder: Path, reads: bool) -> Run:
    """Train, with gradients of two steps accumulated and clipped."""
    module = _OfLightning(reads)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PartitionStrategy(devices=2, **PIPELINE) if is_partitioned else "auto",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Rows(), batch_size=ROWS))
    return Run(module.losses, module.weights, module.orders, [])


def transformers_loop(is_partitioned: bool, folder: Path, reads: bool) -> Run:
    """Train, with gradients of two steps accumulated and clipped; ``reads``: with smoothed labels."""
    forget()
    orders: list[str] = []
    model = model_of(is_partitioned)

    class Recording(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return recorded(model, orders, lambda: super(Recording, self).training_step(*args, **kwargs))

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        label_smoothing_factor=0.1 if reads else 0.0,
        max_grad_norm=0.5,
        num_train_epochs=1,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Recording(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    losses = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return Run(losses, weights_of(model), orders, [])


def accelerate_loop(is_partitioned: bool, folder: Path, reads: bool) -> Run:
    """Train, with gradients of two steps accumulated and clipped; ``reads``: also count right predictions."""
    forget()
    del folder
    orders: list[str] = []
    losses: list[float] = []
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model_of(is_partitioned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=ROWS))
    for batch in loader:

        def step(batch: dict[str, Tensor] = batch) -> None:
            output = model(**batch)
            accelerator.backward(output.loss)
            losses.append(output.loss.item())
            if reads:
                losses.append(float((output.logits.argmax(-1) == batch["labels"]).double().mean()))

        with accelerator.accumulate(model):
            recorded(model, orders, step)
            if accelerator.sync_gradients:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return Run(losses, weights_of(model), orders, [])


def forget() -> None:
    """Let the next Accelerator be the first of this process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


LOOPS: dict[str, Callable[[bool, Path, bool], Run]] = {
    "lightning": lightning_loop,
    "transformers": transformers_loop,
    "accelerate": accelerate_loop,
}


def trained(loop: str, is_partitioned: bool, folder: Path, reads: bool) -> Run:
    """Run a loop of four steps; ``reads``: it reads more than the loss that the model returns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = LOOPS[loop](is_partitioned, folder, reads)
    run.warned = [text for text in (str(each.message) for each in caught) if "forwards of the pipeline" in text]
    return run
