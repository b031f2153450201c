"""Trace distributions of torch without the checks of their arguments and samples, which read values of tensors.

As ``python -O`` does, and a first ``torch.compile``, for the whole process. A distribution that is made with
``validate_args=True`` checks all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributions import Bernoulli, Distribution

UNCHECKED_NOTE = (
    "distributions of torch.distributions do not check their arguments and samples, as under "
    "Distribution.set_default_validate_args(False): the checks read values of tensors"
)
"""Difference of a partitioned model."""


def check_by_default() -> bool:
    """Return whether distributions check their arguments unless told otherwise."""
    try:
        Bernoulli(torch.tensor(2.0))
    except ValueError:
        return True
    return False


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """While active, distributions do not check unless told otherwise; the default must be that they do."""
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(True)
