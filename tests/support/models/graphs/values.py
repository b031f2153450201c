"""Boundary values besides real tensors: integers, flags, constants, buffers; and nested results."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from tests.support.models.case import Case, Inputs, classes, flags, real


class IntegersAndFlags(nn.Module):
    """Early integers and flags steer late layers; a constant, a buffer and a non-persistent buffer are used on the way."""

    scale: Tensor
    order: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.experts = nn.Parameter(torch.randn(3, 10))
        self.head = nn.Linear(10, 4)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 10))
        self.register_buffer("order", torch.arange(9, -1, -1), persistent=False)

    def forward(self, tokens: Tensor, *, keep: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        large = tokens > 5
        expert = tokens.remainder(3)
        x = torch.relu(self.layers[0](x)) + torch.tensor([0.25, -0.25] * 5, dtype=x.dtype, device=x.device)
        strongest = x.argmax(dim=-1)
        x = torch.tanh(self.layers[1](x))[..., self.order]
        x = torch.where(large.unsqueeze(-1), self.layers[2](x), -x)
        x = x * self.experts[expert] + nn.functional.one_hot(strongest, 10)
        x = self.layers[3](x).masked_fill(~keep.unsqueeze(-1), 0.0)
        return self.head(x.sum(dim=1) / keep.sum(dim=1, keepdim=True).clamp(min=1))


@dataclass
class Detection:
    """Result of the detector: tensors, a nested dict, an integer and a leaf that is absent."""

    boxes: Tensor
    scores: dict[str, Any]
    stride: int
    masks: Tensor | None


torch.export.register_dataclass(Detection, serialized_type_name="tests.support.models.graphs.values.Detection")


class Detector(nn.Module):
    """Returns a dataclass with values of several depths; owns a frozen, an unused and a half-used parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.boxes = nn.Linear(6, 4)
        self.classes = nn.Linear(6, 3)
        self.unused = nn.Linear(6, 2)
        self.trunk[1].weight.requires_grad_(False)

    def forward(self, features: dict[str, Tensor]) -> Detection:
        x = features["image"] + features["prior"]
        early = x
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        logits = self.classes(x)
        scores = {"logits": logits, "best": (logits.argmax(dim=-1), logits.amax(dim=-1)), "early": early * 2}
        return Detection(boxes=self.boxes(x), scores=scores, stride=4, masks=None)


def detection_loss(detection: Detection, target: dict[str, Tensor]) -> Tensor:
    """Return the loss of boxes and classes, each a mean over the batch."""
    boxes = nn.functional.smooth_l1_loss(detection.boxes, target["boxes"])
    return boxes + nn.functional.cross_entropy(detection.scores["logits"], target["labels"])


def _tokens(generator: Generator, batch_size: int) -> Inputs:
    return (classes(generator, 11, batch_size, 5),), {"keep": flags(generator, batch_size, 5)}


def _labels(generator: Generator, batch_size: int) -> Tensor:
    return classes(generator, 4, batch_size)


def _features(generator: Generator, batch_size: int) -> Inputs:
    return ({"image": real(generator, batch_size, 6), "prior": real(generator, batch_size, 6)},), {}


def _detections(generator: Generator, batch_size: int) -> dict[str, Tensor]:
    return {"boxes": real(generator, batch_size, 4), "labels": classes(generator, 3, batch_size)}


CASES = (
    Case("integers_and_flags", IntegersAndFlags, _tokens, _labels, nn.functional.cross_entropy),
    Case("nested_outputs", Detector, _features, _detections, detection_loss),
)
