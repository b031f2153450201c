"""The functions of ``torch.distributed.checkpoint`` and safetensors on a partitioned model, with all ranks in one process."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from partitioner import ConfigError, PartitionedModel, partition
from partitioner.runtime.state.checkpoint.dtensor_regions import dtensor_region, find_placements, submesh_of
from passes.ir.mesh import Mesh
from passes.spmd.shards import Block
from tests.support.running.slow_values import slow

_generator = torch.Generator().manual_seed(0)
X = torch.rand(4, 3, 6, 6, dtype=torch.float64, generator=_generator)
TARGET = torch.rand(4, 5, dtype=torch.float64, generator=_generator)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*Detected an existing checkpoint")


class Net(nn.Module):
    """A convolution in another memory format, statistics, a frozen weight, a buffer that is not saved, and tied layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of any number."""
        shift = self.get_buffer("shift")
        x = torch.tanh(self.norm(self.conv(x))).mean((2, 3)) * self.scale + shift
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    whole: Any = Net().double()
    return whole.to(memory_format=torch.channels_last)


def adamw(module: nn.Module) -> Optimizer:
    """Return an optimizer with two groups, by name."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    biases = [parameter for name, parameter in named if name.endswith(".bias")]
    others = [parameter for name, parameter in named if not name.endswith(".bias")]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-2)


def step(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(module(X), TARGET).backward()
    optimizer.step()


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(equal(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, Tensor):
        return torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    if isinstance(wanted, tuple | list):  # torch's functions make lists of tuples with full_state_dict
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    return bool(found == wanted)


@pytest.fixture(scope="module")
def trained() -> tuple[PartitionedModel, Optimizer, nn.Module, Optimizer]:
    """Return a model cut by columns, and the unpartitioned model, each with its optimizer after a step."""
    whole = model()
    pm = partition(model(), 2, "fsdp", example_inputs=(X,), progress=False)
    optimizer, whole_optimizer = adamw(pm), adamw(whole)
    step(pm, optimizer)
    step(whole, whole_optimizer)
    return pm, optimizer, whole, whole_optimizer


@pytest.mark.parametrize(
    "options",
    [
        *slow(StateDictOptions(), StateDictOptions(full_state_dict=True), StateDictOptions(full_state_dict=True, cpu_offload=True)),
        StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=True),
        *slow(StateDictOptions(ignore_frozen_params=True)),
    ],
    ids=str,
)
def test_states_are_those_of_the_model(
    trained: tuple[PartitionedModel, Optimizer, nn.Module, Optimizer], options: StateDictOptions
) -> None:
    pm, optimizer, whole, whole_optimizer = trained
    wanted_model, wanted_optimizer = get_state_dict(whole, whole_optimizer, options=options)
    found_model, found_optimizer = get_state_dict(pm, optimizer, options=options)
    assert list(found_model) == list(wanted_model)
    assert equal(found_model, wanted_model)
    assert equal(found_optimizer, wanted_optimizer)
    assert equal(get_model_state_dict(pm, options=options), wanted_model)
    assert equal(get_optimizer_state_dict(pm, optimizer, options=options), wanted_optimizer)
    other = partition(model(1), 2, "pipeline", n_microbatches=1, example_inputs=(X,), progress=False)
    other_optimizer = adamw(other)
    strict = StateDictOptions(**{**vars(options), "strict": not options.ignore_frozen_params})
    found = set_state_dict(other, other_optimizer, model_state_dict=found_model, optim_state_dict=found_optimizer, options=strict)
    assert found.missing_keys == (["scale"] if options.ignore_frozen_params else [])
    assert equal(other.state_dict(), {**whole.state_dict(), "scale": other.state_dict()["scale"]})
    assert equal(get_optimizer_state_dict(other, other_optimizer, options=options), wanted_optimizer)


@pytest.mark.slow
def test_dcp_by_turns(trained: tuple[PartitionedModel, Optimizer, nn.Module, Optimizer], tmp_path: Path) -> None:
    """Saved asynchronously, in each form; what was saved are the values at the call."""
    pm, optimizer, whole, _ = trained
    wanted = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    forms: dict[str, Any] = {"get": get_model_state_dict(pm), "sharded": pm.sharded_state_dict(), "dtensors": pm.dtensor_state_dict()}
    states = {"optimizer": get_optimizer_state_dict(pm, optimizer), "blocks": pm.sharded_optimizer_state_dict(optimizer)}
    before = pm.full_optimizer_state_dict(optimizer)["state"]
    before = {name: {what: value.clone() for what, value in entries.items()} for name, entries in before.items()}
    writing: Any = async_save({**forms, **states}, checkpoint_id=tmp_path)
    step(pm, optimizer)
    writing.result()
    assert not equal(pm.full_state_dict(), wanted)
    for form, read in (("get", get_model_state_dict), ("sharded", PartitionedModel.sharded_state_dict), ("dtensors", get_model_state_dict)):
        state: dict[str, Any] = {form: read(pm)}
        load(state, checkpoint_id=tmp_path)
        set_model_state_dict(pm, state[form])
        assert equal(pm.full_state_dict(), wanted)
        with torch.no_grad():
            pm.get_parameter("first.weight").add_(1)
    for form in states:
        step(pm, optimizer)
        state = {form: get_optimizer_state_dict(pm, optimizer)}
        load(state, checkpoint_id=tmp_path)
        set_optimizer_state_dict(pm, optimizer, state[form])
        assert equal(pm.full_optimizer_state_dict(optimizer)["state"], before)
    set_model_state_dict(pm, wanted)


def test_dcp_takes_the_model_itself(trained: tuple[PartitionedModel, Optimizer, nn.Module, Optimizer], tmp_path: Path) -> None:
    pm = trained[0]
    wanted = {name: tensor.clone() for name, tensor in pm.full_state_dict().items()}
    save({"model": pm}, checkpoint_id=tmp_path)
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.mul_(2)
    load({"model": pm}, checkpoint_id=tmp_path)
    assert equal(pm.full_state_dict(), wanted)


def test_dtensors_of_one_process(trained: tuple[PartitionedModel, Optimizer, nn.Module, Optimizer]) -> None:
    """They are whole, on a mesh of one rank."""
    pm = trained[0]
    tensors = pm.dtensor_state_dict()
    assert list(tensors) == list(model().state_dict())
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor)
        assert tensor.device_mesh.size() == 1
        assert torch.equal(tensor.full_tensor(), pm.full_state_dict()[name])
    doubled = {name: tensor + tensor for name, tensor in tensors.items()}
    wanted = {name: tensor * 2 for name, tensor in pm.full_state_dict().items()}
    pm.load_state_dict(doubled)
    assert equal(pm.full_state_dict(), wanted)
    pm.load_state_dict({name: tensor / 2 if tensor.is_floating_point() else tensor // 2 for name, tensor in wanted.items()})


def test_a_full_state_is_kept_while_training_goes_on(trained: tuple[PartitionedModel, Optimizer, nn.Module, Optimizer]) -> None:
    state = trained[0].full_state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    with torch.no_grad():
        for parameter in trained[0].parameters():
            parameter.add_(1.0)
        again = trained[0].full_state_dict()
        for parameter in trained[0].parameters():
            parameter.sub_(1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in again.items())


def test_safetensors(trained: tuple[PartitionedModel, Optimizer, nn.Module, Optimizer], tmp_path: Path) -> None:
    """No two entries share memory, tied names neither, and all are contiguous; the model has both otherwise."""
    pm, _, whole, _ = trained
    state = pm.full_state_dict()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert equal(loaded, {name: state[name] for name in whole.state_dict()})
    other = model(1)
    other.load_state_dict(loaded)
    assert equal(other.state_dict(), state)
    with torch.no_grad():
        pm.get_parameter("last.weight").mul_(0)
    pm.load_state_dict(loaded)
    assert equal(pm.state_dict(), loaded)


@pytest.mark.slow
def test_parts_on_several_devices(devices_apart: None) -> None:
    """Parts of one parameter have one name: the state of each is a part of the same whole."""
    whole = model()
    pm = partition(model(), 2, "fsdp", example_inputs=(X,), progress=False)
    assert len([name for name, _ in pm.named_parameters() if name == "last.weight"]) == 2
    optimizer, whole_optimizer = adamw(pm), adamw(whole)
    step(pm, optimizer)
    step(whole, whole_optimizer)
    wanted: Any = get_optimizer_state_dict(whole, whole_optimizer)
    found: Any = get_optimizer_state_dict(pm, optimizer)
    assert equal(found["state"], wanted["state"])
    step(pm, optimizer)
    set_optimizer_state_dict(pm, optimizer, found)
    assert equal(pm.full_optimizer_state_dict(optimizer)["state"], wanted["state"])
    saved = optimizer.state_dict()
    new = adamw(pm)
    new.load_state_dict(saved)  # it has no hooks before its first step, and takes its parts of the whole then
    step(pm, new)
    step(whole, whole_optimizer)
    wanted = get_optimizer_state_dict(whole, whole_optimizer)
    found = get_optimizer_state_dict(pm, new)
    assert equal(found["state"]["last.weight"]["step"], wanted["state"]["last.weight"]["step"])


def test_states_that_do_not_fit(trained: tuple[PartitionedModel, Optimizer, nn.Module, Optimizer]) -> None:
    pm, optimizer, whole, whole_optimizer = trained
    for options in (None, StateDictOptions(full_state_dict=True)):
        with pytest.raises(ConfigError, match=r"the state lacks last\.bias"):
            set_model_state_dict(pm, {name: t for name, t in whole.state_dict().items() if name != "last.bias"}, options=options)
        with pytest.raises(ConfigError, match="unknown names in the state: wheel"):
            set_model_state_dict(pm, {**whole.state_dict(), "wheel": torch.zeros(1)}, options=options)
        with pytest.raises(ConfigError, match=r"last\.bias has shape \(4,\) in the state and \(5,\) in the model"):
            set_model_state_dict(pm, {**whole.state_dict(), "last.bias": torch.zeros(4)}, options=options)
    for call in (pm.full_optimizer_state_dict, pm.sharded_optimizer_state_dict):
        with pytest.raises(ConfigError, match="is none of this model's"):
            call(whole_optimizer)
    state: Any = get_optimizer_state_dict(pm, optimizer)
    del state["state"]["last.bias"]
    with pytest.raises(RuntimeError, match=r"Missing optimizer state for parameter 'last\.bias'"):
        set_optimizer_state_dict(pm, optimizer, state)


# -- which placements describe the blocks of a plan ----------------------------------------------------------------------------------


def rows(start: int, stop: int, of: int) -> Block:
    return Block((of, 4), (of, 4), (((start, stop),), ((0, 4),)), (stop - start, 4))


def heads(index: int) -> Block:
    """Return one of two heads of each of q, k and v."""
    return Block((12, 4), (3, 2, 2, 4), (((0, 3),), ((index, index + 1),), ((0, 2),), ((0, 4),)), (6, 4))


@pytest.mark.parametrize(
    ("mesh", "blocks", "placements"),
    [
        ({"fsdp": 2}, {0: rows(0, 3, 5), 1: rows(3, 5, 5)}, (0,)),
        ({"fsdp": 3}, {0: rows(0, 3, 7), 1: rows(3, 5, 7), 2: rows(5, 7, 7)}, None),  # Shard: 3, 3, 1
        ({"fsdp": 3}, {0: rows(0, 1, 2), 1: rows(1, 2, 2), 2: rows(2, 2, 2)}, (0,)),
        ({"tensor": 2}, {0: heads(0), 1: heads(1)}, None),
        ({"data": 2}, {0: rows(0, 4, 4), 1: rows(0, 4, 4)}, (None,)),
        ({"data": 2, "fsdp": 2}, {0: rows(0, 2, 4), 1: rows(2, 4, 4), 2: rows(0, 2, 4), 3: rows(2, 4, 4)}, (None, 0)),
        ({"fsdp": 2, "tensor": 2}, {index: rows(index, index + 1, 4) for index in range(4)}, (0, 0)),
        ({"fsdp": 2, "tensor": 2}, {rank: rows(start, start + 1, 4) for rank, start in enumerate((0, 2, 1, 3))}, None),  # tensor outside
        ({"pipeline": 2, "fsdp": 2}, {2: rows(0, 2, 4), 3: rows(2, 4, 4)}, (0,)),
        ({"pipeline": 2}, {1: rows(0, 4, 4)}, (None,)),
    ],
    ids=str,
)
def test_placements(mesh: Mapping[str, int], blocks: Mapping[int, Block], placements: tuple[int | None, ...] | None) -> None:
    submesh = submesh_of(Mesh(tuple(mesh.items())), sorted(blocks))
    assert find_placements(blocks, submesh) == placements


def test_regions_are_those_of_dtensor() -> None:
    """Compared with ``torch.chunk``, by which ``Shard`` is defined."""
    for length, parts in ((7, 3), (2, 3), (6, 4), (8, 2)):
        whole = torch.arange(length)
        chunks = [*whole.chunk(parts), *[whole[:0]] * parts]
        for index in range(parts):
            (start,), (size,) = dtensor_region((length,), (0,), (parts,), (index,))
            assert torch.equal(whole[start : start + size], chunks[index])


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
