"""Gradients that are summed travel together: few messages, the first of them soon."""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_BYTES = 8 * 2**20
"""How large a message of gradients is at least. Measured on gloo: 25 MiB, as DistributedDataParallel has, leave too much for the end."""

FIRST_BUCKET_BYTES = 2**20
"""The first message is small, so that communication begins early."""


def gradient_buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Group gradients into messages, from the last parameter (whose gradient is computed first) to the first.

    >>> gradient_buckets([4, 2**20, 2**23, 8])
    [[3, 2], [1, 0]]
    """
    buckets: list[list[int]] = [[]]
    held = 0
    for index in reversed(range(len(sizes))):
        if held >= (BUCKET_BYTES if len(buckets) > 1 else FIRST_BUCKET_BYTES):
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += sizes[index]
    return buckets
