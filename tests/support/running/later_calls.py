"""Models of which each call reads its own parameters, trained by calls of several kinds beside the original."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partitioner import PartitionWarning, partition

WIDTH = 8


def layers(n: int) -> nn.Sequential:
    return nn.Sequential(*(each for _ in range(n) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


class Heads(nn.Module):
    """Two heads, one a call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(3)
        self.first, self.second = nn.Linear(WIDTH, 3), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4))

    def forward(self, x: Tensor, task: str = "first") -> Tensor:
        hidden = self.body(x)
        return self.first(hidden) if task == "first" else self.second(hidden)


class Encoder(nn.Module):
    """An encoder of an optional input, registered before the layers that read its result, or after them."""

    def __init__(self, *, is_last: bool = False) -> None:
        super().__init__()
        if is_last:
            self.body = layers(3)
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        if not is_last:
            self.body = layers(3)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, pixels: Tensor | None = None) -> Tensor:
        return self.head(self.body(x if pixels is None else x + self.encoder(pixels)))


class Scaled(nn.Module):
    """A layer with a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.frozen + self.shift


class Adapter(nn.Module):
    """A layer that evaluation alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.adapter, self.after = layers(2), Scaled(), layers(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.after(x if self.training else x + self.adapter(x))


class Tied(nn.Module):
    """One weight for the embedding and the head: some calls read one of these alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(12, WIDTH), layers(3), nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor | None = None, embedded: Tensor | None = None, hidden: bool = False) -> Tensor:
        x = self.body(self.embedding(ids) if embedded is None else embedded)
        return x if hidden else self.head(x)


class EarlyExit(nn.Module):
    """A call that leaves out the last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.early, self.second, self.late = layers(2), nn.Linear(WIDTH, 3), layers(2), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, early: bool = False) -> Tensor:
        x = self.first(x)
        return self.early(x) if early else self.late(self.second(x))


_generator = torch.Generator().manual_seed(5)
_x, _pixels, _embedded = (torch.randn(*shape, generator=_generator, dtype=torch.float64) for shape in ((4, WIDTH), (4, 6), (4, 5, WIDTH)))
_ids = torch.randint(0, 12, (4, 5), generator=_generator)

_Call = tuple[tuple[Any, ...], Mapping[str, Any], bool]
"""Arguments of a call, and whether the model is in training mode."""

MODELS: Mapping[str, tuple[Any, Sequence[_Call]]] = {
    "heads": (Heads, [((_x,), {}, True), ((_x,), {"task": "second"}, True)]),
    "encoder": (Encoder, [((_x,), {}, True), ((_x, _pixels), {}, True)]),
    "encoder_left_out": (Encoder, [((_x, _pixels), {}, True), ((_x,), {}, True)]),
    "late_encoder": (lambda: Encoder(is_last=True), [((_x,), {}, True), ((_x,), {"pixels": _pixels}, True)]),
    "adapter": (Adapter, [((_x,), {}, True), ((_x,), {}, False)]),
    "tied": (Tied, [((_ids,), {}, True), ((), {"embedded": _embedded}, True), ((_ids,), {"hidden": True}, True)]),
    "early": (EarlyExit, [((_x,), {}, True), ((_x,), {"early": True}, True)]),
    "late": (EarlyExit, [((_x,), {"early": True}, True), ((_x,), {}, True)]),
}
"""Name -> what builds a model, and the calls; the first one is the example."""


def built(name: str) -> tuple[nn.Module, Sequence[_Call]]:
    build, calls = MODELS[name]
    torch.manual_seed(0)
    return build().double(), calls


def difference(name: str, mode: str | Mapping[str, int], devices: int) -> str | None:
    """Train a model and its partitioned form by all calls, twice; return what differs first, None if nothing does."""
    model, calls = built(name)
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartitionWarning)
        pm = partition(model, devices, mode, example_inputs=calls[0][0], example_kwargs=dict(calls[0][1]), progress=False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pm, reference)]
    for number, (args, kwargs, training) in enumerate((*calls, *calls)):
        pm.train(training)
        reference.train(training)
        expected = reference(*args, **kwargs)
        target = torch.zeros_like(expected)
        if number % 2:
            nn.functional.mse_loss(pm(*args, **kwargs), target).backward()
        else:
            pm.train_step(*args, target=target, loss_fn=nn.functional.mse_loss, **kwargs)
        nn.functional.mse_loss(expected, target).backward()
        found: dict[str, Tensor | None] = pm.full_gradients()
        for key, parameter in reference.named_parameters():
            if not _same(found[key], parameter.grad):
                return f"gradient of {key} in call {number}"
        with torch.no_grad():
            if not _same(pm(*args, **kwargs), expected):
                return f"result of call {number}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _weights_differ(pm.full_state_dict(), reference)


def unfreezing_difference(mode: str | Mapping[str, int], devices: int) -> str | None:
    """Train a head, then more and more layers below it, then fewer; return what differs first, None if nothing does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double()
    model[:4].requires_grad_(False)
    reference = copy.deepcopy(model)
    pm = partition(model, devices, mode, example_inputs=(_x,), progress=False)
    optimizers = [torch.optim.AdamW([each for each in one.parameters() if each.requires_grad], lr=1e-2) for one in (pm, reference)]
    for number, (layer, trains) in enumerate(((4, True), (2, True), (0, True), (2, False), (2, True))):
        for module, optimizer in zip((pm, reference), optimizers, strict=True):
            parameters = [each for key, each in module.named_parameters() if key.startswith(f"{layer}.")]
            for parameter in parameters:
                parameter.requires_grad_(trains)
            known = {id(each) for group in optimizer.param_groups for each in group["params"]}
            optimizer.add_param_group({"params": [each for each in parameters if id(each) not in known], "lr": 2e-2})
        for _ in range(2):
            expected = reference(_x)
            target = torch.zeros_like(expected)
            nn.functional.mse_loss(expected, target).backward()
            if number % 2:
                nn.functional.mse_loss(pm(_x), target).backward()
            else:
                pm.train_step(_x, target=target, loss_fn=nn.functional.mse_loss)
            found = pm.full_gradients()
            for key, parameter in reference.named_parameters():
                if not _same(found[key], parameter.grad):
                    return f"gradient of {key} after change {number}"
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return _weights_differ(pm.full_state_dict(), reference)


def _same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return torch.allclose(found, expected, rtol=1e-9, atol=1e-11)


def _weights_differ(found: Mapping[str, Tensor], reference: nn.Module) -> str | None:
    return next((f"{key} at the end" for key, each in reference.state_dict().items() if not _same(found[key], each)), None)
