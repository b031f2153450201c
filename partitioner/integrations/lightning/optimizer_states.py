"""The state of an optimizer as Lightning writes it to a file: by number, and whole, so that any plan and the model itself load it.

``optimizer.state_dict()`` is that already, except in a pipeline with one rank a process, where each optimizer has the parameters of its
own stages. There parameters are numbered group by group in the order of the model, as an optimizer of the model numbers them.

    rank 0   groups [["embed.weight"], ["embed.bias"]]  ─┐
                                                         ├─>   0 embed.weight   1 head.weight   2 embed.bias   3 head.bias
    rank 1   groups [["head.weight"], ["head.bias"]]    ─┘
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from partitioner.model.partitioned_model import PartitionedModel
from partitioner.runtime import torchrun
from partitioner.runtime.state.optimizers.named_groups import named_groups
from passes.ir.errors import ConfigError
from passes.ir.mesh import STAGES


def has_other_stages(model: PartitionedModel) -> bool:
    """Return whether other processes have parameters that this process lacks."""
    return torchrun.is_launched() and any(name in STAGES and size > 1 for name, size in model.plan.grid.dimensions)


def optimizer_state(models: Sequence[PartitionedModel], optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole state of an optimizer, by number, on every rank. All ranks must call it."""
    model = _staged(models, optimizer)
    if model is None:
        return optimizer.state_dict()
    whole = model.full_optimizer_state_dict(optimizer)
    names = [name for group in whole["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state = {numbers[name]: entries for name, entries in whole["state"].items() if name in numbers and entries}
    numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in whole["param_groups"]]
    return {"state": state, "param_groups": numbered}


def load_optimizer_state(models: Sequence[PartitionedModel], optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the whole state of an optimizer, by number. All ranks must call it.

    Raises:
        ConfigError: the groups of the state are not those of the optimizer.
    """
    model = _staged(models, optimizer)
    if model is None:
        optimizer.load_state_dict(dict(state_dict))
        return
    groups = named_groups(model.traced.state, model.traced.runtime, optimizer)
    saved = state_dict["param_groups"]
    saved_sizes, own_sizes = ([len(group["params"]) for group in each] for each in (saved, groups))
    if saved_sizes != own_sizes:
        raise ConfigError(
            f"the optimizer's state has groups of {saved_sizes} parameters, and the optimizer of all ranks has {own_sizes}",
            remedy="make the groups of the optimizer those that it had when the checkpoint was written",
        )
    keys = [key for group in saved for key in group["params"]]
    names = [name for group in groups for name in group["params"]]
    states = state_dict["state"]
    renamed = [{**group, "params": named["params"]} for group, named in zip(saved, groups, strict=True)]
    named_states = {name: states.get(key, {}) for key, name in zip(keys, names, strict=True)} if states else {}
    model.load_optimizer_state_dict(optimizer, {"state": named_states, "param_groups": renamed})


def _staged(models: Sequence[PartitionedModel], optimizer: Optimizer) -> PartitionedModel | None:
    """Return the model of an optimizer if other processes have parameters of it that this one does not."""
    staged = [model for model in models if has_other_stages(model)]
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = [model for model in staged if any(id(parameter) in given for parameter in model.parameters())]
    return own[0] if own else (staged[0] if len(staged) == 1 and len(models) == 1 else None)
