"""The tensors that ranks hold: parameters, buffers and constants of their stages, copied from the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partitioner.block_tensor import BlockTensor
from passes.blocks import Block
from passes.ir.errors import ConfigError
from passes.ir.graph import ModelGraph

__all__ = ["State", "check_values", "load", "materialize"]


@dataclass(frozen=True)
class State:
    """What this process's ranks hold: whole tensors, or blocks of them.

    A block that several ranks hold is there once on each; the programs sum its gradients, so that equal optimizers keep the copies
    equal. Within a rank it is one tensor however many stages use it.

    Attributes:
        graph: gives placeholders their original names.
        by_rank: rank of this process -> placeholder -> tensor.
        blocks: placeholder -> rank -> which block of it, for all ranks.
        names: the keys of the original ``state_dict``, in its order.
        parameter_names: the names of the original ``named_parameters``, in its order.
        devices: for each rank, where it runs.
    """

    graph: ModelGraph
    by_rank: Mapping[int, Mapping[str, Tensor]]
    blocks: Mapping[str, Mapping[int, Block]]
    names: tuple[str, ...]
    parameter_names: tuple[str, ...]
    devices: Sequence[torch.device]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter here under its original name; further copies and blocks as ``name@rank3``."""
        seen: set[str] = set()
        for rank, tensors in self.by_rank.items():
            for placeholder, tensor in tensors.items():
                name = self.graph.parameters.get(placeholder)
                if name is not None and isinstance(tensor, nn.Parameter):
                    yield (f"{name}@rank{rank}" if name in seen else name), tensor
                    seen.add(name)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer here under its original name; further copies and blocks as ``name@rank3``."""
        seen: set[str] = set()
        for rank, tensors in self.by_rank.items():
            for placeholder, name in self.graph.buffers.items():
                if placeholder in tensors:
                    yield (f"{name}@rank{rank}" if name in seen else name), tensors[placeholder]
                    seen.add(name)

    def held(self, name: str) -> list[tuple[Block, Tensor]]:
        """All tensors here that hold a parameter or buffer of the model, or a block of it, lowest rank first."""
        placeholder = self._placeholder(name)
        blocks = self.blocks[placeholder]
        return [(blocks[rank], tensors[placeholder]) for rank, tensors in self.by_rank.items() if placeholder in tensors]

    def knows(self, name: str) -> bool:
        """Whether the graph has a parameter or buffer of this name."""
        first = self.graph.aliases.get(name, name)
        return first in self.graph.parameters.values() or first in self.graph.buffers.values()

    def set(self, name: str, whole: Tensor) -> None:
        """Copy a tensor of the model into every copy and block of it here; one on the meta device becomes real."""
        if isinstance(whole, BlockTensor):
            self._set_blocks(name, whole)
            return
        with torch.no_grad():
            for rank, tensors in self.by_rank.items():
                placeholder = self._placeholder(name)
                if placeholder not in tensors:
                    continue
                held, block = tensors[placeholder], self.blocks[placeholder][rank]
                if held.is_meta:
                    part = _copy(whole.to(held.dtype), block, self.devices[rank])
                    # Programs and optimizers hold this very object: it gets the values, and stays who it is.
                    torch.utils.swap_tensors(held, nn.Parameter(part, held.requires_grad) if isinstance(held, nn.Parameter) else part)
                else:
                    held.copy_(block.take(whole))

    def _set_blocks(self, name: str, given: BlockTensor) -> None:
        """Copy blocks that lie as those here do: into the copies of ranks that none was loaded into."""
        found = dict(given.blocks)
        for block, copy in self.held(name):
            if block not in found:
                raise ConfigError(
                    f"the blocks of {name} are those of another plan", remedy="load into pm.sharded_state_dict() of this model"
                )
            if found[block].data_ptr() != copy.data_ptr():
                copy.detach().copy_(found[block])

    def sharded(self) -> dict[str, BlockTensor]:
        """What is held here, each tensor as its blocks, under the original names."""
        check_values(self)
        found = {name: {block: tensor.detach() for block, tensor in reversed(self.held(name))} for name in self.names}
        return {name: BlockTensor(list(blocks.items())) for name, blocks in found.items() if blocks}

    def owned(self, name: str) -> list[tuple[str, Tensor]]:
        """The blocks of a tensor that this process speaks for, each with a key of its own: the lowest rank that holds one does."""
        placeholder = self._placeholder(name)
        return [
            (_key(name, number), self.by_rank[rank][placeholder])
            for number, (rank, _) in enumerate(self._owners(placeholder))
            if rank in self.by_rank
        ]

    def is_cut(self, name: str) -> bool:
        """Whether ranks hold blocks of a tensor of the model, not the whole."""
        return not all(block.is_whole for block in self.blocks[self._placeholder(name)].values())

    def whole(self, name: str, parts: Mapping[str, Tensor | None]) -> Tensor | None:
        """A tensor of the model put together from what all processes own; None where a part is missing."""
        owners = self._owners(self._placeholder(name))
        found = [parts.get(_key(name, number)) for number in range(len(owners))]
        if len(found) == 1 and owners[0][1].is_whole:
            return found[0]
        result: Tensor | None = None
        for (_, block), part in zip(owners, found, strict=True):
            if part is None:
                return None
            result = torch.empty(block.shape, dtype=part.dtype, device=part.device) if result is None else result
            block.put(result, part)
        return result

    def _owners(self, placeholder: str) -> list[tuple[int, Block]]:
        """The lowest rank that holds each block."""
        owners: dict[Block, int] = {}
        for rank, block in sorted(self.blocks[placeholder].items(), key=lambda item: item[0]):
            owners.setdefault(block, rank)
        return [(rank, block) for block, rank in owners.items()]

    def _placeholder(self, name: str) -> str:
        first = self.graph.aliases.get(name, name)
        return next(key for table in (self.graph.parameters, self.graph.buffers) for key, original in table.items() if original == first)

    @property
    def on_meta(self) -> list[str]:
        """The names of what is on the meta device here: it has no values yet."""
        names = {**self.graph.parameters, **self.graph.buffers}
        found = {names.get(key, key) for tensors in self.by_rank.values() for key, tensor in tensors.items() if tensor.is_meta}
        return sorted(found)


def _key(name: str, number: int) -> str:
    return name if number == 0 else f"{name}@block{number}"


def materialize(
    model: nn.Module,
    graph: ModelGraph,
    blocks: Mapping[str, Mapping[int, Block]],
    devices: Sequence[torch.device],
    local_ranks: Sequence[int],
) -> State:
    """Copy to each of this process's ranks what it holds.

    Args:
        blocks: placeholder -> rank -> which block of it, for all ranks.
    """
    originals = {placeholder: _tensor(model, name) for placeholder, name in {**graph.parameters, **graph.buffers}.items()}
    by_rank = {rank: _copies(originals, graph, blocks, rank, devices[rank]) for rank in local_ranks}
    names, parameters = tuple(model.state_dict()), tuple(name for name, _ in model.named_parameters())
    return State(graph, by_rank, blocks, names, parameters, tuple(devices))


def _copies(
    originals: Mapping[str, Tensor], graph: ModelGraph, blocks: Mapping[str, Mapping[int, Block]], rank: int, device: torch.device
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for placeholder, original in originals.items():
        if rank in blocks[placeholder]:
            copy = _copy(original, blocks[placeholder][rank], device)
            is_parameter = placeholder in graph.parameters
            tensors[placeholder] = nn.Parameter(copy, requires_grad=original.requires_grad) if is_parameter else copy
    for placeholder, constant in graph.constants.items():
        if rank in blocks[placeholder]:
            tensors[placeholder] = blocks[placeholder][rank].take(constant).to(device)
    return tensors


def check_values(state: State) -> None:
    """Raise ConfigError where a tensor here is on the meta device."""
    names = state.on_meta
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(
            f"the model is on the meta device: {', '.join(names[:3])}{more} have shapes but no numbers to compute with",
            remedy="pm.initialize(init_fn) or pm.load_state_dict(...) gives them numbers; plan and graphs can be read without",
        )


def load(state: State, tensors: Mapping[str, Tensor], *, complete: bool) -> None:
    """Copy tensors, by original name, into every copy and block here.

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
    missing = [name for name in state.names if name not in tensors and state.held(name)]
    if complete and missing:
        raise ConfigError(f"the state lacks {', '.join(missing[:5])}", remedy="pass strict=False to keep the present values of these")
    for name, tensor in tensors.items():
        for block, _ in state.held(name):
            if block.shape != tensor.shape:
                raise ConfigError(f"{name} has shape {tuple(tensor.shape)} in the state and {tuple(block.shape)} in the model")
        state.set(name, tensor)


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    assert isinstance(tensor, Tensor)
    return tensor


def _copy(tensor: Tensor, block: Block, device: torch.device) -> Tensor:
    part = block.take(tensor.detach())
    if tensor.is_meta:
        return part
    return part.to(device, copy=block.is_whole)
