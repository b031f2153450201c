"""Read ``precision=``, by Lightning's names.

                parameters    computed in                           gradients
"32-true"       float32       float32                               float32
"bf16-true"     bfloat16      bfloat16                              bfloat16
"16-true"       float16       float16                               float16
"bf16-mixed"    as they are   bfloat16 where torch.autocast does    as the parameters
"16-mixed"      as they are   float16 where torch.autocast does     as the parameters; scale the loss (torch.amp.GradScaler)

``reduce_dtype=`` is the type in which gradients of parameters are summed over ranks; left out, that of the parameters.
"""

from __future__ import annotations

import copy
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from cost_models.hardware.clusters import Cluster
from passes.ir.errors import ConfigError
from passes.ir.graph import Autocast
from passes.ir.mesh import STAGES, Mesh
from passes.ir.plan import REDUCE_DTYPES
from passes.ir.torch_private import pytree

TRUE = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
"""Precision -> dtype to which parameters and all floating-point inputs are converted."""

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Precision -> dtype of ``torch.autocast``; parameters stay as they are."""


def true_dtype(precision: str | None) -> torch.dtype | None:
    """Return the dtype to which a precision converts parameters and inputs, or None; raise ConfigError for an unknown precision."""
    if precision not in (None, *TRUE, *MIXED):
        raise ConfigError(f"there is no precision={precision!r}", remedy=f"choose one of {', '.join((*TRUE, *MIXED))}, or None")
    return TRUE.get(precision or "")


def read_reduce_dtype(value: torch.dtype | str | None) -> str | None:
    """Return the name of a type of sums: ``torch.bfloat16`` is ``"bfloat16"``; raise ConfigError for one that is not offered."""
    name = str(value).removeprefix("torch.")
    if value is not None and name not in REDUCE_DTYPES:
        is_misspelt = isinstance(value, str) and (name in _SHORT or not isinstance(getattr(torch, name, None), torch.dtype))
        near = get_close_matches(_SHORT.get(name, name), REDUCE_DTYPES, n=1) if is_misspelt else []
        suggestion = f"pass {near[0]!r}" if near else f"choose one of {', '.join(REDUCE_DTYPES)}, or leave it out"
        raise ConfigError(f"there is no reduce_dtype={value!r}", remedy=suggestion)
    return None if value is None else name


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
"""Other names of types, for suggestions."""


def converted_model(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy of the model in another dtype, or the model itself if it has that dtype; raise ConfigError if it cannot be copied."""
    tensors = (*model.parameters(), *model.buffers())
    if dtype is None or all(tensor.dtype == dtype for tensor in tensors if tensor.is_floating_point()):
        return model
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be copied to be converted: {error}", remedy="convert it yourself, model.to(dtype), and leave precision=None"
        ) from error
    return copied.to(dtype)


def converted_inputs(values: Any, dtype: torch.dtype | None) -> Any:
    """Return the same nested values with floating-point tensors converted to a dtype."""
    if dtype is None:
        return values
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, values)


def autocast_of(precision: str | None, model: nn.Module, hardware: Cluster) -> Autocast | None:
    """Return the autocast in which a model is traced: that of its device type; None if the precision is not mixed.

    A model on the meta device is traced on the CPU, with the casts of the hardware that it is planned for.
    """
    if precision not in MIXED:
        return None
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} or {"cpu"}
    if "meta" in devices:
        return Autocast("cpu", MIXED[precision], planned_for="cuda" if hardware.has_accelerators else "cpu")
    return Autocast(min(devices), MIXED[precision])


def check_scaler(precision: str | None, mesh: Mesh, world_size: int | None) -> None:
    """Raise ConfigError if processes that scale gradients would skip different steps.

    A ``GradScaler`` skips a step when it finds an infinite gradient. With sharded parameters one process may find it and another not.
    """
    sees_all_gradients = world_size is None or all(name == "data" for name, _ in mesh.dimensions)
    if precision == "16-mixed" and not sees_all_gradients:
        kinds = ", ".join(name for name, _ in mesh.dimensions if name != "data")
        stages = "stages" if any(name in STAGES for name in mesh.names) else "parts"
        raise ConfigError(
            f'precision="16-mixed" under torchrun is for mode="data": with {stages} of the model in each process ({kinds}), '
            "a GradScaler in each would leave out different steps",
            remedy='choose precision="bf16-mixed", which needs no scaler',
        )
