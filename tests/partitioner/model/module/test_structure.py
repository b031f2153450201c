"""A partitioned model has the modules, parameters, buffers, attributes and signature of the model."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from partitioner import PartitionedModel, partition
from passes.ir.errors import ConfigError

TOKENS = torch.arange(4) % 3


class Words(nn.Module):
    """Tied embeddings, a list of blocks, buffers, and attributes of all kinds."""

    main_input_name = "tokens"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=6, name="words")
        self.words = nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.words.weight
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(6)), "b": nn.Parameter(torch.ones(6))})
        self.first_block = [self.blocks[0]]

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def norm(self) -> float:
        return self.head.weight.norm().item()

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, *, scale: float = 1.0) -> Tensor:
        x = self.words(tokens) * self.scales["a"] + self.scales["b"]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Words().double()


@pytest.fixture(scope="module")
def pm(model: nn.Module) -> PartitionedModel:
    return partition(model, 2, "data", example_inputs=(TOKENS,), progress=False)


def test_names(model: nn.Module, pm: PartitionedModel) -> None:
    for read in (
        lambda module: module.named_modules(),
        lambda module: module.named_children(),
        lambda module: module.named_parameters(),
        lambda module: module.named_parameters(remove_duplicate=False),
        lambda module: module.named_parameters(prefix="outer", recurse=False),
        lambda module: module.named_buffers(),
        lambda module: nn.Sequential(module, nn.Linear(2, 2)).named_parameters(),
        lambda module: nn.Sequential(module, nn.Linear(2, 2)).named_modules(),
        lambda module: module.state_dict().items(),
        lambda module: module.blocks.state_dict(prefix="x.").items(),
        lambda module: nn.Sequential(module, nn.Linear(2, 2)).state_dict().items(),
    ):
        assert [name for name, _ in read(pm)] == [name for name, _ in read(model)]
    assert pm.get_parameter("blocks.1.0.weight") is dict(pm.named_parameters())["blocks.1.0.weight"]
    assert pm.get_buffer("blocks.1.1.running_mean") is dict(pm.named_buffers())["blocks.1.1.running_mean"]
    assert pm.head.weight is pm.words.weight
    assert pm.state_dict(keep_vars=True)["head.weight"] is pm.words.weight


def test_classes_and_options(pm: PartitionedModel) -> None:
    assert isinstance(pm.get_submodule("blocks.0.1"), nn.BatchNorm1d)
    assert [type_of.__class__ for type_of in pm.blocks[1]] == [nn.Linear, nn.BatchNorm1d]
    assert len(pm.blocks) == 2
    assert pm.blocks[0][0].in_features == 6
    assert list(pm.scales) == ["a", "b"]
    assert "Linear(in_features=6, out_features=6, bias=True)" in repr(pm.blocks)
    assert all(part.training for part in pm.modules())


def test_signature(model: nn.Module, pm: PartitionedModel) -> None:
    assert inspect.signature(pm.forward) == inspect.signature(model.forward)
    assert list(inspect.signature(type(pm).forward).parameters) == ["self", "tokens", "scale"]
    assert isinstance(pm, PartitionedModel)


def test_attributes_pass_through(model: Any, pm: Any) -> None:
    assert pm.config is model.config
    assert pm.main_input_name == "tokens"
    assert pm.device == torch.device("cpu")
    assert not hasattr(pm, "generation_config")


@pytest.mark.parametrize(
    ("name", "words"), [("norm", "values of the model's"), ("count", "method"), ("first_block", "layers of the model")]
)
def test_attributes_that_would_be_stale(pm: PartitionedModel, name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(pm, name)


def test_conversions_to_what_it_is() -> None:
    pm = partition(nn.Linear(4, 3), 2, "data", example_inputs=(torch.ones(4, 4),), progress=False)
    pm(torch.ones(4, 4)).sum().backward()
    for same in (pm.to("cpu"), pm.to(torch.float32), pm.float(), pm.cpu(), pm.type(torch.float32), pm.requires_grad_(True)):
        assert same is pm
    assert nn.Sequential(pm).to("cpu")[0] is pm
    assert pm.share_memory().weight.is_shared()
    with pytest.raises(ConfigError, match=r"weight is torch\.float32 on cpu, and would become torch\.float64"):
        nn.Sequential(pm).double()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda pm: pm.half(), "cannot be moved or converted"),
        (lambda pm: pm.to("meta"), "on meta"),
        (lambda pm: pm.to_empty(device="cpu"), "another tensor"),
        (lambda pm: pm.to(memory_format=torch.channels_last).blocks[0].bfloat16(), r"blocks.0.0.weight is .* torch.bfloat16"),
        (lambda pm: pm.blocks[0](torch.ones(4, 6)), "blocks.0 of a partitioned model cannot be called alone"),
        (lambda pm: copy.deepcopy(pm.blocks), "cannot be copied or pickled alone"),
        (lambda pm: setattr(pm.blocks[0][1], "momentum", 0.2), "blocks.0.1.momentum was read while the model was traced"),
        (lambda pm: setattr(pm, "config", None), "config was read while the model was traced"),
        (lambda pm: setattr(pm, "head", nn.Linear(6, 5)), "head cannot be set"),
        (lambda pm: setattr(pm.head, "weight", nn.Parameter(torch.ones(5, 6))), "head.weight cannot be set"),
        (lambda pm: delattr(pm.head, "weight"), "head.weight cannot be set"),
        (lambda pm: pm.blocks.append(nn.ReLU()), "blocks.2 cannot be set"),
        (lambda pm: pm.add_module("more", nn.ReLU()), "more cannot be set"),
        (lambda pm: pm.register_buffer("more", torch.ones(2)), "more cannot be set"),
        (lambda pm: pm.register_parameter("more", nn.Parameter(torch.ones(2))), "more cannot be set"),
        (lambda pm: pm.set_submodule("blocks.0", nn.ReLU()), "blocks.0 cannot be set"),
        (lambda pm: pm.head.register_forward_hook(print), r"head of .* cannot have hooks \(register_forward_hook\)"),
    ],
)
def test_what_would_not_reach_the_programs_is_refused(pm: PartitionedModel, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        call(pm)
    assert "remedy: " in str(caught.value)


def test_other_attributes_can_be_set() -> None:
    pm: Any = partition(nn.Linear(4, 3), 2, "data", example_inputs=(torch.ones(4, 4),), progress=False)
    pm.note = "mine"
    pm.in_features = 4  # what it is already
    assert pm.note == "mine"
    del pm.note
    assert not hasattr(pm, "note")


def test_a_buffer_that_is_written_reaches_every_rank() -> None:
    model = nn.BatchNorm1d(3).double().eval()
    x = torch.randn(4, 3).double()
    pm: Any = partition(model, 2, "data", example_inputs=(x,), progress=False)
    each: Any
    for each in (model, pm):
        each.running_mean.fill_(2)
        each.running_var.data.fill_(4)
    torch.testing.assert_close(pm(x), model(x))


@pytest.mark.usefixtures("devices_apart")
def test_parts_on_several_devices_have_one_name(model: nn.Module) -> None:
    pm = partition(model, 2, {"tensor": 2}, example_inputs=(TOKENS,), progress=False)
    assert sum(p.numel() for p in nn.Sequential(pm).parameters()) >= sum(p.numel() for p in model.parameters())
    assert list(dict(pm.named_parameters())) == list(dict(model.named_parameters()))
    parts = [each for name, each in nn.Sequential(pm).named_parameters() if name == "0.blocks.0.0.weight"]
    assert [tuple(part.shape) for part in parts] in ([(3, 6)] * 2, [(6, 3)] * 2, [(6, 6)])


def test_a_module_around_it_trains_and_loads(model: nn.Module) -> None:
    reference = nn.Sequential(copy.deepcopy(model), nn.Linear(5, 2).double())
    pm = partition(model, 2, "fsdp", example_inputs=(TOKENS,), progress=False)
    outer = nn.Sequential(pm, nn.Linear(5, 2).double())
    assert outer.load_state_dict(reference.state_dict()) == ([], [])
    with pytest.raises(RuntimeError, match=r"Missing key.*0.words.weight"):
        outer.load_state_dict({name: each for name, each in reference.state_dict().items() if name != "0.words.weight"})
    for module in (reference, outer):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            module(TOKENS).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(outer.state_dict(), reference.state_dict())


class Wrapper(nn.Module):
    """Takes what it lacks from the module inside, as wrappers of peft do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Inner(nn.Linear):
    """Has a property and a method."""

    @property
    def place(self) -> torch.device:
        return self.weight.device

    def grow(self) -> None:
        self.weight.data += 1


def test_attributes_of_a_wrapped_model() -> None:
    pm: Any = partition(Wrapper(Inner(3, 3)), 2, "data", example_inputs=(torch.randn(4, 3),), progress=False)
    assert (pm.in_features, pm.place) == (3, torch.device("cpu"))
    with pytest.raises(AttributeError, match=r"no 'grow': on the Inner it is a method.*Call it on the model.*full_state_dict"):
        pm.grow()
    with pytest.raises(AttributeError, match="neither a partitioned model nor the Wrapper itself has an attribute 'shrink'"):
        pm.shrink()


class Steps(nn.ModuleDict):
    """A dict that is a model."""

    def forward(self, x: Tensor) -> Tensor:
        for step in self.values():
            x = step(x)
        return x


class Layers(nn.ModuleList):
    """A list that is a model."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


ITEMS: list[Callable[[Any], Any]] = [
    len,
    bool,
    lambda module: [str(each) for each in module],
    lambda module: [str(module[key]) for key in (module if isinstance(module, nn.ModuleDict) or hasattr(module, "keys") else (0, -1))],
    lambda module: next(iter(module)) in module,
    lambda module: nn.Linear(2, 2) in module if hasattr(module, "keys") else str(module[:2]),
    lambda module: [(key, str(each)) for key, each in (module.items() if hasattr(module, "keys") else enumerate(module))],
]
"""How the items of a container are read."""


@pytest.mark.parametrize("kind", [nn.Sequential, Layers, Steps])
def test_items_of_a_container(kind: Any) -> None:
    layers: list[nn.Module] = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)]
    model = nn.Sequential(*layers) if kind is nn.Sequential else kind({"up": layers[0], "down": layers[2]} if kind is Steps else layers)
    pm: Any = partition(model, 2, "tensor", example_inputs=(torch.randn(8, 4),), progress=False)
    assert [read(pm) for read in ITEMS] == [read(model) for read in ITEMS]
    key: Any = "up" if kind is Steps else 0
    assert pm[key].weight is next(iter(pm.parameters()))
    with pytest.raises(ConfigError, match="cannot be set"):
        pm[key] = nn.ReLU()
    with pytest.raises(ConfigError, match="cannot be set"):
        del pm[key]
    with pytest.raises(TypeError):
        len(cast(Any, partition(nn.Linear(4, 4), 2, "tensor", progress=False)))
