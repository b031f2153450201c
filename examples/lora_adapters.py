"""Fine-tune a model of transformers with the LoRA adapters of peft, partitioned, beside the same model in one piece.

    python examples/lora_adapters.py                          # two ranks in this process, heads and columns of the weights cut
    python examples/lora_adapters.py --mode pipeline
    torchrun --standalone --nproc-per-node 2 examples/lora_adapters.py --mode fsdp

The base weights are frozen: they get no gradients, no optimizer state and no gradient communication. The adapter is saved as peft saves it,
and loaded into a plain model of peft, which then gives the same loss.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from partitioner import partition

WORDS, LENGTH, ROWS = 64, 16, 8


def base_model() -> Any:
    """Return a small GPT-2, built from its configuration: no weights are downloaded. Always the same."""
    torch.manual_seed(0)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_head=4, n_layer=2, **no_dropout))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="tensor")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args(argv)

    ranks, speaks = int(os.environ.get("WORLD_SIZE", "2")), os.environ.get("RANK", "0") == "0"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type=TaskType.CAUSAL_LM)
    model: Any = get_peft_model(base_model(), config)
    single = copy.deepcopy(model)
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}

    pm = partition(model, devices=ranks, mode=options.mode, example_kwargs=batch)
    trained = [name for name, parameter in pm.named_parameters() if parameter.requires_grad]
    optimizer, single_optimizer = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (pm, single))
    if speaks:
        print(pm, f"\n{len(trained)} tensors of adapters are trained\n\n  step          loss     in one piece", sep="\n")
    for step in range(1, options.steps + 1):
        loss = pm.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()

        expected = single(**batch).loss
        expected.backward()
        single_optimizer.step()
        single_optimizer.zero_grad()
        if speaks:
            print(f"{step:6d}{loss.item():14.6f}{expected.item():17.6f}", flush=True)

    weights = pm.full_state_dict()  # a collective: every rank takes part
    difference = max(float((weights[name] - each).abs().max()) for name, each in single.state_dict().items())
    if speaks:
        print(f"\nlargest difference {difference:.1e}")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=weights)
            loaded: Any = PeftModel.from_pretrained(base_model(), folder)
            with torch.no_grad():
                print(
                    f"loss with the saved adapter, in one piece {loaded(**batch).loss.item():.6f}, before {single(**batch).loss.item():.6f}"
                )


if __name__ == "__main__":
    main()
