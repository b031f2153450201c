"""Every case, in one table."""

from __future__ import annotations

from tests.models import acyclic, contrastive, convolutions, encoder_decoder, experts, gpt, perceptrons, pretrained, recurrent, unet, values
from tests.models.case import Case

__all__ = ["ZOO", "case_named"]

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
    """The case of that name; raises KeyError when there is none."""
    return {case.name: case for case in ZOO}[name]
