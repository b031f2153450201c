"""CLIP: an encoder of texts and one of images; every text of the batch is compared with every image (Radford et al., 2021).

The architecture of the transformers library makes its causal mask in float32, whatever the dtype of the model: it does not run in float64.
"""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from tests.support.models.attention.gpt import Block
from tests.support.models.case import Case, Inputs, classes, real

VOCABULARY = 29
LENGTH = 6
END = VOCABULARY - 1
"""The word that ends a text; the largest of its words."""


class TextEncoder(nn.Module):
    """Words to what stands at the end of the text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(LENGTH, width)
        self.block = Block(width, heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, words: Tensor) -> Tensor:
        x = self.word(words) + self.position(torch.arange(words.shape[1], device=words.device))
        x = self.norm(self.block(x))
        return x[torch.arange(x.shape[0], device=x.device), words.argmax(dim=-1)]


class ImageEncoder(nn.Module):
    """Patches of an image, after one token for all of it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=4, stride=4, bias=False)
        self.whole = nn.Parameter(torch.randn(width))
        self.position = nn.Embedding(10, width)
        self.block = Block(width, heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.whole.expand(images.shape[0], 1, -1), patches], dim=1)
        x = x + self.position(torch.arange(x.shape[1], device=x.device))
        return self.norm(self.block(x)[:, 0])


class Clip(nn.Module):
    """Texts and images to the loss: each text must find its image, each image its text."""

    def __init__(self, width: int = 12, heads: int = 3, shared: int = 10) -> None:
        super().__init__()
        self.text = TextEncoder(width, heads)
        self.image = ImageEncoder(width, heads)
        self.text_projection = nn.Linear(width, shared, bias=False)
        self.image_projection = nn.Linear(width, shared, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        text, image = self.text_projection(self.text(words)), self.image_projection(self.image(images))
        text, image = text / text.norm(dim=-1, keepdim=True), image / image.norm(dim=-1, keepdim=True)
        similarity = text @ image.t() * self.scale.exp()
        pairs = torch.arange(similarity.shape[0], device=similarity.device)
        return (nn.functional.cross_entropy(similarity, pairs) + nn.functional.cross_entropy(similarity.t(), pairs)) / 2


def _captioned_images(generator: Generator, batch_size: int) -> Inputs:
    words = classes(generator, END, batch_size, LENGTH)
    words[torch.arange(batch_size), 1 + classes(generator, LENGTH - 1, batch_size)] = END
    return (words, real(generator, batch_size, 3, 12, 12)), {}


CASES = (Case("clip", Clip, _captioned_images, compares_rows=True),)
