"""Models that write in place, as a stranger would write them, and a comparison of their training with the original's."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner import PartitionError, partition
from partitioner.model.partitioned_model import PartitionedModel

Change = Callable[[Any, Tensor], Tensor]
"""Operations of a model on its activations, of shape (rows, 16), or (rows, 4, 8, 8) for images; it may write its buffers."""


class Layers(nn.Module):
    """Layers before a change and after it."""

    def __init__(self, change: Change, buffers: Mapping[str, Tensor] | None = None, *, of_images: bool = False) -> None:
        super().__init__()
        first, last = (nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)) if of_images else (nn.Linear(8, 16), nn.Linear(16, 8))
        self.first, self.middle, self.last = first, nn.Identity() if of_images else nn.Linear(16, 16), last
        self.change = change
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.change(self, self.first(x).relu())
        return self.last(self.middle(y).tanh())


def example(model: nn.Module, rows: int = 8) -> Tensor:
    """Return rows of an input that the model takes."""
    of_images = any(isinstance(module, nn.Conv2d) for module in model.modules())
    return torch.randn(rows, 2, 8, 8, dtype=torch.float64) if of_images else torch.randn(rows, 8, dtype=torch.float64)


def assert_trains_as_original(
    model: nn.Module, devices: int, mode: Any, *, tolerance: float = 1e-10, rows: int = 8, **options: Any
) -> PartitionedModel:
    """Compare two training steps and a call: losses, results, every gradient, every buffer."""
    torch.manual_seed(1)
    model = model.double()
    original = copy.deepcopy(model)
    pm = partition(model, devices, mode, example_inputs=(example(model, rows),), **options)
    for _ in range(2):
        x = example(model, rows)
        original.zero_grad()
        pm.zero_grad()
        result = original(x.clone())
        target = torch.randn_like(result)
        loss = nn.functional.mse_loss(result, target)
        loss.backward()
        found = pm.train_step(x.clone(), target=target, loss_fn=nn.functional.mse_loss)
        torch.testing.assert_close(found, loss.detach(), rtol=tolerance, atol=tolerance)
        _assert_equal_state(pm, original, tolerance)
    x = example(model, rows)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    original.zero_grad()
    pm.zero_grad()
    results = pm(mine * 1), original(theirs * 1)
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    _assert_equal_state(pm, original, tolerance)
    return pm


def _assert_equal_state(pm: PartitionedModel, original: nn.Module, tolerance: float) -> None:
    def compare(name: str, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")

    gradients, state = pm.full_gradients(), pm.full_state_dict()
    for name, parameter in original.named_parameters():
        found = gradients[name]
        assert (found is None) == (parameter.grad is None), name
        if found is not None and parameter.grad is not None:
            compare(name, found, parameter.grad)
    for name, buffer in original.named_buffers():
        compare(name, state[name], buffer)


def refusal(model: nn.Module, devices: int, mode: Any, **options: Any) -> PartitionError | None:
    """Return the error by which a partition is refused; None when the partitioned model trains as the original."""
    try:
        assert_trains_as_original(model, devices, mode, **options)
    except PartitionError as error:
        return error
    return None


# -- activations -----------------------------------------------------------------------------------------------------------------------


def _two_names(_: nn.Module, y: Tensor) -> Tensor:
    z = y * 1
    left, blocks = z[:, :8], z.view(-1, 4, 4)
    left.mul_(3)
    blocks[:, 1].add_(1)
    return z * blocks.reshape(-1, 16)


def _lerp(_: Any, y: Tensor) -> Tensor:
    """Broadcast an operand without rows to sizes that are not given."""
    z = y.clone()
    z[:, 8:].lerp_(torch.ones((), dtype=y.dtype), 0.3).addcmul_(torch.ones((), dtype=y.dtype), y.new_full((), 0.5))
    return z


def _narrow(_: nn.Module, y: Tensor) -> Tensor:
    z = y.clone()
    z.narrow(1, 1, 1).mul_(2.0)
    return z


def _chunk(_: nn.Module, y: Tensor) -> Tensor:
    z = y * 1
    left, _right = z.chunk(2, 1)
    with torch.no_grad():
        left.mul_(2.0)
    return z.sin()


def _rows(_: nn.Module, y: Tensor) -> Tensor:
    z = torch.zeros_like(y).view(-1, 4, 4)
    for index in range(4):
        z[:, index] = y[:, 4 * index : 4 * index + 4] * (index + 1)
    return z.flatten(1)


def _diagonal(_: nn.Module, y: Tensor) -> Tensor:
    z = y.view(-1, 4, 4) * 1
    z.diagonal(0, 1, 2).mul_(2)
    return z.flatten(1)


def _transposed(_: nn.Module, y: Tensor) -> Tensor:
    z = y * 1
    z.t().narrow(0, 2, 3).add_(1)
    z.mT[0].mul_(0.5)
    z.swapaxes(0, 1)[1].add_(0.5)
    return z


def _unfold(_: nn.Module, y: Tensor) -> Tensor:
    z = y * 1
    z.unfold(1, 4, 4)[:, 1].mul_(3)
    return z


def _strided(_: nn.Module, y: Tensor) -> Tensor:
    table = torch.zeros(4, 4, dtype=y.dtype)
    table.as_strided((4,), (5,)).fill_(2.0)
    return y + table.sum(0).repeat(4)


def _shapes(_: nn.Module, y: Tensor) -> Tensor:
    z = y.view(-1, 4, 4) * 1
    z.flatten(1)[:, 3].neg_()
    z.unflatten(1, (2, 2))[:, 0, 1].add_(1)
    z.movedim(1, 2)[:, 0].mul_(2)
    z.unsqueeze(1).squeeze(1)[:, 2].add_(0.25)
    return z.reshape(-1, 16)


def _dropped(self: nn.Module, y: Tensor) -> Tensor:
    """Dropout that drops nothing returns its argument."""
    z = y * 1
    F.dropout(z, 0.0, self.training).clamp_(-0.2, 0.2)
    F.dropout(z.unflatten(1, (4, -1)), 0.5, training=False)[:, 1].mul_(2.0)
    return z.sin()


def _no_grad(_: nn.Module, y: Tensor) -> Tensor:
    z = y * 1
    with torch.no_grad():
        z.clamp_(-0.2, 0.2)
    return z.sin()


def _detached_later(_: nn.Module, y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, :4] = y[:, :4]
    return y * z.detach() + z


def _written_detached(_: nn.Module, y: Tensor) -> Tensor:
    z = y * 1
    z.detach().mul_(2.0)
    return z.sin()


def _masked(_: nn.Module, y: Tensor) -> Tensor:
    z = y.clone()
    z[z > 0.5] = 0.0
    z[:, ::2] *= 2
    return z


def _overwritten(_: nn.Module, y: Tensor) -> Tensor:
    """Give earlier parameters gradients of zeros, and not None."""
    z = y * 1
    z[:] = torch.linspace(-1, 1, 16, dtype=y.dtype)
    return z


def _recurrence(_: nn.Module, y: Tensor) -> Tensor:
    out, h = torch.empty_like(y), y[:, :4]
    for index in range(4):
        h = (h + y[:, 4 * index : 4 * index + 4]).tanh()
        out[:, 4 * index : 4 * index + 4] = h
    return out


def _index_add(_: nn.Module, y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z.index_add_(1, torch.arange(16).flip(0), y)
    z.t_()
    return z.t()


def _complex(_: nn.Module, y: Tensor) -> Tensor:
    z = torch.view_as_complex(y.view(-1, 8, 2) * 1)
    z.real.mul_(2)
    z.imag.add_(1)
    return torch.view_as_real(z).flatten(1)


def _stale_view(_: nn.Module, y: Tensor) -> Tensor:
    z = y * 1
    before = z[:, 4:8]
    z.mul_(3)
    z[:, 5] = 0.5
    return z + before.repeat(1, 4)


def _split(_: nn.Module, y: Tensor) -> Tensor:
    z = (y * 1).detach()
    a, b, c = z.split([4, 4, 8], 1)
    b.copy_(a * 2)
    c.zero_()
    return y + z + b.repeat(1, 4)


def _out(_: nn.Module, y: Tensor) -> Tensor:
    z = torch.zeros(16, dtype=y.dtype)
    torch.add(z, 1, out=z)
    torch.mul(torch.arange(4, dtype=y.dtype), 2, out=z[4:8])
    return y * z


VIEWS: Mapping[str, Change] = {
    "chunk": _chunk,
    "complex": _complex,
    "detached_later": _detached_later,
    "diagonal": _diagonal,
    "dropped": _dropped,
    "index_add": _index_add,
    "lerp": _lerp,
    "masked": _masked,
    "narrow": _narrow,
    "no_grad": _no_grad,
    "out": _out,
    "overwritten": _overwritten,
    "recurrence": _recurrence,
    "rows": _rows,
    "shapes": _shapes,
    "split": _split,
    "stale_view": _stale_view,
    "strided": _strided,
    "transposed": _transposed,
    "two_names": _two_names,
    "unfold": _unfold,
    "written_detached": _written_detached,
}


def _border(_: nn.Module, y: Tensor) -> Tensor:
    z = y.clone()
    z.narrow(3, 0, 2).add_(1.0)
    return z


def _quadrants(_: nn.Module, y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    z[..., ::2, :] = y[..., 1::2, :]
    z[..., 1::2, :] = y[..., ::2, :] * 2
    return z


def _dropped_channels(self: nn.Module, y: Tensor) -> Tensor:
    z = y.clone()
    F.dropout2d(z, 0.0, self.training).clamp_(0.1, 0.4)
    F.dropout(z, 0.5, training=False)[:, 1:3].mul_(2.0)
    return z.sin()


IMAGES: Mapping[str, Change] = {"border": _border, "dropped_channels": _dropped_channels, "quadrants": _quadrants}


# -- buffers ---------------------------------------------------------------------------------------------------------------------------


def _count(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y * self.count


def _cache(self: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        self.n[: y.shape[0]] = y
    return y


def _average(self: Any, y: Tensor) -> Tensor:
    self.n.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return y


def _dropped_buffer(self: Any, y: Tensor) -> Tensor:
    F.dropout(self.n, 0.5, training=False).mul_(0.9).add_(1.0)
    return y * self.n


def _assigned(self: Any, y: Tensor) -> Tensor:
    self.n = 0.9 * self.n + 0.1 * y.detach().mean(0)
    return y


def _average_read(self: Any, y: Tensor) -> Tensor:
    self.n.mul_(0.9).add_(0.1 * y.detach().mean(0))
    return y - self.n


def _sum(self: Any, y: Tensor) -> Tensor:
    self.n.add_(y.detach().sum(0))
    return y


def _maximum(self: Any, y: Tensor) -> Tensor:
    self.n.copy_(torch.maximum(self.n, y.detach().amax(0)))
    return y


def _ring(self: Any, y: Tensor) -> Tensor:
    self.n.copy_(torch.roll(self.n, 1, 0))
    self.n[0] = y.detach().mean(0)
    return y


def _buffer_view(self: Any, y: Tensor) -> Tensor:
    table = self.n.view(4, 4)
    self.n[3:5] += 1
    return y + table.reshape(-1) + self.n


def _queue(self: Any, y: Tensor) -> Tensor:
    self.n.index_copy_(0, self.place.view(1), y.detach().mean(0, keepdim=True))
    self.place.add_(1).remainder_(2)
    return y + self.n.mean(0)


_ROW, _ROWS, _NUMBER = torch.zeros(16), torch.zeros(2, 16), torch.zeros((), dtype=torch.long)

BUFFERS: Mapping[str, tuple[Change, Mapping[str, Tensor]]] = {
    "assigned": (_assigned, {"n": _ROW}),
    "average": (_average, {"n": _ROW}),
    "average_read": (_average_read, {"n": _ROW}),
    "buffer_view": (_buffer_view, {"n": torch.arange(16.0)}),
    "cache": (_cache, {"n": torch.zeros(12, 16)}),
    "count": (_count, {"count": torch.ones(())}),
    "dropped_buffer": (_dropped_buffer, {"n": _ROW}),
    "maximum": (_maximum, {"n": _ROW}),
    "queue": (_queue, {"n": _ROWS, "place": _NUMBER}),
    "ring": (_ring, {"n": _ROWS}),
    "sum": (_sum, {"n": _ROW}),
}
"""Change, and the buffers that it writes."""
