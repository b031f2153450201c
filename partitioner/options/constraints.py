"""``constraints=``: decisions of the user; the planner makes the others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from partitioner.options.mode import dimension_named
from passes.ir.arguments.checked import check_fields, checked_names, one_of
from passes.ir.comm.halo_strategy import HaloStrategy
from passes.ir.errors import PartitionWarning, first_few, level_of_caller
from passes.ir.mesh import SEQUENCE, TILE
from passes.ir.plan import ATTENTION

TENSOR = "tensor"
"""The mesh dimension of the patterns of ``tp_plan``."""

_EXAMPLES = {
    "device_map": '{"encoder": 0, "decoder": 1}, or leave it out to let the planner place the modules',
    "tp_plan": '{"layers.*.mlp.up_proj": "colwise"}, or model._tp_plan',
    "split_spec": '{"layers.6": "beginning"}',
    "axes": '{"heads": "tensor"}',
    "pin": '{"layers.6": 1}',
    "attention": " or ".join(f'"{name}"' for name in ATTENTION),
    "halo": '"exchange", "overlap" or "recompute", or a mapping of modules to these',
}


@checked_names
@dataclass(frozen=True)
class Constraints:
    """Decisions that a plan must keep to.

    Attributes:
        device_map: module name -> rank, or device (``"cuda:1"``), as transformers and accelerate write it. A module has the entry of
            its longest prefix; ``""`` is the entry of all other modules; the planner places a module without an entry. Where an entry goes
            back to an earlier rank, a module with a tied weight, or without parameters, runs in the order of computation, as a note says.
        tp_plan: transformers' tensor-parallel patterns -> how a weight is cut: ``{"layers.*.mlp.up_proj": "colwise"}``, over the
            mesh dimension ``"tensor"``. The beginning of a pattern may be left out. A model's ``_tp_plan`` and ``_ep_plan`` are such.
        split_spec: module name -> ``"beginning"`` or ``"end"`` (or ``torch.distributed.pipelining.SplitPoint``): a stage begins there.
        axes: axis name (``"heads"``, ``"ffn[3]"``) -> mesh dimension that cuts it, beside those that the planner chooses.
            ``{"sequence": "tensor"}`` is Megatron sequence parallelism, ``{"experts": "data"}`` expert parallelism. Over ``"tile"``,
            spatial axes that are named are cut; other axes may be cut in place of the remaining spatial ones: ``{"batch": "tile"}``.
        pin: module or node name -> stage.
        halo: halo strategy for spatial sharding: ``"exchange"``, before every layer;
            ``"overlap"``, the same while the layer computes its interior; ``"recompute"``, a wider halo once, whose overlap both neighbours
            compute; of all layers, or module name -> of its layers. A module has the entry of its longest prefix; what has none is planned.
        attention: how the ranks of the mesh dimension ``"sequence"`` share attention: ``"gather"``, each gathers all keys and values;
            ``"ulysses"``, they exchange their part of the sequence for a part of the heads and back; ``"ring"``, keys and values go round
            the ranks, a part at a time; ``"zigzag"``, the same with an early and a late piece of the sequence on each rank, so that what a
            causal mask hides is not computed.
    """

    device_map: Mapping[str, int | str | torch.device] | None = None
    tp_plan: Mapping[str, str] | None = None
    split_spec: Mapping[str, Any] | None = None
    axes: Mapping[str, str] | None = None
    pin: Mapping[str, int] | None = None
    halo: HaloStrategy | Mapping[str, HaloStrategy] | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"attention": one_of(ATTENTION)}, examples=_EXAMPLES)

    def without_dimensions(self, names: Collection[str]) -> Constraints:
        """Return the constraints without those on mesh dimensions that have one rank, which cut nothing."""
        axes = {axis: where for axis, where in (self.axes or {}).items() if dimension_named(where) not in names}
        halo = None if TILE in names else self.halo
        attention = None if SEQUENCE in names else self.attention
        return replace(self, axes=axes or None, tp_plan=None if TENSOR in names else self.tp_plan, halo=halo, attention=attention)

    def without_patterns_of_no_module(self, model: nn.Module) -> Constraints:
        """Return the constraints without the patterns of the model's own ``_tp_plan`` for which its configuration has no modules.

        A Qwen3MoeForCausalLM has ``"layers.*.mlp.gate_proj"`` for layers without experts, of which there may be none. A PartitionWarning
        names such patterns. A pattern that is not the model's own stays, and is an error.
        """
        own = getattr(model, "_tp_plan", None)
        if not self.tp_plan or not isinstance(own, Mapping):
            return self
        names = [name for each in (model.named_modules(), model.named_parameters(remove_duplicate=False)) for name, _ in each]
        lost = [
            pattern
            for pattern in self.tp_plan
            if any(each == pattern or each.endswith(f".{pattern}") for each in own)
            and not any(re.fullmatch(rf"(.+\.)?{pattern_expression(pattern)}", name) for name in names)
        ]
        if not lost:
            return self
        patterns = first_few([repr(each) for each in lost])
        text = f"tp_plan: the model has no modules for {patterns}, patterns of its own plan; they are left out"
        warnings.warn(text, PartitionWarning, stacklevel=level_of_caller())
        return replace(self, tp_plan={each: style for each, style in self.tp_plan.items() if each not in lost})


def pattern_expression(pattern: str) -> str:
    """Return a pattern as a regular expression: ``*`` stands for one part of a path, or for letters of one."""
    return r"\.".join(r"[^.]+" if part == "*" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("."))
