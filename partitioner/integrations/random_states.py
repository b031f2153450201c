"""The random states of all processes, where these are ranks of one model and must shuffle, and draw outside of programs, alike."""

from __future__ import annotations

import random
import sys

import torch
import torch.distributed as dist

__all__ = ["share_random_states"]


def share_random_states() -> None:
    """Give all processes the random states of rank 0, of torch, Python and NumPy: loaders that shuffle then read the same rows."""
    numpy = sys.modules.get("numpy")
    states = [(torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state())]
    dist.broadcast_object_list(states, 0)
    torch_state, python_state, numpy_state = states[0]
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    if numpy is not None and numpy_state is not None:
        numpy.random.set_state(numpy_state)
