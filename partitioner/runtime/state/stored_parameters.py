"""The parameters of this process, and the tensors that the programs of its ranks read.

Ranks of one process whose parameters lie on one device share one whole ``nn.Parameter``; each rank's program reads its part of it:

    weight            nn.Parameter, 64 x 32                    optimizers, clipping and parameter groups see this one
      rank 0 reads    rows 0 to 31        a view               or, if programs cannot read a view, a copy that is refreshed from the
      rank 1 reads    rows 32 to 63       a view               parameter before each run

With one rank a process, or shards on several devices, each shard is a parameter of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from passes.ir.errors import ConfigError
from passes.spmd.shards import Block, whole_block

__all__ = ["Membership", "RankTensor", "StoredParameter", "copy_of", "device_keys", "membership", "owners", "store_parameters"]

_numbers = itertools.count()


@dataclass(frozen=True)
class Membership:
    """Where a parameter belongs, for optimizers and others that get the parameter alone.

    Attributes:
        model: number of the partitioned model.
        name: of the model's parameter.
        is_part: whether it is a part of the model's parameter, not the whole.
        n_parts: parts of the model's parameter in this process.
        has_all: whether this process has all parameters of the model, each of them whole.
    """

    model: int
    name: str
    is_part: bool
    n_parts: int
    has_all: bool


def membership(parameter: Tensor) -> Membership | None:
    """Which parameter of a partitioned model this is; None for any other tensor."""
    return getattr(parameter, "_partitioned", None)


@dataclass(eq=False)
class StoredParameter:
    """A parameter of this process.

    Attributes:
        name: of the model's parameter.
        rank: the lowest rank that holds it, and whose gradient is stored.
        block: which part of the model's parameter it is.
        parameter: what ``pm.parameters()`` gives.
        membership: the model it belongs to.
        address: where its values were at the last refresh of the programs' tensors.
        like: its shape, dtype and device.
    """

    name: str
    rank: int
    block: Block
    parameter: nn.Parameter
    membership: Membership
    address: int = field(init=False)
    like: tuple[torch.Size, torch.dtype, torch.device] = field(init=False)

    def __post_init__(self) -> None:
        self._mark(self.parameter)
        self._remember()

    def _remember(self) -> None:
        self.address = self.parameter.data_ptr()
        self.like = self.parameter.shape, self.parameter.dtype, self.parameter.device

    def check_unchanged(self) -> None:
        """Raise ConfigError where ``.data`` of the parameter was replaced by a tensor of another kind."""
        now = self.parameter.shape, self.parameter.dtype, self.parameter.device
        if now != self.like:
            raise ConfigError(
                f"{self.name} is {_kind(now)} now, and was {_kind(self.like)} when the model was partitioned",
                remedy="convert the model first: partition(model.to(...), ...)",
            )

    def _mark(self, parameter: nn.Parameter) -> None:
        # It lives and dies with the parameter; a weak reference from outside would forbid torch.utils.swap_tensors.
        parameter._partitioned = self.membership  # type: ignore[attr-defined]  # noqa: SLF001

    def become_real(self, values: Tensor) -> None:
        """Give a parameter on the meta device values, in place: programs and optimizers refer to the object."""
        parameter, made = self.parameter, nn.Parameter(values, self.parameter.requires_grad)
        hooks, later_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
        self._mark(made)
        torch.utils.swap_tensors(parameter, made)
        # The Python object has its hooks still, but autograd calls those of the swapped tensor, which assignment sets.
        if hooks:
            parameter._backward_hooks = hooks  # noqa: SLF001
        if later_hooks:
            parameter._post_accumulate_grad_hooks = later_hooks  # noqa: SLF001
        self._remember()


class RankTensor:
    """One rank's shard of a stored parameter, which its programs read: a view, or a copy that is refreshed.

    Args:
        stored: the parameter, which contains the rank's block.
        block: of the rank, within the stored parameter.
        device: where the rank runs.
        beside: whether that is the device of the parameter.
        writes: True: this rank's writes are copied back to the parameter. False: those of another rank are, so this one needs a copy.
            None: no program writes to it.
    """

    def __init__(self, stored: StoredParameter, block: Block, device: torch.device, *, beside: bool, writes: bool | None) -> None:
        self.stored = stored
        self._block = block
        self._device = device
        self._beside = beside
        self._writes = writes
        self.tensor = self._make()

    def _make(self) -> Tensor:
        """Return a view of the parameter on the same device, if the block is contiguous and not to be copied; else a copy."""
        parameter = self.stored.parameter.detach()
        part = self._block.within(parameter)
        self._is_view = self._beside and part.is_contiguous() and self._writes is not False
        if self._is_view:
            return part.view(self._block.part)
        if self._block.is_whole:
            return parameter.clone() if parameter.is_meta else parameter.to(self._device, copy=True)
        return self._block.take(parameter).to(parameter.device if parameter.is_meta else self._device)

    def refresh(self, *, moved: bool) -> None:
        """Take over the current values of the parameter.

        Args:
            moved: whether its storage was replaced, so that a view must be taken anew.
        """
        if moved and self._is_view:
            # Programs refer to the tensor object, so the object gets the new view.
            self.tensor.data = self._make()
        elif not self._is_view:
            self._unfolded().copy_(self._block.within(self.stored.parameter.detach()))

    def write_back(self) -> None:
        """Copy the values that programs wrote to a copy back to the parameter."""
        if self._writes and not self._is_view:
            self._block.within(self.stored.parameter.detach()).copy_(self._unfolded())

    def _unfolded(self) -> Tensor:
        return self._block.within(self.tensor) if self._block.is_whole else self._block.unfold(self.tensor)

    def become_real(self) -> None:
        """Follow a parameter that was on the meta device."""
        torch.utils.swap_tensors(self.tensor, self._make())


def device_keys(devices: Sequence[torch.device]) -> tuple[Hashable, ...]:
    """Return a key of each rank's device, equal for ranks on one device: the CPU is one device whatever its index."""
    return tuple(device.type if device.type == "cpu" else device for device in devices)


def store_parameters(
    originals: Mapping[str, tuple[str, Tensor]],
    blocks: Mapping[str, Mapping[int, Block]],
    devices: Sequence[torch.device],
    keys: Sequence[Hashable],
    local_ranks: Sequence[int],
) -> dict[str, list[StoredParameter]]:
    """Create the parameters of this process.

    Args:
        originals: placeholder -> name and tensor of the model.
        blocks: placeholder -> rank -> the block that it holds, for all ranks.
        devices: for each rank, where it runs.
        keys: of these devices.
        local_ranks: the ranks of this process.

    Returns:
        Placeholder -> the parameters that hold it here, lowest rank first.
    """
    all_here = len(local_ranks) == len(devices)
    found: dict[str, dict[int, Block]] = {}
    for placeholder in originals:
        holders = blocks[placeholder]
        found[placeholder] = _together(holders, keys) if all_here else {rank: holders[rank] for rank in local_ranks if rank in holders}
    has_all = all(parts and all(block.is_whole for block in parts.values()) for parts in found.values())
    first = Membership(next(_numbers), "", is_part=False, n_parts=1, has_all=has_all)
    stored: dict[str, list[StoredParameter]] = {}
    for placeholder, parts in found.items():
        name, original = originals[placeholder]
        stored[placeholder] = [
            StoredParameter(
                name,
                rank,
                block,
                nn.Parameter(copy_of(original, block, devices[rank]), requires_grad=original.requires_grad),
                replace(first, name=name, is_part=not block.is_whole, n_parts=len(parts)),
            )
            for rank, block in parts.items()
        ]
    return stored


def _together(holders: Mapping[int, Block], keys: Sequence[Hashable]) -> dict[int, Block]:
    """Return rank -> stored block if all ranks are in this process: one whole parameter, unless its shards lie on several devices."""
    first = owners(holders.items())
    if len({keys[rank] for rank in first.values()}) == 1:
        return {min(first.values()): whole_block(next(iter(first)).shape)}
    return {rank: block for block, rank in first.items()}


def owners(holders: Iterable[tuple[int, Block]]) -> dict[Block, int]:
    """The lowest rank that holds each block."""
    found: dict[Block, int] = {}
    for rank, block in sorted(holders, key=lambda item: item[0]):
        found.setdefault(block, rank)
    return found


def copy_of(tensor: Tensor, block: Block, device: torch.device) -> Tensor:
    """Return a copy of a block of a tensor on a device; on the meta device if the tensor is."""
    part = block.take(tensor.detach())
    return part if tensor.is_meta else part.to(device, copy=block.is_whole)


def _kind(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    return f"{kind[1]} {tuple(kind[0])} on {kind[2]}"
