"""The tensors that ranks hold: parameters, buffers and constants of their stages, copied from the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph
from passes.stages import StageGraph

__all__ = ["State", "materialize"]


@dataclass(frozen=True)
class State:
    """What this process's ranks hold.

    A parameter that several ranks need is held by each of them; the programs sum its gradients, so that equal optimizers keep the
    copies equal. Within a rank it is one tensor however many stages use it.

    Attributes:
        graph: gives placeholders their original names.
        by_rank: rank -> placeholder -> tensor.
        names: the keys of the original ``state_dict``, in its order.
        parameter_names: the names of the original ``named_parameters``, in its order.
        owners: placeholder -> the lowest rank that holds it.
    """

    graph: ModelGraph
    by_rank: Mapping[int, Mapping[str, Tensor]]
    names: tuple[str, ...]
    parameter_names: tuple[str, ...]
    owners: Mapping[str, int]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter here under its original name; further copies as ``name@rank3``."""
        seen: set[str] = set()
        for rank, tensors in self.by_rank.items():
            for placeholder, name in self.graph.parameters.items():
                tensor = tensors.get(placeholder)
                if isinstance(tensor, nn.Parameter):
                    yield (f"{name}@rank{rank}" if name in seen else name), tensor
                    seen.add(name)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer here under its original name; further copies as ``name@rank3``."""
        seen: set[str] = set()
        for rank, tensors in self.by_rank.items():
            for placeholder, name in self.graph.buffers.items():
                if placeholder in tensors:
                    yield (f"{name}@rank{rank}" if name in seen else name), tensors[placeholder]
                    seen.add(name)

    def copies(self, name: str) -> list[Tensor]:
        """All tensors here that hold a parameter or buffer of the model, lowest rank first."""
        placeholder = self._placeholder(name)
        return [tensors[placeholder] for tensors in self.by_rank.values() if placeholder in tensors]

    def owner(self, name: str) -> int:
        """The lowest rank that holds a parameter or buffer: the one that speaks for it."""
        return self.owners[self._placeholder(name)]

    def _placeholder(self, name: str) -> str:
        first = self.graph.aliases.get(name, name)
        return next(key for table in (self.graph.parameters, self.graph.buffers) for key, original in table.items() if original == first)

    @property
    def is_meta(self) -> bool:
        return any(tensor.is_meta for tensors in self.by_rank.values() for tensor in tensors.values())


def materialize(
    model: nn.Module,
    graph: ModelGraph,
    stages: Sequence[StageGraph],
    stage_rank: Sequence[int],
    devices: Sequence[torch.device],
    local_ranks: Sequence[int],
) -> State:
    """Copy to each of this process's ranks what its stages hold. What no stage uses stays with rank 0."""
    owners = dict.fromkeys((*graph.parameters, *graph.buffers, *graph.constants), 0)
    needed: dict[int, set[str]] = {rank: set() for rank in range(len(devices))}
    for stage in stages:
        needed[stage_rank[stage.index]].update(stage.bound)
    for name in owners:
        owners[name] = min((rank for rank, names in needed.items() if name in names), default=0)
        needed[owners[name]].add(name)
    by_rank = {rank: _copies(model, graph, needed[rank], devices[rank]) for rank in local_ranks}
    names, parameters = tuple(model.state_dict()), tuple(name for name, _ in model.named_parameters())
    return State(graph, by_rank, names, parameters, owners)


def _copies(model: nn.Module, graph: ModelGraph, needed: set[str], device: torch.device) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for placeholder, name in graph.parameters.items():
        if placeholder in needed:
            original = _tensor(model, name)
            tensors[placeholder] = nn.Parameter(_copy(original, device), requires_grad=original.requires_grad)
    for placeholder, name in graph.buffers.items():
        if placeholder in needed:
            tensors[placeholder] = _copy(_tensor(model, name), device)
    for placeholder, constant in graph.constants.items():
        if placeholder in needed:
            tensors[placeholder] = constant.to(device)
    return tensors


def load(state: State, tensors: Mapping[str, Tensor], *, complete: bool) -> None:
    """Copy tensors, by original name, into every copy here.

    Args:
        complete: whether ``tensors`` must hold everything that this process holds.

    Raises:
        ConfigError: a name is unknown or missing, or a shape differs.
    """
    unknown = sorted(set(tensors) - set(state.names))
    if unknown:
        raise ConfigError(
            f"unknown names in the state: {', '.join(unknown[:5])}", remedy="use the names of the original model's state_dict()"
        )
    missing = [name for name in state.names if name not in tensors and state.copies(name)]
    if complete and missing:
        raise ConfigError(f"the state lacks {', '.join(missing[:5])}", remedy="pass strict=False to keep the present values of these")
    with torch.no_grad():
        for name, tensor in tensors.items():
            for copy in state.copies(name):
                if copy.shape != tensor.shape:
                    raise ConfigError(f"{name} has shape {tuple(tensor.shape)} in the state and {tuple(copy.shape)} in the model")
                copy.copy_(tensor)


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    assert isinstance(tensor, Tensor)
    return tensor


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta:
        return tensor.detach()
    return tensor.detach().to(device, copy=True)
