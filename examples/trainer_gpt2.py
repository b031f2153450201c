"""transformers' Trainer with a partitioned GPT-2: only the line with ``partition``, and one import, are new.

    python examples/trainer_gpt2.py                                             # both ranks here
    torchrun --standalone --nproc-per-node 2 examples/trainer_gpt2.py           # a process a rank

    Trainer ──> pm(input_ids, labels, num_items_in_batch) ── backward ── clip ── step ──> checkpoints

Both ways print the same losses: gradients are accumulated over two batches, and checkpoints have the weights and optimizer of all ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from partitioner import partition
from partitioner.integrations.transformers import Trainer


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", default="tensor", help="pipeline, fsdp, tensor, data, ...")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "trainer-gpt2"))
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    rows = torch.randint(64, (64, 1)) + torch.arange(16)
    data = [{"input_ids": row % 64, "labels": row % 64} for row in rows]

    model = partition(GPT2LMHeadModel(config), 2, options.mode, progress=False)
    arguments = TrainingArguments(
        output_dir=options.folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        save_steps=max(options.steps // 2, 1),
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print("  step       loss")
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"{entry['step']:6d}{entry['loss']:11.6f}")
        print(f"loss of the evaluation rows {metrics['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
