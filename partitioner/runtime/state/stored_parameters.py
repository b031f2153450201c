"""The parameters of this process, and the tensors that the programs of its ranks read.

Ranks of one process whose parameters are on one device share one whole ``nn.Parameter``; each rank's program reads its part of it:

    weight            nn.Parameter, 64 x 32                    optimizers, clipping and parameter groups see this one
      rank 0 reads    rows 0 to 31        a view               or, if the block is not contiguous, a copy that is refreshed from the
      rank 1 reads    rows 32 to 63       a view               parameter before each run

With one rank a process, or shards on several devices, each shard is a parameter of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from partitioner.runtime.state.part_gradient import NormShare
from passes.ir.errors import ConfigError
from passes.spmd.shards import Block, whole_block

_numbers = itertools.count()


@dataclass(frozen=True)
class Membership:
    """The partitioned model that a parameter belongs to, an attribute of the parameter for code that gets it alone (optimizers).

    Attributes:
        model: number of the partitioned model.
        name: of the model's parameter.
        is_part: whether it is a shard of the model's parameter, not the whole.
        n_parts: number of shards of the model's parameter in this process.
        has_all: whether every process has all parameters of the model, each of them whole: the same answer in all of them, since a norm
            over processes, or a state that they gather, needs all to take part.
    """

    model: int
    name: str
    is_part: bool
    n_parts: int
    has_all: bool


def membership(parameter: Tensor) -> Membership | None:
    """Return the membership of a parameter of a partitioned model; None for any other tensor."""
    return getattr(parameter, "_partitioned", None)


@dataclass(eq=False)
class StoredParameter:
    """A parameter of this process.

    Attributes:
        name: of the model's parameter.
        rank: the lowest rank that holds it, whose gradient is stored.
        block: its block of the model's parameter.
        parameter: the one that ``pm.parameters()`` yields.
        membership: of the parameter.
        share: what its gradient is of the norm over all processes; None until the model is complete.
        address: of its values at the last refresh of the programs' tensors.
        kind: its shape, dtype and device.
    """

    name: str
    rank: int
    block: Block
    parameter: nn.Parameter
    membership: Membership
    share: NormShare | None = field(default=None, init=False)
    address: int = field(init=False)
    kind: tuple[torch.Size, torch.dtype, torch.device] = field(init=False)

    def __post_init__(self) -> None:
        self._mark(self.parameter)
        self._remember()

    def _remember(self) -> None:
        self.address = self.parameter.data_ptr()
        self.kind = self.parameter.shape, self.parameter.dtype, self.parameter.device

    def check_unchanged(self) -> None:
        """Raise ConfigError if ``.data`` of the parameter was replaced by a tensor of another shape, dtype or device."""
        now = self.parameter.shape, self.parameter.dtype, self.parameter.device
        if now != self.kind:
            raise ConfigError(
                f"{self.name} is {_kind_text(now)} now, and was {_kind_text(self.kind)} when the model was partitioned",
                remedy="convert the model first: partition(model.to(...), ...)",
            )

    def _mark(self, parameter: nn.Parameter) -> None:
        # It lives and dies with the parameter; a weak reference from outside would forbid torch.utils.swap_tensors.
        parameter._partitioned = self.membership  # type: ignore[attr-defined]  # noqa: SLF001

    def become_real(self, values: Tensor) -> None:
        """Give a parameter on the meta device values, in place, since programs and optimizers refer to the object."""
        parameter, real = self.parameter, nn.Parameter(values, self.parameter.requires_grad)
        hooks, post_accumulate_hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
        self._mark(real)
        torch.utils.swap_tensors(parameter, real)
        # The Python object still has its hooks, but autograd calls those of the swapped tensor, which assignment sets.
        if hooks:
            parameter._backward_hooks = hooks  # noqa: SLF001
        if post_accumulate_hooks:
            parameter._post_accumulate_grad_hooks = post_accumulate_hooks  # noqa: SLF001
        self._remember()


class RankTensor:
    """One rank's shard of a stored parameter, which its programs read: a view, or a copy that is refreshed.

    Args:
        stored: the parameter, which contains the rank's block.
        block: of the rank, within the stored parameter.
        device: where the rank runs.
        on_same_device: whether that is the device of the parameter.
        writes: for a parameter that the model writes to, True on the one rank whose writes count: they are copied back to the parameter.
            False: writes of this rank must not reach it, so it gets a copy. None: no program writes to it.

    Raises:
        ConfigError: ``.data`` of the parameter was replaced by a tensor of another shape, dtype or device.
    """

    def __init__(self, stored: StoredParameter, block: Block, device: torch.device, *, on_same_device: bool, writes: bool | None) -> None:
        self.stored = stored
        self._block = block
        self._device = device
        self._on_same_device = on_same_device
        self.writes = writes
        stored.check_unchanged()  # programs are bound at their first call, which may come after the replacement
        self.tensor = self._make()

    def _make(self) -> Tensor:
        """Return a view of the parameter on the same device, if the block is contiguous and not to be copied; else a copy."""
        parameter = self.stored.parameter.detach()
        first, *more = self._block.within(parameter)
        self._is_view = self._on_same_device and not more and first.is_contiguous() and self.writes is not False
        if self._is_view:
            return first.view(self._block.part)
        if self._block.is_whole:
            return parameter.clone() if parameter.is_meta else parameter.to(self._device, copy=True)
        return self._block.take(parameter).to(parameter.device if parameter.is_meta else self._device)

    def move(self) -> None:
        """Follow a parameter whose storage was replaced."""
        if self._is_view:
            self.tensor.data = self._make()  # programs refer to the tensor object, so the object gets the new view

    @property
    def copied(self) -> list[tuple[Tensor, Tensor]]:
        """Targets and sources of the copy, valid until the storage of the parameter is replaced; none of a view."""
        targets = [] if self._is_view else [target.data for target in self._unfolded()]
        return list(zip(targets, self._block.within(self.stored.parameter.detach()), strict=False))

    def write_back(self) -> None:
        """Copy values that programs wrote to a copy back to the parameter."""
        if self.writes and not self._is_view:
            for target, source in zip(self._block.within(self.stored.parameter.detach()), self._unfolded(), strict=True):
                target.copy_(source)

    def _unfolded(self) -> list[Tensor]:
        """Return the pieces of the tensor in the shapes that they have within the parameter."""
        return self._block.within(self.tensor) if self._block.is_whole else self._block.unfold(self.tensor)

    def become_real(self) -> None:
        """Replace the tensor, in place, after the parameter has left the meta device."""
        torch.utils.swap_tensors(self.tensor, self._make())


def device_keys(devices: Sequence[torch.device]) -> tuple[Hashable, ...]:
    """Return a key for each rank's device, equal for ranks on one device; the CPU is one device whatever its index."""
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
        originals: placeholder -> name and tensor of the model's parameter.
        blocks: placeholder -> rank -> the block that it holds, for all ranks.
        devices: for each rank, where it runs.
        keys: of these devices, see ``device_keys``.
        local_ranks: the ranks of this process.

    Returns:
        Placeholder -> the parameters that hold it here, lowest rank first.
    """
    all_here = len(local_ranks) == len(devices)
    shards_of: dict[str, dict[int, Block]] = {}
    for placeholder in originals:
        holders = blocks[placeholder]
        local = {rank: holders[rank] for rank in local_ranks if rank in holders}
        shards_of[placeholder] = _merge_on_one_device(holders, keys) if all_here else local
    held = shards_of.values() if all_here else (blocks[placeholder] for placeholder in originals)
    n_holders = 1 if all_here else len(devices)
    has_all = all(len(of_ranks) >= n_holders and all(block.is_whole for block in of_ranks.values()) for of_ranks in held)
    template = Membership(next(_numbers), "", is_part=False, n_parts=1, has_all=has_all)
    stored: dict[str, list[StoredParameter]] = {}
    for placeholder, shards in shards_of.items():
        name, original = originals[placeholder]
        stored[placeholder] = [
            StoredParameter(
                name,
                rank,
                block,
                nn.Parameter(copy_of(original, block, devices[rank]), requires_grad=original.requires_grad),
                replace(template, name=name, is_part=not block.is_whole, n_parts=len(shards)),
            )
            for rank, block in shards.items()
        ]
    return stored


def _merge_on_one_device(holders: Mapping[int, Block], keys: Sequence[Hashable]) -> dict[int, Block]:
    """Return rank -> stored block of a parameter: the whole if its blocks are all on one device, else each distinct block."""
    owner_of = owners(holders.items())
    if len({keys[rank] for rank in owner_of.values()}) == 1:
        return {min(owner_of.values()): whole_block(next(iter(owner_of)).shape)}
    return {rank: block for block, rank in owner_of.items()}


def owners(holders: Iterable[tuple[int, Block]]) -> dict[Block, int]:
    """Return block -> the lowest rank that holds it."""
    owner_of: dict[Block, int] = {}
    for rank, block in sorted(holders, key=lambda item: item[0]):
        owner_of.setdefault(block, rank)
    return owner_of


def copy_of(tensor: Tensor, block: Block, device: torch.device) -> Tensor:
    """Return a copy of a block of a tensor on a device; on the meta device if the tensor is."""
    part = block.take(tensor.detach())
    return part if tensor.is_meta else part.to(device, copy=block.is_whole)


def _kind_text(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    return f"{kind[1]} {tuple(kind[0])} on {kind[2]}"
