"""Published models at their real widths send the bytes of Megatron's formula, and store 1/n (``benchmarks.field.tensor``)."""

from __future__ import annotations

import functools
import itertools

import pytest

from benchmarks.field.models import MODELS
from benchmarks.field.tensor import PRECISIONS, RANKS, counted, formula_bytes, traced
from partitioner.experiments.models.subject import Subject

MODEL = {model.name: model for model in MODELS}
QUICK = ("Llama 8B by hand", "bf16-mixed", 8)
COPIED = {("Qwen2 7B", 8)}
"""Fewer heads of keys than ranks: every rank has the projections of keys and values."""

EVERY = [pytest.param(*each, marks=() if each == QUICK else pytest.mark.slow) for each in itertools.product(MODEL, PRECISIONS, RANKS)]


@functools.lru_cache(maxsize=1)
def subject_of(name: str, precision: str | None) -> Subject:
    return traced(MODEL[name], precision)


@pytest.mark.parametrize(("name", "precision", "count"), EVERY)
def test_bytes_are_those_of_the_formula(name: str, precision: str | None, count: int) -> None:
    subject, model = subject_of(name, precision), MODEL[name]
    parameters = dict(subject.made.model.named_parameters())
    n_elements = sum(parameter.numel() for parameter in parameters.values())
    if (name, count) in COPIED:  # on every rank
        n_elements += (count - 1) * sum(each.numel() for path, each in parameters.items() if "k_proj" in path or "v_proj" in path)
    for in_sequence in (False, True):
        found = counted(subject, count, in_sequence=in_sequence)
        assert found.n_bytes == pytest.approx(formula_bytes(model, precision, count, in_sequence=in_sequence), rel=0.005)
        if not model.has_matrix_before_head:
            assert found.n_parameters * count <= 1.01 * n_elements
