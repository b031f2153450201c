"""Arguments and results that cannot be traced are refused by name, with the remedy."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from partitioner import partition
from passes.ir.errors import PartitionError


class Kind(enum.Enum):
    PLAIN = "plain"


class StaticCache:
    """Has the name of transformers' class."""


ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "block mask": (lambda: create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu"), "more is a BlockMask.*create"),
    "cache": (StaticCache, "more is a StaticCache.*DynamicCache"),
    "set": (lambda: {1, 2}, "more is a set.*list or a tuple"),
    "generator": (lambda: (each for each in (1, 2)), "more is a generator.*list or a tuple"),
    "enum": (lambda: Kind.PLAIN, "more is a Kind.*its value"),
    "function": (lambda: torch.tanh, "more is a builtin_function_or_method.*as an attribute"),
    "module": (lambda: nn.Linear(2, 2), "more is a Linear.*submodule"),
    "random generator": (torch.Generator, "more is a Generator.*manual_seed"),
    "packed": (lambda: nn.utils.rnn.pack_sequence([torch.ones(2, 2), torch.ones(1, 2)]), "more is a PackedSequence.*padded tensor"),
    "object": (object, "more is an object.*keep other objects in the model"),
}


class Net(nn.Module):
    """Computes with its first argument; ``act`` is called in its forward."""

    def __init__(self, act: Callable[[Any, Tensor], Any] = lambda self, x: x) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), act

    def forward(self, x: Tensor, more: Any = None) -> Any:
        return self.act(self, self.layer(x))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    make, match = ARGUMENTS[name]
    _refuses(Net(), (torch.ones(4, 4), make()), match)


def _write_data(net: Any, x: Tensor) -> Tensor:
    net.layer.weight.data.mul_(0.5)
    return x


def _move(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.layer.to("cpu")(x)
    return result


FORWARDS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "data": (_write_data, "writes a tensor where a trace does not see it.*self.state.copy_"),
    "moved": (_move, "moves or converts a module"),
    "format": (lambda net, x: (x, f"{x.mean():.2f}"), "formats the values of a tensor"),
    "returned generator": (lambda net, x: (each for each in x), "returns a generator"),
    "returned set": (lambda net, x: {x}, "returns a set"),
    "returned dtype": (lambda net, x: (x, x.dtype), "returns a dtype"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards(name: str) -> None:
    act, match = FORWARDS[name]
    _refuses(Net(act), (torch.ones(4, 4),), match)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4))), "module of TorchScript.*scripted or traced from"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules(model: Callable[[], nn.Module], match: str) -> None:
    _refuses(model(), (torch.ones(4, 4),), match)


def _refuses(model: nn.Module, inputs: tuple[Any, ...], match: str) -> None:
    """Check that an error of ours is raised, which quotes no advice of torch's."""
    with pytest.raises(PartitionError, match=f"(?s){match}") as raised:
        partition(model, devices=2, mode="data", example_inputs=inputs)
    assert not any(text in str(raised.value) for text in ("register", "github", "torch.export", "pytree"))
