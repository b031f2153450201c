"""Runs of transformers' Trainer, as users write them, for a model in one piece or partitioned, in one process or in several."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from partitioner import ConfigError, partition
from partitioner.integrations.transformers import Trainer
from tests.partitioner.integrations.loops import ROWS, Residual, data_of, spoil

STEPS = 10


@dataclass
class Trained:
    """Results of a run.

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


class Counted(nn.Module):
    """Returns a loss that is divided by the number of items that Trainer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **counts: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixel_values)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / counts["num_items_in_batch"]
        return {"loss": loss, "logits": logits}


class Around(nn.Module):
    """A module around a model, which returns what that does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **counts: Tensor) -> dict[str, Tensor]:
        return self.model(pixel_values, labels=labels, **counts)


def partitioned(kind: str, model: nn.Module, mode: str, inputs: Any) -> nn.Module:
    """Return a partitioned model; of the kinds "net inside" and "model inside", a part of it inside a user's module."""
    example = None if kind == "gpt" else (Rows(kind, 1).data[:][0],)  # GPT-2 has an example of its own, without labels

    def parts(module: nn.Module) -> nn.Module:
        return partition(module, 2, mode, example_inputs=example, inputs=inputs, progress=False)

    if isinstance(model, Around):
        return Around(parts(model.model))
    if kind == "net inside":
        assert isinstance(model, Counted)
        model.net = parts(model.net)  # type: ignore[assignment]
        return model
    return parts(model)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows by the names of the model's arguments; labels of the first tokens do not count, in every third row more of them."""

    def __init__(self, kind: str, batches: int) -> None:
        self.kind, self.data = kind, data_of("gpt" if kind == "gpt" else "resnet", batches)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, second = self.data[index]
        if self.kind != "gpt":
            return {"pixel_values": first, "labels": second}
        labels = first.clone()
        labels[: 3 if index % 3 == 0 else 1] = -100
        return {"input_ids": first, "attention_mask": torch.ones_like(first), "labels": labels}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind != "gpt":
        model = Classifier() if kind == "resnet" else Counted()
        return (Around(model) if kind == "model inside" else model).double()
    sizes: dict[str, Any] = {"vocab_size": 23, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)).double()


def trainer(
    kind: str,
    mode: str | None,
    folder: str,
    options: dict[str, Any],
    model: nn.Module | None = None,
    inputs: str = "global",
    *,
    model_init: bool = False,
) -> Trainer:
    """Return a new Trainer, perhaps of a given partitioned model. Half of the rows are those of one of two processes."""
    rows = ROWS if inputs == "global" else ROWS // 2
    options = dict(options)
    function = summed_loss if options.pop("summed_loss", False) else None
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()

    def made() -> nn.Module:
        return model_of(kind) if mode is None else partitioned(kind, model_of(kind), mode, inputs)

    source: dict[str, Any] = {"model_init": made} if model_init else {"model": model or made()}
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        logging_steps=1,
        logging_nan_inf_filter=False,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"max_steps": STEPS, "save_steps": STEPS // 2, "max_grad_norm": 0.5, **options},
    )
    of_process = transformers.Trainer if "WORLD_SIZE" not in os.environ else Trainer  # in one process either serves
    return of_process(**source, args=arguments, train_dataset=Rows(kind, STEPS), eval_dataset=Rows(kind, 2), compute_loss_func=function)


def refusals(folder: str) -> list[str]:
    """Return the errors of transformers' Trainer around a model with one rank a process: when it is made, and when it evaluates."""
    said = []
    for kind, inputs in (("counted", "global"), ("counted", "local"), ("model inside", "global")):
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        arguments = TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True)
        model = partitioned(kind, model_of(kind), "data", inputs)
        try:
            transformers.Trainer(model=model, args=arguments, eval_dataset=Rows(kind, 2)).evaluate()
        except ConfigError as error:
            said.append(str(error))
    return said


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """Return a loss of the user's, which counts the items of all processes."""
    logits = outputs["logits"][..., :-1, :].flatten(0, -2), labels[..., 1:].flatten()
    return nn.functional.cross_entropy(*logits, reduction="sum") / num_items_in_batch


def logged(run: Trainer) -> list[float]:
    """Return loss, norm and rate of every step; the Trainer rounds the loss."""
    return [entry[key] for entry in run.state.log_history if "loss" in entry for key in ("loss", "grad_norm", "learning_rate")]


def trained(kind: str, mode: str | None, folder: str, options: dict[str, Any]) -> Trained:
    """Ten steps, evaluation and prediction, and the second half again from the checkpoint after the first."""
    run = trainer(kind, mode, folder, options)
    done = steps(run, kind)
    spoil(run.model.train())
    again = trainer(kind, mode, folder, options, run.model)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    return replace(done, resumed=logged(again))


def steps(run: Trainer, kind: str) -> Trained:
    """Ten steps, evaluation and prediction."""
    run.train()
    evaluated = run.evaluate()["eval_loss"]
    return Trained(logged(run), evaluated, torch.as_tensor(run.predict(Rows(kind, 2)).predictions).flatten().tolist(), [])


def local_rows(kind: str, mode: str | None, folder: str, options: dict[str, Any]) -> Trained:
    """Ten steps, evaluation and prediction, where each process reads its own rows."""
    return steps(trainer(kind, mode, folder, options, inputs="local" if mode else "global"), kind)


def few_steps(kind: str, mode: str | None, inputs: str, folder: str, options: dict[str, Any]) -> list[float]:
    """Return the log of two steps."""
    run = trainer(kind, mode, folder, {**options, "save_strategy": "no", "max_steps": 2}, inputs=inputs)
    run.train()
    return logged(run)


def best_of_new_model(mode: str | None, folder: str) -> list[float]:
    """Return the log of four steps of a model that Trainer makes itself, and the loss of its best checkpoint."""
    options = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "load_best_model_at_end": True}
    run = trainer("gpt", mode, folder, options, model_init=True)
    run.train()
    return [*logged(run), run.evaluate()["eval_loss"]]


def smoothed_mean(folder: str, options: dict[str, Any]) -> float:
    """Return the mean over two processes of the smoothed losses of the first rows of each, of the unpartitioned model."""
    run = trainer("gpt", None, folder, options)
    batch = next(iter(run.get_train_dataloader()))
    losses = []
    for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        half = {name: tensor[rows] for name, tensor in batch.items()}
        logits = run.model(half["input_ids"], attention_mask=half["attention_mask"]).logits
        losses.append(run.label_smoother({"logits": logits}, half["labels"], shift_labels=True))
    return float(sum(losses).detach()) / 2
