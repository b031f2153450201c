"""Our tiles beside a halo exchange written by hand, and beside one process with as many threads; memory of sequential tiles beside others.

    python -m benchmarks.tile            # this process, then two with one thread each, gloo

One table is of one device (``benchmarks.tile_memory``): memory, error and time of a decode in one piece and in two kinds of tiles.
The other is of two: forward and backward of a U-Net on one image, its height cut in two. By hand is what one would write for this network:
before each convolution of 3 x 3, one row to and from the neighbour by ``isend`` and ``irecv``, and one all-reduce for all gradients.
The process with two threads runs while the other waits.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rounds import measure, milliseconds, ratio, run_tables, say, table
from benchmarks.tile_memory import decoders
from partitioner import partition

SIZES = (256, 1024)
WIDTH = 8


class Level(nn.Module):
    """Two convolutions of 3 x 3."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels_in, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Keep height and width."""
        return nn.functional.relu(self.second(nn.functional.relu(self.first(x))))


class UNet(nn.Module):
    """Three levels; down by pooling, up by transposed convolutions that need nothing of a neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((Level(3, WIDTH), Level(WIDTH, 2 * WIDTH)))
        self.bottom = Level(2 * WIDTH, 4 * WIDTH)
        self.grow = nn.ModuleList((nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 2, 2), nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, 2)))
        self.up = nn.ModuleList((Level(4 * WIDTH, 2 * WIDTH), Level(2 * WIDTH, WIDTH)))
        self.head = nn.Conv2d(WIDTH, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to images of the same size."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, up, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            x = up(torch.cat((grow(x), skip), 1))
        result: Tensor = self.head(x)
        return result


# -- the contestants ---------------------------------------------------------------------------------------------------------------


def ours(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Our mode "tile", the height cut."""
    count = dist.get_world_size()
    pm = partition(model, devices=["cpu"] * count, mode={"tile": (count, 1)}, example_inputs=(x,), recompute="none", progress=False)

    def step() -> Tensor:
        pm.zero_grad()
        return pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)

    return step


class _Neighbours(torch.autograd.Function):
    """A row of each neighbour around a rank's own; the gradient goes back to whose the row is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        above, below = _swapped(x[:, :, :1], x[:, :, -1:])
        return torch.cat((above, x, below), 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        above, below = _swapped(gradient[:, :, :1], gradient[:, :, -1:])
        own = gradient[:, :, 1:-1].clone()
        own[:, :, :1] += above
        own[:, :, -1:] += below
        return own


def _swapped(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the rank above and of the rank below; zeros beyond the ends."""
    rank, arrived, works = dist.get_rank(), [torch.zeros_like(first), torch.zeros_like(last)], []
    for place, (other, given) in enumerate(((rank - 1, first), (rank + 1, last))):
        if 0 <= other < dist.get_world_size():
            works += [dist.isend(given.contiguous(), other), dist.irecv(arrived[place], other)]
    for work in works:
        if work is not None:
            work.wait()
    return arrived[0], arrived[1]


class ByHand(nn.Module):
    """A convolution of 3 x 3 on a rank's own rows."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's result for these rows."""
        around: Tensor = _Neighbours.apply(x)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return nn.functional.conv2d(around, self.weight, self.bias, padding=(0, 1))


def by_hand(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Return a step in which every rank has its rows; the result is not gathered, since the loss is a mean."""
    cut = copy.deepcopy(model)
    for module in list(cut.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
                setattr(module, name, ByHand(layer))
    own, wanted = (each.chunk(dist.get_world_size(), 2)[dist.get_rank()].contiguous() for each in (x, target))

    def step() -> Tensor:
        cut.zero_grad()
        loss: Tensor = nn.functional.mse_loss(cut(own), wanted) / dist.get_world_size()
        loss.backward()
        gradients = [parameter.grad for parameter in cut.parameters() if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients] + [loss.detach().view(1)])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients] + [1])[:-1], strict=True):
            gradient.copy_(part.view_as(gradient))
        return flat[-1]

    return step


def one_process(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """Return a step on rank 0 alone, with a thread for each process."""
    whole = copy.deepcopy(model)

    def step() -> Tensor:
        loss = torch.zeros(())
        if dist.get_rank() == 0:
            torch.set_num_threads(dist.get_world_size())
            whole.zero_grad()
            result: Tensor = nn.functional.mse_loss(whole(x), target)
            result.backward()
            loss = result.detach()
            torch.set_num_threads(1)
        dist.broadcast(loss, 0)
        return loss

    return step


# -- the table ---------------------------------------------------------------------------------------------------------------------


def sizes(rounds: int) -> None:
    rows = []
    for size in SIZES:
        torch.manual_seed(0)
        model, x, target = UNet(), torch.randn(1, 3, size, size), torch.randn(1, 2, size, size)
        makers = {"ours": ours, "by hand": by_hand, "one process": one_process}
        steps = {name: make(model, x, target) for name, make in makers.items()}
        expected = nn.functional.mse_loss(model(x), target).detach()
        for step in steps.values():
            torch.testing.assert_close(step(), expected)
        found = measure(steps, rounds, max(1, 512 // size))
        times = [milliseconds(found[name]) for name in steps]
        rows.append((f"{size} x {size}", *times, ratio(found["ours"], found["by hand"]), ratio(found["one process"], found["ours"])))
    head = ("image", "ours ms", "by hand ms", "one process ms", "ours / by hand", "one process / ours")
    table("Tiles over 2: a U-Net of three levels, forward and backward of one image", head, rows)
    say(f"load of the machine in the last minute: {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")


if __name__ == "__main__":
    run_tables("benchmarks.tile", __doc__, {"sizes": sizes}, None, alone={"memory": decoders})
