"""Refuse arguments that a trace cannot take; the error names the argument and its replacement."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from passes.ir.errors import ConfigError

__all__ = ["check_argument"]

_TAKEN = (Tensor, int, float, bool, str, type(None))
"""Types of leaves that a trace takes."""

_REMEDIES = (
    ("BlockMask", "create it in forward, create_block_mask(...) of the inputs; or pass the mask as a tensor"),
    ("PackedSequence", "pass the padded tensor, and compute its mask from the lengths"),
    ("Cache", "pass a DynamicCache, or none; pm.generate(...) keeps a cache of each rank's own"),
    ("ndarray", "pass a tensor: torch.from_numpy(array)"),
    ("Image", "pass a tensor of its pixels"),
    ("Generator", "draw from the default generator, and seed it: torch.manual_seed(0)"),
    ("set", "pass a list or a tuple"),
    ("dict_", "pass a list or a tuple"),
    ("generator", "pass a list or a tuple"),
    ("range", "pass its ends as numbers, or a list"),
    ("function", "keep it in the model, as an attribute"),
    ("method", "keep it in the model, as an attribute"),
    ("Module", "make it a submodule of the model: self.layer = layer"),
)
"""Part of the name of a class -> the remedy, for the class and those that it is derived from."""

_REMEDY = "pass tensors, numbers and strings, in tuples, lists, dicts or dataclasses; keep other objects in the model, as attributes"


def check_argument(name: str, value: Any) -> None:
    """Raise ConfigError for a leaf of the arguments that is neither a tensor nor a number, a string or None."""
    kind = type(value)
    if (isinstance(value, _TAKEN) and not _is_enum(kind)) or kind.__name__ in ("SymInt", "SymFloat", "SymBool"):
        return
    classes = ["Module"] if isinstance(value, nn.Module) else [each.__name__ for each in kind.__mro__]
    remedy = next((remedy for part, remedy in _REMEDIES if any(part in each for each in classes)), _REMEDY)
    if _is_enum(kind):
        remedy = "pass its value, a number or a string"
    raise ConfigError(
        f"{name} is {'an' if kind.__name__[:1].lower() in 'aeiou' else 'a'} {kind.__name__}, which a trace cannot take", remedy=remedy
    )


def _is_enum(kind: type) -> bool:
    return hasattr(kind, "__members__")
