"""The state of this process: parameters, buffers and constants of its ranks, copied from the model.

``requires_grad`` may change after the model was partitioned:

frozen later        programs compute the gradient still; it is not added to ``.grad``
unfrozen later      refused: no program computes the gradient
frozen in part      refused: the shards of one parameter must agree
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from partitioner.runtime.state.gradient_slots import GradientStore, ParameterSlot
from partitioner.runtime.state.hooks import TensorHooks, refuse_parameter_hooks
from partitioner.runtime.state.sharded_tensor import BlockTensor
from partitioner.runtime.state.stored_parameters import RankTensor, StoredParameter, copy_of, device_keys, owners, store_parameters
from passes.graph.aliasing import aliasing
from passes.ir.comm.unsummed import GradientSlot
from passes.ir.errors import ConfigError, first_few
from passes.ir.graph import ModelGraph
from passes.spmd.shards import Block, whole_block

__all__ = ["Freezing", "State", "check_values", "materialize"]


@dataclass(frozen=True)
class State:
    """The tensors of this process's ranks, whole or sharded.

    Parameters are stored once, see ``partitioner.runtime.state.stored_parameters``; buffers and constants once a rank. Within a rank a
    tensor is one object however many stages use it.

    Attributes:
        graph: gives placeholders their original names.
        by_rank: rank of this process -> placeholder -> what its programs read.
        blocks: placeholder -> rank -> which block of it the rank's programs read, for all ranks.
        stored: placeholder of a parameter -> the parameters here that hold it.
        followers: what programs read of a parameter besides the parameter itself.
        gradients: of this process's parameters.
        slots: rank of this process -> placeholder -> where its gradients go.
        names: the keys of the original ``state_dict``, in its order.
        parameter_names: the names of the original ``named_parameters``, in its order.
        devices: for each rank, where it runs.
    """

    graph: ModelGraph
    by_rank: Mapping[int, Mapping[str, Tensor]]
    blocks: Mapping[str, Mapping[int, Block]]
    stored: Mapping[str, Sequence[StoredParameter]]
    followers: Mapping[StoredParameter, Sequence[RankTensor]]
    gradients: GradientStore
    slots: Mapping[int, Mapping[str, GradientSlot]]
    names: tuple[str, ...]
    parameter_names: tuple[str, ...]
    devices: Sequence[torch.device]

    # -- what is here --------------------------------------------------------------------------------------------------------------

    def stored_parameters(self) -> Iterator[StoredParameter]:
        """Every parameter here, in the order of the original."""
        for name in self.parameter_names:
            if self.knows(name):
                yield from self.stored[self._placeholder(name)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter here under its original name; parts of one on several devices all have its name."""
        for stored in self.stored_parameters():
            yield stored.name, stored.parameter

    @cached_property
    def stand_in(self) -> tuple[nn.Parameter, ...]:
        """An empty parameter for an optimizer where this process has none of a model that has some: optimizers refuse to have none."""
        return (nn.Parameter(torch.empty(0)),) if self.parameter_names else ()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer here under its original name; further copies and blocks as ``name@rank3``."""
        seen: set[str] = set()
        for rank, tensors in self.by_rank.items():
            for placeholder, name in self.graph.buffers.items():
                if placeholder in tensors:
                    yield (f"{name}@rank{rank}" if name in seen else name), tensors[placeholder]
                    seen.add(name)

    def named_parts(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """What a rank of this process reads of each parameter, under its original name."""
        for placeholder, name in self.graph.parameters.items():
            if placeholder in self.by_rank[rank]:
                yield name, self.by_rank[rank][placeholder].detach()

    def held(self, name: str) -> list[tuple[Block, Tensor]]:
        """All tensors here that hold a parameter or buffer of the model, or a block of it, lowest rank first."""
        placeholder = self._placeholder(name)
        blocks = self._stored_blocks(placeholder)
        return [(blocks[rank], tensor) for rank, tensor in self._tensors(placeholder).items()]

    def knows(self, name: str) -> bool:
        """Whether the graph has a parameter or buffer of this name."""
        return self.graph.aliases.get(name, name) in self._placeholders

    def _tensors(self, placeholder: str) -> dict[int, Tensor]:
        """Rank -> the tensor that is stored for it here."""
        if placeholder in self.graph.parameters:
            return {stored.rank: stored.parameter for stored in self.stored[placeholder]}
        return {rank: tensors[placeholder] for rank, tensors in self.by_rank.items() if placeholder in tensors}

    def _stored_blocks(self, placeholder: str) -> Mapping[int, Block]:
        """Rank -> which block is stored for it, in whichever process."""
        if placeholder in self.graph.parameters and self.gradients.all_ranks_here:
            return {stored.rank: stored.block for stored in self.stored[placeholder]}
        return self.blocks[placeholder]

    def check_names(self) -> None:
        """Raise ConfigError where the original's ``state_dict`` has entries that are none of its parameters and buffers."""
        others = [name for name in self.names if not self.knows(name)]
        if others:
            raise ConfigError(
                f"the model's state_dict() has {', '.join(others[:5])}, which is no parameter and no buffer: a partitioned model does not "
                "call modules that have extra state (get_extra_state), or hooks that rename entries",
                remedy="remove them; or read pm.named_parameters() and pm.named_buffers() and save these",
            )

    # -- before and after a run ----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Let programs read the parameters as they are now.

        Raises:
            ConfigError: the values of a parameter were replaced by others of another kind.
        """
        with torch.no_grad():
            for stored, followers in self.followers.items():
                moved = stored.parameter.data_ptr() != stored.address
                if moved:
                    stored.check_unchanged()
                    stored.address = stored.parameter.data_ptr()
                for follower in followers:
                    follower.refresh(moved=moved)

    def finish(self) -> None:
        """Complete a run: write back parameters that the model itself writes to, and accumulate gradients that waited for hooks."""
        with torch.no_grad():
            for followers in self.followers.values():
                for follower in followers:
                    follower.write_back()
        self.gradients.finish()

    # -- values --------------------------------------------------------------------------------------------------------------------

    def set(self, name: str, whole: Tensor) -> None:
        """Copy a tensor of the model into every copy and block of it here; one on the meta device becomes real."""
        if isinstance(whole, BlockTensor):
            self._set_blocks(name, whole)
            return
        placeholder = self._placeholder(name)
        blocks = self._stored_blocks(placeholder)
        with torch.no_grad():
            for rank, held in self._tensors(placeholder).items():
                if held.is_meta:
                    self._make_real(placeholder, held, copy_of(whole.to(held.dtype), blocks[rank], self.devices[rank]))
                else:
                    held.copy_(blocks[rank].take(whole))

    def _make_real(self, placeholder: str, held: Tensor, values: Tensor) -> None:
        """Give a tensor on the meta device values, in place: programs and optimizers refer to the object."""
        stored = next((each for each in self.stored.get(placeholder, ()) if each.parameter is held), None)
        if stored is None:
            torch.utils.swap_tensors(held, values)
            return
        stored.become_real(values)
        for follower in self.followers.get(stored, ()):
            follower.become_real()

    def _set_blocks(self, name: str, given: BlockTensor) -> None:
        """Copy blocks into the shards of this process. A shard into which a checkpoint was loaded in place is its own block already.

        Raises:
            ConfigError: the tensor has not all blocks of this plan.
        """
        found = dict(given.blocks)
        for block, copy in self.held(name):
            if block not in found:
                raise ConfigError(
                    f"the blocks of {name} are those of another plan", remedy="load into pm.sharded_state_dict() of this model"
                )
            if found[block].data_ptr() != copy.data_ptr():
                copy.detach().copy_(found[block])

    def sharded(self) -> dict[str, BlockTensor]:
        """Return the shards of this process under the original names, each tensor as its blocks."""
        check_values(self)
        self.check_names()
        found = {name: {block: tensor.detach() for block, tensor in reversed(self.held(name))} for name in self.names}
        return {name: BlockTensor(list(blocks.items())) for name, blocks in found.items() if blocks}

    def owned(self, name: str) -> list[tuple[str, Tensor]]:
        """Return the blocks of a tensor that this process owns, under unique keys; the owner is the lowest rank that holds a block."""
        placeholder = self._placeholder(name)
        tensors = self._tensors(placeholder)
        return [(_key(name, number), tensors[rank]) for number, (rank, _) in enumerate(self._owners(placeholder)) if rank in tensors]

    def is_cut(self, name: str) -> bool:
        """Whether ranks hold blocks of a tensor of the model, not the whole."""
        return not all(block.is_whole for block in self._stored_blocks(self._placeholder(name)).values())

    def whole(self, name: str, parts: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return a tensor of the model, assembled from the blocks that all processes own; None if one is missing."""
        blocks = self._owners(self._placeholder(name))
        found = [parts.get(_key(name, number)) for number in range(len(blocks))]
        if len(found) == 1 and blocks[0][1].is_whole:
            return found[0]
        result: Tensor | None = None
        for (_, block), part in zip(blocks, found, strict=True):
            if part is None:
                return None
            result = torch.empty(block.shape, dtype=part.dtype, device=part.device) if result is None else result
            block.put(result, part)
        return result

    def _owners(self, placeholder: str) -> list[tuple[int, Block]]:
        """The lowest rank that holds each block."""
        return [(rank, block) for block, rank in owners(self._stored_blocks(placeholder).items()).items()]

    @cached_property
    def _placeholders(self) -> dict[str, str]:
        """Original (first) name of a parameter or buffer -> its placeholder."""
        return {name: placeholder for table in (self.graph.buffers, self.graph.parameters) for placeholder, name in table.items()}

    def _placeholder(self, name: str) -> str:
        return self._placeholders[self.graph.aliases.get(name, name)]

    @property
    def on_meta(self) -> list[str]:
        """Return the names of this process's tensors on the meta device, which have no values yet."""
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
    hooks: TensorHooks,
) -> State:
    """Return the state of this process: shards of the model's tensors, copied to the devices of its ranks.

    Args:
        blocks: placeholder -> rank -> which block of it, for all ranks.
        hooks: of the model's parameters.

    Raises:
        ConfigError: a parameter has hooks, and this process holds a part of it.
    """
    originals = {placeholder: (name, _tensor(model, name)) for placeholder, name in graph.parameters.items()}
    copied = {**{placeholder: _tensor(model, name) for placeholder, name in graph.buffers.items()}, **graph.constants}
    keys = device_keys(devices)
    stored = store_parameters(originals, blocks, devices, keys, local_ranks)
    for each in (each for same in stored.values() for each in same if each.parameter.requires_grad):
        for hook in hooks.get(each.name, ()):
            each.parameter.register_hook(hook)
        refuse_parameter_hooks([each], in_no_sync=False)
    gradients = GradientStore(all_ranks_here=len(local_ranks) == len(devices))
    by_rank: dict[int, dict[str, Tensor]] = {}
    slots: dict[int, dict[str, GradientSlot]] = {}
    followers: dict[StoredParameter, list[RankTensor]] = {}
    written = _written(graph)
    owner_of = {placeholder: owners(blocks[placeholder].items()) for placeholder in stored}
    for rank in local_ranks:
        read = _Read(blocks, owner_of, devices, keys, rank, gradients, written)
        by_rank[rank], slots[rank] = {}, {}
        for placeholder, same in stored.items():
            if rank in blocks[placeholder]:
                by_rank[rank][placeholder], slots[rank][placeholder] = read.parameter(placeholder, same, followers)
        here = [placeholder for placeholder in copied if rank in blocks[placeholder]]
        by_rank[rank].update({placeholder: copy_of(copied[placeholder], blocks[placeholder][rank], devices[rank]) for placeholder in here})
    names, parameters = tuple(model.state_dict()), tuple(name for name, _ in model.named_parameters())
    return State(graph, by_rank, blocks, stored, followers, gradients, slots, names, parameters, tuple(devices))


@dataclass(frozen=True)
class _Read:
    """What one rank's programs read of parameters, and where their gradients go.

    Attributes:
        blocks, devices: see ``materialize``.
        owner_of: placeholder -> block -> the lowest rank that holds it.
        keys: of the devices.
        rank: whose programs.
        gradients: of the process.
        written: placeholders of the parameters that the model itself writes to.
    """

    blocks: Mapping[str, Mapping[int, Block]]
    owner_of: Mapping[str, Mapping[Block, int]]
    devices: Sequence[torch.device]
    keys: Sequence[Hashable]
    rank: int
    gradients: GradientStore
    written: frozenset[str]

    def parameter(
        self, placeholder: str, stored: Sequence[StoredParameter], followers: dict[StoredParameter, list[RankTensor]]
    ) -> tuple[Tensor, GradientSlot]:
        """What the programs read of a parameter; a view or copy is put down with the followers of the parameter."""
        block, device = self.blocks[placeholder][self.rank], self.devices[self.rank]
        owner = self.owner_of[placeholder][block] if self.gradients.all_ranks_here else self.rank
        source = next((each for each in stored if each.rank == owner), stored[0])
        is_all = source.block.part == block.part
        slot = ParameterSlot(self.gradients, source, None if is_all else block, owner, self.rank)
        is_written = placeholder in self.written
        parameter = source.parameter
        beside = self.keys[source.rank] == self.keys[self.rank]
        if is_all and beside and (self.rank == owner or not is_written):
            return parameter, slot
        within = whole_block(block.part) if is_all else block
        follower = RankTensor(source, within, device, beside=beside, writes=self.rank == owner if is_written else None)
        followers.setdefault(source, []).append(follower)
        return follower.tensor, slot


def _written(graph: ModelGraph) -> frozenset[str]:
    """The parameters that the model itself writes to (an embedding with ``max_norm``)."""
    memory = aliasing(graph.graph)
    return frozenset(node.name for node in graph.graph.nodes if node.name in graph.parameters and memory.written(node))


def check_values(state: State) -> None:
    """Raise ConfigError where a tensor here is on the meta device."""
    names = state.on_meta
    if names:
        raise ConfigError(
            f"the model is on the meta device: {first_few(names)} have shapes but no numbers to compute with",
            remedy="pm.initialize(init_fn) or pm.load_state_dict(...) gives them numbers; plan and graphs can be read without",
        )


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    assert isinstance(tensor, Tensor)
    return tensor


# -- parameters whose requires_grad changes after the model was partitioned --------------------------------------------------------


class Freezing:
    """Remembers what was frozen when the model was partitioned.

    Args:
        parameters: of this process; parts of one parameter have the same name.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        parts: defaultdict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in parameters:
            parts[name].append(parameter)
        self._frozen = [(name, parameter) for name, same in parts.items() for parameter in same if not parameter.requires_grad]
        self._parts = [(name, same) for name, same in parts.items() if len(same) > 1]

    def check(self) -> None:
        """Before gradients are computed.

        Raises:
            ConfigError: a parameter was unfrozen, or only some of its parts were frozen.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when the model was partitioned, and requires a gradient now: no program computes one",
                    remedy="call requires_grad_() on the model's parameter and partition it again",
                )
        for name, same in self._parts:
            if len({parameter.requires_grad for parameter in same}) > 1:
                raise ConfigError(
                    f"{name} lies in {len(same)} parts on several devices, and only some of them are frozen",
                    remedy=f'freeze all: for key, p in pm.named_parameters(): if key == "{name}": p.requires_grad_(False)',
                )
