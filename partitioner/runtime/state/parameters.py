"""The parameters, buffers and constants of this process's ranks; ``materialize`` copies them from the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from partitioner.runtime.state.gradient_slots import GradientStore
from partitioner.runtime.state.sharded_tensor import BlockTensor
from partitioner.runtime.state.stored_parameters import RankTensor, StoredParameter, copy_of, owners
from partitioner.tracing.export.on_meta.constructed import ConstructedTensors
from passes.ir.comm.unsummed import GradientSlot
from passes.ir.errors import ConfigError, first_few
from passes.ir.graph import ModelGraph
from passes.ir.torch_private import foreach_copy_
from passes.spmd.shards import Block


class BoundTensors(NamedTuple):
    """The tensors that the programs of a rank are bound to.

    Attributes:
        tensors: placeholder -> the tensor that they read.
        slots: placeholder of a parameter -> takes the gradients that they compute.
    """

    tensors: Mapping[str, Tensor]
    slots: Mapping[str, GradientSlot]


class BoundParameters(Mapping[int, BoundTensors]):
    """The parameters of each rank, bound when they are first read: one process may have thousands of ranks, of which it runs none.

    Args:
        ranks: of this process.
        bind: returns the parameters of a rank.
    """

    def __init__(self, ranks: Collection[int], bind: Callable[[int], BoundTensors]) -> None:
        self._ranks, self._bind = ranks, bind
        self._bound: dict[int, BoundTensors] = {}

    def __getitem__(self, rank: int) -> BoundTensors:
        if rank not in self._bound:
            if rank not in self._ranks:
                raise KeyError(rank)
            self._bound[rank] = self._bind(rank)
        return self._bound[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


class Followers:
    """The views and copies of parameters that programs read."""

    def __init__(self) -> None:
        self._of: dict[StoredParameter, list[RankTensor]] = {}
        self._copied: tuple[list[Tensor], list[Tensor]] | None = None  # to and from; None: not known
        self._written: list[RankTensor] = []

    def add(self, follower: RankTensor) -> None:
        """Let a view or copy follow its parameter."""
        self._of.setdefault(follower.stored, []).append(follower)
        self._copied = None
        if follower.writes:
            self._written.append(follower)

    def refresh(self) -> None:
        """Update all to the current values of their parameters.

        Raises:
            ConfigError: ``.data`` of a parameter was replaced by a tensor of another shape, dtype or device.
        """
        for stored, followers in self._of.items():
            if stored.parameter.data_ptr() != stored.address:
                stored.check_unchanged()
                stored.address, self._copied = stored.parameter.data_ptr(), None
                for follower in followers:
                    follower.move()
        if self._copied is None:
            pairs = [pair for followers in self._of.values() for follower in followers for pair in follower.copied]
            self._copied = [target for target, _ in pairs], [source for _, source in pairs]
        if self._copied[0]:
            foreach_copy_(*self._copied)

    def write_back(self) -> None:
        """Copy what programs wrote to copies back to the parameters."""
        for follower in self._written:
            follower.write_back()

    def become_real(self, stored: StoredParameter) -> None:
        """Replace what follows a parameter, in place, after it has left the meta device."""
        self._copied = None
        for follower in self._of.get(stored, ()):
            follower.become_real()


@dataclass(frozen=True)
class State:
    """The tensors of this process's ranks, whole or sharded.

    Parameters are stored once, see ``partitioner.runtime.state.stored_parameters``; buffers and constants once a rank. Within a rank a
    tensor is one object however many stages use it.

    Attributes:
        graph: maps placeholders to original names.
        copies: rank of this process -> placeholder of a buffer or constant -> the copy that its programs read.
        bound: rank of this process -> the parameters that its programs read, and what takes their gradients.
        blocks: placeholder -> rank -> the block of it that the rank's programs read, for all ranks.
        stored: placeholder of a parameter -> the parameters of this process that hold it.
        followers: parameter -> views and copies of it that programs read.
        gradients: adds gradients to this process's parameters.
        names: the keys of the original ``state_dict``, in its order.
        renamed: key of it under which a hook of a module saves a parameter or buffer of another name -> that name.
        parameter_names: the names of the original ``named_parameters``, in its order.
        devices: for each rank, where it runs.
        constructed: computes tensors of a model on the meta device that no checkpoint has.
        stand_in: an empty parameter for the optimizer of a process that trains none, since optimizers refuse an empty list; frozen if no
            process trains any. Nothing for a model without parameters.
        equal_buffers: whether copies of a buffer are always equal: then those of this process follow that of the lowest rank.
    """

    graph: ModelGraph
    copies: Mapping[int, Mapping[str, Tensor]]
    bound: BoundParameters
    blocks: Mapping[str, Mapping[int, Block]]
    stored: Mapping[str, Sequence[StoredParameter]]
    followers: Followers
    gradients: GradientStore
    names: tuple[str, ...]
    renamed: Mapping[str, str]
    parameter_names: tuple[str, ...]
    devices: Sequence[torch.device]
    constructed: ConstructedTensors
    stand_in: tuple[nn.Parameter, ...]
    equal_buffers: bool = False

    # -- the tensors of this process -----------------------------------------------------------------------------------------------

    def of_rank(self, rank: int) -> BoundTensors:
        """Return the tensors that the programs of a rank of this process read, and what takes the gradients of its parameters."""
        parameters = self.bound[rank]
        return BoundTensors({**parameters.tensors, **self.copies[rank]}, parameters.slots)

    def stored_parameters(self) -> Iterator[StoredParameter]:
        """Yield every parameter of this process, in the order of the original."""
        for name in self.parameter_names:
            if self.knows(name):
                yield from self.stored[self._placeholder(name)]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield original name and parameter; shards of one parameter on several devices all have its name."""
        for stored in self.stored_parameters():
            yield stored.name, stored.parameter

    @cached_property
    def all_have_all(self) -> bool:
        """Whether every process has all parameters of the model, each whole; the same answer in a process that has none of them."""
        members = [stored.membership for stored in self.stored_parameters()]
        return all(member.has_all for member in members) and bool(members or not self.parameter_names)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every buffer of this process under its original name; other blocks, and copies that may differ, as ``name@rank3``."""
        for placeholder, name in self.graph.buffers.items():
            ranks = [rank for rank, tensors in self.copies.items() if placeholder in tensors]
            owner_of = owners((rank, self.blocks[placeholder][rank]) for rank in ranks)
            shown = sorted(owner_of.values()) if self.equal_buffers else ranks
            for index, rank in enumerate(shown):
                yield (f"{name}@rank{rank}" if index else name), self.copies[rank][placeholder]

    @cached_property
    def _following_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a buffer and a copy of it that follows it."""
        pairs = []
        for placeholder in self.graph.buffers if self.equal_buffers else ():
            held = {rank: tensors[placeholder] for rank, tensors in self.copies.items() if placeholder in tensors}
            owner_of = owners((rank, self.blocks[placeholder][rank]) for rank in held)
            pairs += [(held[owner_of[self.blocks[placeholder][rank]]], tensor) for rank, tensor in held.items()]
        return [(source, copy) for source, copy in pairs if source is not copy]

    def named_parts(self, rank: int) -> Iterator[tuple[str, Tensor]]:
        """Yield original name and the part of each parameter that a rank of this process reads."""
        tensors = self.bound[rank].tensors
        for placeholder, name in self.graph.parameters.items():
            if placeholder in tensors:
                yield name, tensors[placeholder].detach()

    def held(self, name: str) -> list[tuple[Block, Tensor]]:
        """Return the blocks of a parameter or buffer that this process holds, with their tensors, lowest rank first."""
        placeholder = self._placeholder(name)
        blocks = self._stored_blocks(placeholder)
        return [(blocks[rank], tensor) for rank, tensor in self._tensors(placeholder).items()]

    def blocks_of_ranks(self, name: str) -> Mapping[int, Block]:
        """Return rank -> the block that its process stores of a parameter or buffer, for all ranks."""
        return self._stored_blocks(self._placeholder(name))

    def blocks_in_processes(self, name: str) -> Mapping[int, Block]:
        """Return rank -> the block that a process of its own would store of a parameter or buffer, for all ranks."""
        return self.blocks[self._placeholder(name)]

    def rank_of(self, name: str, parameter: Tensor) -> int:
        """Return the lowest rank that holds a parameter of this process."""
        return next(rank for rank, tensor in self._tensors(self._placeholder(name)).items() if tensor is parameter)

    def knows(self, name: str) -> bool:
        """Return whether the graph has a parameter or buffer of this name."""
        return self.first_name(name) in self._placeholders

    def first_name(self, name: str) -> str:
        """Return the name of a tensor, or the first one of those of a tied tensor; ``name`` may be a key of the original state."""
        name = self.renamed.get(name, name)
        return self.graph.aliases.get(name, name)

    def like(self, name: str) -> Tensor:
        """Return a tensor without memory that has the shape and dtype of a parameter or buffer of the model."""
        return self._traced[self._placeholder(name)]

    @cached_property
    def _traced(self) -> dict[str, Tensor]:
        """Placeholder -> the value that the trace has for it."""
        return {node.name: node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"}

    def _tensors(self, placeholder: str) -> dict[int, Tensor]:
        """Return rank -> the tensor that this process stores for it."""
        if placeholder in self.graph.parameters:
            return {stored.rank: stored.parameter for stored in self.stored[placeholder]}
        return {rank: tensors[placeholder] for rank, tensors in self.copies.items() if placeholder in tensors}

    def _stored_blocks(self, placeholder: str) -> Mapping[int, Block]:
        """Return rank -> the block that its process stores for it, for all ranks."""
        if placeholder in self.graph.parameters and self.gradients.all_ranks_here:
            return {stored.rank: stored.block for stored in self.stored[placeholder]}
        return self.blocks[placeholder]

    def originals(self) -> dict[str, list[Tensor]]:
        """Return placeholder -> the parameters, or buffers, of this process that hold it; not the copies that follow these."""
        copies = {id(copy) for _, copy in self._following_buffers}
        buffers = {placeholder: self._tensors(placeholder).values() for placeholder in self.graph.buffers}
        originals = {placeholder: [each for each in tensors if id(each) not in copies] for placeholder, tensors in buffers.items()}
        return originals | {placeholder: [each.parameter for each in stored] for placeholder, stored in self.stored.items()}

    def check_names(self) -> None:
        """Raise ConfigError if the original ``state_dict`` has entries other than parameters and buffers."""
        others = [name for name in self.names if not self.knows(name)]
        if others:
            raise ConfigError(
                f"the model's state_dict() has {', '.join(others[:5])}, which is no parameter and no buffer: a partitioned model does not "
                "call modules that have extra state (get_extra_state), or hooks that add entries",
                remedy="remove them; or read pm.named_parameters() and pm.named_buffers() and save these",
            )

    # -- before and after a run ----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Before a run, update views and copies of parameters, and copies of buffers, to their current values.

        Autograd's counts of writes stay as they are: a backward checks those of the tensors that are followed.

        Raises:
            ConfigError: ``.data`` of a parameter was replaced by a tensor of another shape, dtype or device.
        """
        with torch.no_grad():
            self.followers.refresh()
            for source, copy in self._following_buffers:
                copy.data.copy_(source)

    def finish(self) -> None:
        """After a run, write back parameters that the model itself writes to, and add the gradients of parameters with hooks."""
        with torch.no_grad():
            self.followers.write_back()
        self.gradients.finish()

    # -- values --------------------------------------------------------------------------------------------------------------------

    def set(self, name: str, whole: Tensor) -> None:
        """Copy a tensor of the model into every copy and block of it in this process; those on the meta device become real."""
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

    def fill(self, name: str, read: Callable[[Block, Tensor], None]) -> None:
        """Let ``read(block, part)`` copy into every copy and block of a tensor in this process; those on the meta device become real."""
        placeholder = self._placeholder(name)
        blocks = self._stored_blocks(placeholder)
        with torch.no_grad():
            for rank, held in self._tensors(placeholder).items():
                part = torch.empty(held.shape, dtype=held.dtype, device=self.devices[rank]) if held.is_meta else held.detach()
                read(blocks[rank], part)
                if held.is_meta:
                    self._make_real(placeholder, held, part)

    def copy_into(self, held: Tensor, values: Tensor) -> None:
        """Copy values into a tensor of this process; one on the meta device becomes real, unless the values are there, too."""
        if held.is_meta and not values.is_meta:
            placeholder = next((each for each, stored in self.stored.items() if any(one.parameter is held for one in stored)), "")
            self._make_real(placeholder, held, values.detach().clone())
        elif not held.is_meta:
            held.detach().copy_(values.detach())

    def complete(self) -> None:
        """Compute buffers on the meta device as the constructors of the model do; those whose values are not known stay there."""
        for placeholder, name in self.graph.buffers.items():
            held = {rank: tensor for rank, tensor in self._tensors(placeholder).items() if tensor.is_meta}
            values = self.constructed.buffer(name) if held else None
            if isinstance(values, Tensor):
                for rank, tensor in held.items():
                    self._make_real(placeholder, tensor, copy_of(values, self.blocks[placeholder][rank], self.devices[rank]))
        self.constructed.built.clear()

    def lend(self, name: str, whole: Tensor, *, is_written: bool) -> None:
        """Let programs compute with the values of another tensor: in its memory if ranks can read it there, else with a copy.

        Args:
            is_written: whether programs write to it: then each rank has a copy.
        """
        placeholder = self._placeholder(name)
        tensors, blocks = self._tensors(placeholder), self._stored_blocks(placeholder)
        for rank, held in tensors.items():
            is_alike = (held.shape, held.dtype, held.device) == (whole.shape, whole.dtype, whole.device)
            if is_written or not (blocks[rank].is_whole and is_alike):
                self._copy_uncounted(name, whole)
                return
        for held in tensors.values():
            if held.data_ptr() != whole.data_ptr() or held.stride() != whole.stride():
                held.data = whole

    def _copy_uncounted(self, name: str, whole: Tensor) -> None:
        """Copy as ``set``, without counting it as a write between forward and backward: the lender of the tensor checks its own."""
        placeholder = self._placeholder(name)
        tensors, blocks = self._tensors(placeholder), self._stored_blocks(placeholder)
        if any(held.is_meta for held in tensors.values()):
            self.set(name, whole)
            return
        for rank, held in tensors.items():
            held.data.copy_(blocks[rank].take(whole))

    def _make_real(self, placeholder: str, held: Tensor, values: Tensor) -> None:
        """Give a tensor on the meta device values, in place, since programs and optimizers refer to the object."""
        stored = next((candidate for candidate in self.stored.get(placeholder, ()) if candidate.parameter is held), None)
        if stored is None:
            torch.utils.swap_tensors(held, values)
            return
        stored.become_real(values)
        self.followers.become_real(stored)

    def _set_blocks(self, name: str, source: BlockTensor) -> None:
        """Copy blocks into the shards of this process.

        Raises:
            ConfigError: the source lacks a block of this plan.
        """
        source_blocks, placeholder = dict(source.blocks), self._placeholder(name)
        blocks = self._stored_blocks(placeholder)
        for rank, held in self._tensors(placeholder).items():
            values = source_blocks.get(blocks[rank])
            if values is None:
                raise ConfigError(
                    f"the blocks of {name} are those of another plan", remedy="load into pm.sharded_state_dict() of this model"
                )
            if held.is_meta:
                self._make_real(placeholder, held, values.to(self.devices[rank], held.dtype, copy=True))
            elif values.data_ptr() != held.data_ptr():  # else a checkpoint was loaded in place
                held.detach().copy_(values)

    def sharded(self) -> dict[str, BlockTensor]:
        """Return the shards of this process under the original names, each tensor as its blocks."""
        check_values(self)
        self.check_names()
        # Reversed, so that of equal blocks that of the lowest rank is taken.
        blocks_of = {name: {block: tensor.detach() for block, tensor in reversed(self.held(name))} for name in self.names}
        return {name: BlockTensor(list(blocks.items())) for name, blocks in blocks_of.items() if blocks}

    def owned(self, name: str) -> list[tuple[str, Tensor]]:
        """Return the blocks of a tensor that this process owns, under unique keys; the owner is the lowest rank that holds a block."""
        placeholder = self._placeholder(name)
        tensors = self._tensors(placeholder)
        return [(_key(name, number), tensors[rank]) for number, (rank, _) in enumerate(self._owners(placeholder)) if rank in tensors]

    def is_whole_here(self, placeholder: str) -> bool:
        """Return whether this process has all ranks and one whole parameter, of which each rank can read any block."""
        stored = self.stored.get(placeholder, ())
        return self.gradients.all_ranks_here and len(stored) == 1 and stored[0].block.is_whole

    def is_cut(self, name: str) -> bool:
        """Return whether a tensor of the model is sharded: some rank holds only a block of it."""
        return not all(block.is_whole for block in self._stored_blocks(self._placeholder(name)).values())

    def cut_parameters(self) -> list[str]:
        """Return the names of the parameters that are sharded; tied ones once."""
        names = dict.fromkeys(map(self.first_name, self.parameter_names))
        return [name for name in names if self.knows(name) and self.is_cut(name)]

    def is_whole_everywhere(self, name: str) -> bool:
        """Return whether every process holds a tensor of the model whole."""
        blocks = self._stored_blocks(self._placeholder(name))
        n_holders = 1 if self.gradients.all_ranks_here else len(self.devices)
        return len(blocks) >= n_holders and all(block.is_whole for block in blocks.values())

    def whole(self, name: str, parts: Mapping[str, Tensor | None]) -> Tensor | None:
        """Return a tensor of the model, assembled from ``parts``: key of a block (see ``owned``) -> tensor; None if one is missing."""
        blocks = self._owners(self._placeholder(name))
        tensors = [parts.get(_key(name, number)) for number in range(len(blocks))]
        if len(tensors) == 1 and blocks[0][1].is_whole:
            return tensors[0]
        result: Tensor | None = None
        for (_, block), part in zip(blocks, tensors, strict=True):
            if part is None:
                return None
            result = torch.empty(block.shape, dtype=part.dtype, device=part.device) if result is None else result
            block.put(result, part)
        return result

    def _owners(self, placeholder: str) -> list[tuple[int, Block]]:
        """Return each distinct block of a tensor, with the lowest rank that holds it."""
        return [(rank, block) for block, rank in owners(self._stored_blocks(placeholder).items()).items()]

    @cached_property
    def _placeholders(self) -> dict[str, str]:
        """Original (first) name of a parameter or buffer -> its placeholder."""
        return {name: placeholder for table in (self.graph.buffers, self.graph.parameters) for placeholder, name in table.items()}

    def _placeholder(self, name: str) -> str:
        return self._placeholders[self.first_name(name)]

    @property
    def on_meta(self) -> list[str]:
        """Return the names of this process's tensors on the meta device, which have no values yet."""
        parameters = {key for key, stored in self.stored.items() if any(each.parameter.is_meta for each in stored)}
        copies = {key for tensors in self.copies.values() for key, tensor in tensors.items() if tensor.is_meta}
        return sorted(self.graph.weights.get(key, key) for key in parameters | copies)


def _key(name: str, number: int) -> str:
    return name if number == 0 else f"{name}@block{number}"


def check_values(state: State) -> None:
    """Compute buffers that constructors alone know, of a model on the meta device; raise ConfigError if a tensor has no values then."""
    if not state.on_meta:
        return
    state.complete()
    learned = [name for name in state.on_meta if name in state.names]
    if learned:
        raise ConfigError(
            f"the model is on the meta device: {first_few(learned)} have shapes but no numbers to compute with",
            remedy="pm.load_safetensors(folder), pm.load_state_dict(...) or pm.initialize(init_fn) gives them numbers; plan and graphs can "
            "be read without",
        )
    for name in state.on_meta:
        is_buffer = name in state.graph.buffers.values()
        of_constructor = state.constructed.buffer(name) if is_buffer else state.constructed.attribute(state.graph.constants[name])
        other = "; or set it in a function of a module, pm.initialize(init_fn), and then load the weights" if is_buffer else ""
        raise ConfigError(
            f"the model is on the meta device, and its constructor alone knows the values of {name}: {of_constructor}",
            remedy=f"let the constructor make it on the CPU, as torch.arange(n, device='cpu') does{other}",
        )
