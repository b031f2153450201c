"""A mixture of experts for these pages: each token goes to one expert, which has places for a fixed number of tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, LENGTH, EXPERTS, PLACES = 32, 16, 4, 8


class Experts(nn.Module):
    """Routing by products with ones and zeros, as in GShard (Lepikhin et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / (4 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).softmax(dim=-1).max(dim=-1)
        expert = nn.functional.one_hot(chosen, EXPERTS)
        place = ((expert.cumsum(dim=1) * expert).sum(dim=-1) - 1).clamp(max=PLACES)
        slot = nn.functional.one_hot(place, PLACES + 1)[..., :PLACES]
        goes = (expert.unsqueeze(-1) * slot.unsqueeze(-2)).to(x.dtype)  # row, token, expert, place
        held = torch.einsum("bsep,bsd->bepd", goes, x)
        inside = nn.functional.silu(torch.einsum("bepd,edf->bepf", held, self.up))
        given = torch.einsum("bsep,bepd->bsd", goes, torch.einsum("bepf,efd->bepd", inside, self.down))
        y: Tensor = x + given * scores.unsqueeze(-1)
        return y


def factory() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model and a batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(WIDTH), Experts(), nn.Linear(WIDTH, 8)), (torch.randn(8, LENGTH, WIDTH),)
