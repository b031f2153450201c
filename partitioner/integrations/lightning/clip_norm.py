"""Clip the gradients of an optimizer by their norm over the whole model, of which this process may have a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from partitioner.model.partitioned_model import PartitionedModel
from partitioner.runtime.state.clip_grad_norm import scale_gradients
from partitioner.runtime.state.stored_parameters import membership
from passes.ir.errors import ConfigError


def has_whole_models(models: Iterable[PartitionedModel]) -> bool:
    """Return whether every process has all parameters of the models, each whole."""
    return all(model.traced.state.all_have_all for model in models)


def clip_norm(
    models: Sequence[PartitionedModel],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of an optimizer's parameters so that their norm is at most ``max_norm``; return the old norm.

    Args:
        models: all ranks must call it with the same ones.
        parameters: those of one optimizer.

    Raises:
        ConfigError: the optimizer has some of the parameters of a model of which this process has a part.
    """
    given = list(parameters)
    if has_whole_models(models) and all(member is None or member.has_all for member in map(membership, given)):
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    known = {id(parameter) for parameter in given}
    clipped = [model for model in models if _has(known, model)]
    of_models = {id(parameter) for model in clipped for parameter in model.parameters()}
    others = [parameter for parameter in given if id(parameter) not in of_models]
    norms = [model.clip_grad_norm_(float("inf"), norm_type) for model in clipped]
    gradients = [parameter.grad for parameter in others if parameter.grad is not None]
    norms += [torch.nn.utils.get_total_norm(gradients, norm_type)] if gradients else []
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the total norm of the gradients is {total.item()}, and error_if_nonfinite=True")
    scale_gradients([*(parameter for model in clipped for parameter in model.parameters()), *others], total, max_norm)
    return total


def _has(known: set[int], model: PartitionedModel) -> bool:
    """Return whether an optimizer has the trainable parameters of a model; raise ConfigError if it has only some of them.

    A process without parameters of the model takes part in the norm.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = sum(id(parameter) in known for parameter in trainable)
    if found not in (0, len(trainable)):
        raise ConfigError(
            "gradients of one optimizer cannot be clipped by their norm: it has some of the parameters of a partitioned model, and the "
            "norm is taken over all of them",
            remedy='clip by value: Trainer(gradient_clip_algorithm="value") or fabric.clip_gradients(..., clip_val=...); '
            "or give one optimizer all parameters, in groups",
        )
    return found == len(trainable)
