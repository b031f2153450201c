"""A small model with adapters of peft, its training beside the same model in one piece, and what worker processes do with both."""

# A module, and peft, return Any.
# mypy: no-warn-return-any

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from partitioner import PartitionedModel, partition

ROWS, LENGTH, WORDS, WIDTH = 4, 3, 16, 8


class Block(nn.Module):
    """A gated layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.up(self.norm(x)).tanh())
        return x + hidden * self.gate(x).sigmoid()


class Net(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def lora(*targets: str, **options: Any) -> LoraConfig:
    """Return adapters of rank 2 with values of their own: those of peft begin at zero."""
    return LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, **options)


KINDS: Mapping[str, Callable[[], Any]] = {
    "lora": lambda: lora("gate", "down", modules_to_save=["head"]),
    "dropout": lambda: lora("gate", "up", lora_dropout=0.3),
    "dora": lambda: lora("up", "down", use_dora=True),
    "ia3": lambda: IA3Config(target_modules=["gate", "down"], feedforward_modules=["down"], init_ia3_weights=False),
    "embedding": lambda: lora("embed", "gate"),
}


def adapted(kind: str) -> Any:
    """Return the model with adapters, in training mode and float64."""
    torch.manual_seed(0)
    return get_peft_model(Net(), KINDS[kind]()).double().train()


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(WORDS, (ROWS, LENGTH), generator=generator), torch.randn(ROWS, LENGTH, 4, generator=generator).double()


def train(module: nn.Module, steps: int = 3) -> tuple[list[float], torch.optim.Optimizer]:
    """Train the parameters that are not frozen; return the losses, and the optimizer."""
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=0.05)
    (tokens, target), losses = batch(), []
    for step in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(step)
        if isinstance(module, PartitionedModel):
            loss = module.train_step(tokens, target=target, loss_fn=nn.functional.mse_loss)
        else:
            loss = nn.functional.mse_loss(module(tokens), target)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two state dicts with the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def process_differences(kind: str, modes: tuple[Any, ...]) -> str:
    """Train under torchrun, save the adapter, and load it into the plain model; an empty text: all is equal."""
    found = ""
    for mode in modes:
        model = adapted(kind)
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        reference = copy.deepcopy(model)
        pm = partition(model, 2, mode, example_inputs=batch()[:1], progress=False)
        losses, optimizer = train(pm)
        expected, _ = train(reference)
        state = pm.full_state_dict()
        if distance(state, reference.state_dict()) > 1e-12 or any(abs(a - b) > 1e-12 for a, b in zip(losses, expected, strict=True)):
            found += f"{mode}: other numbers; "
        if {name for name, each in pm.named_parameters() if each in optimizer.state} - trained:
            found += f"{mode}: state of frozen parameters; "
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=state)
            torch.manual_seed(0)
            loaded = PeftModel.from_pretrained(Net().double(), folder).eval()
            if not torch.allclose(loaded(batch()[0]), reference.eval()(batch()[0]), rtol=0, atol=1e-12):
                found += f"{mode}: the saved adapter differs; "
    return found
