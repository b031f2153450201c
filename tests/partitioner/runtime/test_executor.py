"""Programs as Python functions: the names of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from partitioner import partition


class Named(nn.Module):
    """Inputs with the names that the functions of programs and stages give their own arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, transport: Tensor, arguments: Tensor, bound: Tensor, recorder: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(transport + arguments) + bound) * recorder
        return result


def test_inputs_may_have_any_name() -> None:
    torch.manual_seed(0)
    model, inputs = Named(), tuple(torch.randn(4, 4) for _ in range(4))
    pm = partition(model, 2, "pipeline", n_microbatches=2, example_inputs=inputs, progress=False)
    torch.testing.assert_close(pm(*inputs), model(*inputs))
    loss = pm.train_step(*inputs, target=inputs[0], loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss, nn.functional.mse_loss(model(*inputs), inputs[0]))
