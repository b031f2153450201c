"""Models that repeat a module, and how many of its copies are written instead of traced."""

# A module returns Any when it is called.
# mypy: no-warn-return-any

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models.attention.gpt import Gpt

WIDTH, LENGTH = 8, 5


class Block(nn.Module):
    """Something to repeat."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, block: Callable[[int], nn.Module], depth: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(index) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Masked(nn.Module):
    """Takes a mask, and gives its result and the mask in a tuple; sizes follow from the batch."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = x.shape
        rows = self.inner(x.reshape(batch * length, width))
        scores = (rows @ rows.transpose(0, 1)).view(batch, length, batch, length)
        return rows.view(batch, length, width) * mask + scores.sum((2, 3)).unsqueeze(-1), mask


class MaskedStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, mask = self.first(x), x.new_ones(x.shape[1], 1)
        for block in self.blocks:
            x, mask = block(x, mask=mask)
        return x


class Scaled(Block):
    """The index decides a number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class Alternating(Block):
    """The index decides what is computed, for every second block."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.is_local = index % 2 == 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(1) if self.is_local else x)


class Threshold(Block):
    """The index decides something about batches that are not traced."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.most = 1000 + index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] < self.most else x


class Indexed(Block):
    """The index says where a cache is written, if there is one."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.name = index, f"blocks.{index}"

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        if cache is not None:
            cache[self.index] = x
        return super().forward(x)


class Asked(Indexed):
    """Asks whether there is an index, and takes no other."""

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        return super().forward(x, cache) * getattr(self, "index", 7)


class LargeBatches(Indexed):
    """The index decides something about a batch that is traced, and not about that of the example."""

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        return super().forward(x, cache) / (self.index + 1 if x.shape[0] > LENGTH else 1)


class NamesOfBlocks(Stack):
    """The model reads what its blocks do not."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (2 if block.name == "blocks.3" else 1)
        return x


class Mapped(Stack):
    """A mask is made by functions of single elements, before or between blocks."""

    def __init__(self, behind: int) -> None:
        super().__init__(Indexed)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        rows, places = (torch.arange(size, device=x.device) for size in x.shape[:2])
        mask = x.new_ones(())
        for block in self.blocks:
            if block is self.blocks[self.behind]:
                pairs = torch.vmap(torch.vmap(lambda row, place: row >= place, (None, 0)), (0, None))
                mask = pairs(rows, places).unsqueeze(-1)
            x = block(x * mask)
        return x


class Counting(Block):
    """A number that no block has decides: each third is another."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        number = Counting.calls
        Counting.calls += 1
        return super().forward(x) * (2.0 if number % 3 == 2 else 1.0)


class CountingStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        Counting.calls = 0
        return super().forward(x)


class Balanced(Block):
    """Leaves something for the model to find."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.penalty = result.square().mean()
        return result


class BalancedStack(Stack):
    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        penalties: list[Any] = [block.penalty for block in self.blocks]
        return x, sum(penalties)


FOUND: list[Tensor] = []


class Telling(Block):
    """Puts something where the model finds it."""

    def forward(self, x: Tensor) -> Tensor:
        FOUND.append(x.mean())
        return super().forward(x)


class TellingStack(Stack):
    def forward(self, x: Tensor) -> Any:
        FOUND.clear()
        x = super().forward(x)
        total = torch.stack(FOUND).sum()
        FOUND.clear()
        return x, total


class CallsTold(Block):
    """Counts for the model."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CallsTold.calls += 1
        return super().forward(x)


class CallsToldStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        CallsTold.calls = 0
        return super().forward(x) * CallsTold.calls


class InPlace(Block):
    """Writes in what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(super().forward(x))


class InPlaceInside(Block):
    """Writes in what it has computed, and in views of that."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden[:, 0].mul_(2)
        hidden += x.mean()
        hidden.view(-1).clamp_(min=0)
        return x + self.down(self.dropout(hidden))


class Halved:
    """Computes something, and holds nothing."""

    def __call__(self, x: Tensor) -> Tensor:
        return x / 2


class Divided(Halved):
    """Holds what it computes with."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, x: Tensor) -> Tensor:
        return x / (self.index + 1)


class Processed(Block):
    """An object of its own computes a part."""

    def __init__(self, process: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.process = process

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.process(x))


class Called(Stack):
    """Blocks are called from several lines and modules."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.more = Stack(Block, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.more(super().forward(x))
        return self.blocks[1](self.more(x)) if x.ndim == 1 else x


class Tied(Stack):
    """Two blocks have one weight."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.blocks[3].up.weight = self.blocks[1].up.weight  # type: ignore[union-attr]


class Twice(Stack):
    """A block is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](super().forward(x))


class Between(Stack):
    """The model looks into its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + block.up.bias[:WIDTH]  # type: ignore[union-attr,index]
        return x


class Constant(Block):
    """A tensor of the code."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(2.0)


class Quiet(Block):
    """A part without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax()
        return super().forward(x) / scale


MODELS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    # name: (model, blocks that are written as others are)
    "plain": (lambda: Stack(Block), 4),
    "gpt": (lambda: Gpt(depth=5), 4),
    "sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4))), 3),
    "masked": (lambda: MaskedStack(Masked), 4),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 4), 2),
    "in_place_inside": (lambda: Stack(InPlaceInside), 4),
    "stateless": (lambda: Stack(lambda _: Processed(Halved())), 4),
    "stateful": (lambda: Stack(lambda index: Processed(Divided(index))), 0),
    "called": (Called, 6),
    "alternating": (lambda: Stack(Alternating, 7), 5),
    "between": (lambda: Between(Block), 3),
    "tied": (Tied, 2),
    "twice": (lambda: Twice(Block), 3),
    "scaled": (lambda: Stack(Scaled), 0),
    "beside_scaled": (lambda: nn.Sequential(Stack(Scaled), Stack(Block)), 4),  # what tells the former apart is read, the others are copies
    "threshold": (lambda: Stack(Threshold), 0),
    "indexed": (lambda: Stack(Indexed), 4),
    "asked": (lambda: Stack(Asked), 0),
    "large_batches": (lambda: Stack(LargeBatches), 4),
    "names_of_blocks": (lambda: NamesOfBlocks(Indexed), 0),
    "mapped": (lambda: Mapped(behind=0), 3),  # after the product with the mask, the first block has other strides
    "mapped_between": (lambda: Mapped(behind=2), 0),
    "counting": (lambda: CountingStack(Counting, 9), 0),
    "balanced": (lambda: BalancedStack(Balanced), 0),
    "telling": (lambda: TellingStack(Telling), 0),
    "calls_told": (lambda: CallsToldStack(CallsTold), 0),
}


def example_of(name: str) -> tuple[Any, ...]:
    if name == "gpt":
        return (torch.zeros(4, 6, dtype=torch.int64),)
    return (torch.zeros(4, 4 if name == "large_batches" else LENGTH, WIDTH),)  # where a length is the batch, another batch is traced
