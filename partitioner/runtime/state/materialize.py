"""Copy the tensors of a model to the devices of this process's ranks, and bind the programs of a trace to them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from partitioner.runtime.state.gradient_slots import GradientStore, ParameterSlot
from partitioner.runtime.state.hooks import TensorHooks, refuse_parameter_hooks
from partitioner.runtime.state.parameters import BoundParameters, BoundTensors, Followers, State
from partitioner.runtime.state.stored_parameters import RankTensor, StoredParameter, copy_of, device_keys, owners, store_parameters
from partitioner.tracing.export.on_meta.constructed import ConstructedTensors
from passes.graph.aliasing import aliasing
from passes.ir.comm.unsummed import GradientSlot
from passes.ir.errors import ConfigError, first_few
from passes.ir.graph import ModelGraph
from passes.spmd.shards import Block, whole_block

_LIKE_THIS_CALL = "partition the model with an example like this call, in these modes, and load pm.full_state_dict() into it"


def materialize(
    model: nn.Module,
    graph: ModelGraph,
    blocks: Mapping[str, Mapping[int, Block]],
    devices: Sequence[torch.device],
    local_ranks: Sequence[int],
    hooks: TensorHooks,
    *,
    equal_buffers: bool = False,
) -> State:
    """Return the state of this process: shards of the model's tensors, copied to the devices of its ranks.

    Args:
        blocks: placeholder -> rank -> the block that it reads, for all ranks.
        hooks: of the model's parameters.
        equal_buffers: whether copies of a buffer are always equal.

    Raises:
        ConfigError: a parameter has hooks, and this process holds a part of it.
    """
    originals = {placeholder: (name, _tensor(model, name)) for placeholder, name in graph.parameters.items()}
    copied = {**{placeholder: _tensor(model, name) for placeholder, name in graph.buffers.items()}, **graph.constants}
    keys = device_keys(devices)
    stored = store_parameters(originals, blocks, devices, keys, local_ranks)
    for shard in (shard for shards in stored.values() for shard in shards if shard.parameter.requires_grad):
        for hook in hooks.get(shard.name, ()):
            shard.parameter.register_hook(hook)
        refuse_parameter_hooks([shard], in_no_sync=False)
    trained = frozenset(name for name, original in originals.values() if original.requires_grad)
    gradients = GradientStore(trained, all_ranks_here=len(local_ranks) == len(devices))
    followers = Followers()
    binder = _ParameterBinder(blocks, devices, keys, stored, followers, gradients, _written_parameters(graph))
    copies = {rank: _copies(copied, blocks, rank, devices[rank]) for rank in local_ranks}
    bound = BoundParameters(local_ranks, binder.bound)
    saved, parameters = model.state_dict(keep_vars=True), tuple(name for name, _ in model.named_parameters())
    trains = any(parameter.requires_grad for parameter in model.parameters())
    stand_in = (nn.Parameter(torch.empty(0), requires_grad=trains),) if parameters else ()
    of_model = (tuple(saved), _renamed(model, saved), parameters, tuple(devices), ConstructedTensors.of(model), stand_in)
    return State(graph, copies, bound, blocks, stored, followers, gradients, *of_model, equal_buffers)


def _copies(tensors: Mapping[str, Tensor], blocks: Mapping[str, Mapping[int, Block]], rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return placeholder -> the copy of a rank of its block of a tensor, of those that it reads."""
    return {name: copy_of(tensor, blocks[name][rank], device) for name, tensor in tensors.items() if rank in blocks[name]}


def _renamed(model: nn.Module, saved: Mapping[str, Tensor]) -> dict[str, str]:
    """Return key of a model's state -> name of the tensor, for those that a hook renames, as that of torch's checkpoint wrapper does."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    known, name_of = {name for name, _ in named}, {id(tensor): name for name, tensor in reversed(named)}
    return {key: name_of[id(value)] for key, value in saved.items() if key not in known and id(value) in name_of}


def state_of_trace(state: State, graph: ModelGraph, blocks: Mapping[str, Mapping[int, Block]]) -> State:
    """Return the same tensors for another trace of the model: its programs read the parameters and buffers of ``state``.

    Args:
        blocks: placeholder of the trace -> rank -> the block that it reads, for all ranks.

    Raises:
        ConfigError: a rank reads another block than it holds, or the trace writes to a parameter that the first one does not write to.
    """
    before = {name: placeholder for placeholder, name in state.graph.weights.items()}
    placeholder_before = {placeholder: before[name] for placeholder, name in graph.weights.items() if name in before}
    read = {node.name for node in graph.graph.nodes if node.op == "placeholder" and node.users}
    # Weights of which a rank reads a block that it does not hold.
    not_held = {
        placeholder: name
        for placeholder, name in graph.weights.items()
        for rank, block in blocks[placeholder].items()
        if placeholder in read
        and (placeholder not in placeholder_before or state.blocks[placeholder_before[placeholder]].get(rank) != block)
    }
    # A parameter that this process holds whole serves any block: bind it again where blocks differ; the lowest reader adds the gradient.
    whole = [
        each for each in graph.parameters if each in read and each in placeholder_before and state.is_whole_here(placeholder_before[each])
    ]
    anew = [each for each in whole if blocks[each] != state.blocks[placeholder_before[each]]]
    shared = {each: _shared_buffer(state, placeholder_before.get(each), blocks[each]) for each in not_held if each in graph.buffers}
    shared = {each: tensors for each, tensors in shared.items() if tensors and not _written(graph, [each])}
    unavailable = [name for placeholder, name in not_held.items() if placeholder not in anew and placeholder not in shared]
    unavailable += [
        graph.parameters[each] for each in _written_parameters(graph) if placeholder_before[each] not in _written_parameters(state.graph)
    ]
    if unavailable:
        raise ConfigError(
            f"the call reads {first_few(unavailable)} on other ranks, or in other parts, than these hold since the model was partitioned",
            remedy=_LIKE_THIS_CALL,
        )
    _refuse_stale_copies(state, graph, blocks, placeholder_before)
    copies = {}
    for rank, tensors in state.copies.items():
        copies[rank] = {placeholder: tensors[each] for placeholder, each in placeholder_before.items() if each in tensors}
        copies[rank].update(_copies(graph.constants, blocks, rank, state.devices[rank]))
        copies[rank].update({placeholder: tensors[rank] for placeholder, tensors in shared.items() if rank in tensors})
    stored = {placeholder: state.stored[each] for placeholder, each in placeholder_before.items() if each in state.stored}
    held = {placeholder: state.blocks[each] for placeholder, each in placeholder_before.items()}
    held.update({placeholder: blocks[placeholder] for placeholder in (*graph.constants, *anew)})
    held.update({placeholder: {**held[placeholder], **blocks[placeholder]} for placeholder in shared})
    read_anew = {placeholder: stored[placeholder] for placeholder in anew}
    written = _written_parameters(graph)
    binder = _ParameterBinder(held, state.devices, device_keys(state.devices), read_anew, state.followers, state.gradients, written)

    def bind(rank: int) -> BoundTensors:
        before, new = state.bound[rank], binder.bound(rank)
        kept = {placeholder: each for placeholder, each in placeholder_before.items() if each in before.tensors}
        return BoundTensors(
            {**{placeholder: before.tensors[each] for placeholder, each in kept.items()}, **new.tensors},
            {**{placeholder: before.slots[each] for placeholder, each in kept.items()}, **new.slots},
        )

    return replace(state, graph=graph, copies=copies, bound=BoundParameters(tuple(copies), bind), blocks=held, stored=stored)


def _refuse_stale_copies(
    state: State, graph: ModelGraph, blocks: Mapping[str, Mapping[int, Block]], placeholder_before: Mapping[str, str]
) -> None:
    """Raise ConfigError if a trace writes a buffer on some of the ranks that hold it alone, and the copies of others do not follow."""
    stale = []
    for placeholder in _written(graph, graph.buffers):
        held = state.blocks[placeholder_before[placeholder]]
        followed = owners(held.items()).values() if state.equal_buffers and len(state.copies) == len(state.devices) else held
        if not blocks[placeholder].keys() >= set(followed):
            stale.append(graph.buffers[placeholder])
    if stale:
        raise ConfigError(f"the call writes {first_few(stale)} on one stage, and ranks of another one read copies", remedy=_LIKE_THIS_CALL)


def _shared_buffer(state: State, placeholder: str | None, blocks: Mapping[int, Block]) -> dict[int, Tensor]:
    """Return rank -> the tensor of another rank on its device that holds the same block of a buffer; empty if a rank has none.

    A rank that only reads a buffer may read that of another one: there is one tensor, so no copy grows old.

    Args:
        blocks: rank -> the block that it reads.
    """
    keys = device_keys(state.devices)
    if placeholder is None or not state.equal_buffers or len(state.copies) < len(keys):
        return {}
    tensors = {rank: own[placeholder] for rank, own in state.copies.items() if placeholder in own}
    held = {(keys[rank], state.blocks[placeholder][rank]): tensor for rank, tensor in sorted(tensors.items(), reverse=True)}
    if any((keys[rank], block) not in held for rank, block in blocks.items()):
        return {}
    return {rank: held[keys[rank], block] for rank, block in blocks.items()}


@dataclass(frozen=True)
class _ParameterBinder:
    """Binds the programs of ranks to tensors and gradient slots of parameters.

    Attributes:
        blocks, devices: see ``materialize``.
        keys: of the devices, see ``device_keys``.
        stored: placeholder -> the parameters of this process that hold it.
        followers: gets the views and copies of parameters that programs read.
        written: placeholders of the parameters that the model itself writes to.
    """

    blocks: Mapping[str, Mapping[int, Block]]
    devices: Sequence[torch.device]
    keys: Sequence[Hashable]
    stored: Mapping[str, Sequence[StoredParameter]]
    followers: Followers
    gradients: GradientStore
    written: frozenset[str]

    @cached_property
    def owner_of(self) -> Mapping[str, Mapping[Block, int]]:
        """Placeholder -> block -> the lowest rank that holds it."""
        return {placeholder: owners(self.blocks[placeholder].items()) for placeholder in self.stored}

    def bound(self, rank: int) -> BoundTensors:
        """Return the parameters that the programs of a rank read."""
        bound = {placeholder: self._bind(placeholder, rank) for placeholder in self.stored if rank in self.blocks[placeholder]}
        tensors = {placeholder: tensor for placeholder, (tensor, _) in bound.items()}
        return BoundTensors(tensors, {placeholder: slot for placeholder, (_, slot) in bound.items()})

    def _bind(self, placeholder: str, rank: int) -> tuple[Tensor, GradientSlot]:
        """Return the tensor that the programs of a rank read of a parameter, and its slot; a view or copy is added to ``followers``."""
        block, device, stored = self.blocks[placeholder][rank], self.devices[rank], self.stored[placeholder]
        owner = self.owner_of[placeholder][block] if self.gradients.all_ranks_here else rank
        source = next((candidate for candidate in stored if candidate.rank == owner), stored[0])
        is_whole = source.block.part == block.part
        slot = ParameterSlot(self.gradients, source, None if is_whole else block, owner, rank)
        is_written = placeholder in self.written
        on_same_device = self.keys[source.rank] == self.keys[rank]
        if is_whole and on_same_device and (rank == owner or not is_written):
            return source.parameter, slot
        block_of_source = whole_block(block.part) if is_whole else block
        writes = rank == owner if is_written else None
        follower = RankTensor(source, block_of_source, device, on_same_device=on_same_device, writes=writes)
        self.followers.add(follower)
        return follower.tensor, slot


def _written_parameters(graph: ModelGraph) -> frozenset[str]:
    """Return the placeholders of the parameters that the model itself writes to (an embedding with ``max_norm``)."""
    return _written(graph, graph.parameters)


def _written(graph: ModelGraph, placeholders: Collection[str]) -> frozenset[str]:
    """Return those of some placeholders whose tensors the model itself writes to."""
    memory = aliasing(graph.graph)
    return frozenset(node.name for node in graph.graph.nodes if node.name in placeholders and memory.written(node))


def _tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    assert isinstance(tensor, Tensor)
    return tensor
