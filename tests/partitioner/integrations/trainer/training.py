"""Runs of transformers' Trainer, as users write them, for a model in one piece or partitioned, in one process or in several."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from partitioner import partition
from tests.partitioner.integrations.loops import ROWS, Residual, data_of, spoil

__all__ = ["Trained", "trained"]

STEPS = 10


@dataclass
class Trained:
    """What a run gave.

    Attributes:
        logged: loss, norm of the gradient and learning rate of every step.
        evaluated: the loss over the evaluation rows.
        predictions: of these rows.
        resumed: what the second half logged, of a new model that went on from the checkpoint after the first half.
    """

    logged: list[float]
    evaluated: float
    predictions: list[float]
    resumed: list[float]


class Classifier(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Residual()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(pixel_values)
        return {"logits": logits} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows by the names of the model's arguments; labels of the first tokens do not count, in every third row more of them."""

    def __init__(self, kind: str, batches: int) -> None:
        self.kind, self.data = kind, data_of(kind, batches)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, second = self.data[index]
        if self.kind == "resnet":
            return {"pixel_values": first, "labels": second}
        labels = first.clone()
        labels[: 3 if index % 3 == 0 else 1] = -100
        return {"input_ids": first, "attention_mask": torch.ones_like(first), "labels": labels}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "resnet":
        return Classifier().double()
    sizes: dict[str, Any] = {"vocab_size": 23, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)).double()


def trainer(kind: str, mode: str | None, folder: str, options: dict[str, Any], model: nn.Module | None = None) -> Trainer:
    """A new Trainer; a model that was partitioned before may be given."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    model, is_new = model or model_of(kind), model is None
    if mode is not None and is_new:
        example = None if kind == "gpt" else (Rows(kind, 1).data[:][0],)  # GPT-2 has an example of its own, without labels
        model = partition(model, 2, mode, example_inputs=example, progress=False)
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        max_steps=STEPS,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=STEPS // 2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Rows(kind, STEPS), eval_dataset=Rows(kind, 2))


def logged(run: Trainer) -> list[float]:
    """Loss, norm and rate of every step; the loss is rounded by the Trainer."""
    return [entry[key] for entry in run.state.log_history if "loss" in entry for key in ("loss", "grad_norm", "learning_rate")]


def trained(kind: str, mode: str | None, folder: str, options: dict[str, Any]) -> Trained:
    """Ten steps, evaluation and prediction, and the second half again from the checkpoint after the first."""
    run = trainer(kind, mode, folder, options)
    run.train()
    evaluated = run.evaluate()["eval_loss"]
    predictions = torch.as_tensor(run.predict(Rows(kind, 2)).predictions).flatten().tolist()
    spoil(run.model.train())
    again = trainer(kind, mode, folder, options, run.model)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    return Trained(logged(run), evaluated, predictions, logged(again))
