"""Every case, in one table."""

from __future__ import annotations

from tests.support.models import pretrained
from tests.support.models.attention import contrastive, encoder_decoder, experts, gpt
from tests.support.models.case import Case
from tests.support.models.graphs import acyclic, perceptrons, recurrent, values
from tests.support.models.vision import convolutions, unet

ZOO: tuple[Case, ...] = (
    *perceptrons.CASES,
    *convolutions.CASES,
    *gpt.CASES,
    *unet.CASES,
    *encoder_decoder.CASES,
    *acyclic.CASES,
    *values.CASES,
    *experts.CASES,
    *contrastive.CASES,
    *recurrent.CASES,
    *pretrained.CASES,
)


def case_named(name: str) -> Case:
    """Return the case of that name; raise KeyError when there is none."""
    return {case.name: case for case in ZOO}[name]
