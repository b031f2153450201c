"""Cut a LLaMA inside its layers over two devices: heads, feed-forward and vocabulary, beside the same LLaMA in one piece.

    python examples/llama_tensor.py
    python examples/llama_tensor.py --devices 4 --data 2          # two replicas, each cut over two devices
    python examples/llama_tensor.py --sequence                    # between the layers' weights the sequence is cut

The explanation lists each axis that is cut, the layout of every weight, and the communication: two sums a layer forward, two backward,
and of the loss, which is computed on parts of the vocabulary, a few numbers a token.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
import transformers

from partitioner import Constraints, partition

WORDS, LENGTH, ROWS = 128, 16, 8


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("devices", 2), ("data", 1), ("steps", 5), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sequence", action="store_true", help="Megatron's sequence parallelism beside the tensor dimension")
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=options.layers, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    whole = transformers.LlamaForCausalLM(config).train()
    batches = torch.randint(WORDS, (options.steps, ROWS, LENGTH))
    mesh = {"data": options.data, "tensor": options.devices // options.data}
    example = {"input_ids": batches[0], "labels": batches[0]}
    constraints = Constraints(axes={"sequence": "tensor"}) if options.sequence else None
    pm = partition(copy.deepcopy(whole), options.devices, mesh, example_kwargs=example, constraints=constraints)
    print(f"{pm}\n\n{pm.explain()}\n")

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (whole, pm)]
    print("  step    one piece    partitioned    difference")
    largest = 0.0
    for step, tokens in enumerate(batches, start=1):
        expected = whole(input_ids=tokens, labels=tokens).loss
        expected.backward()
        loss = pm.train_step(input_ids=tokens, labels=tokens)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        difference = abs(loss.item() - expected.item())
        largest = max(largest, difference)
        print(f"{step:6d}{expected.item():13.6f}{loss.item():15.6f}{difference:14.1e}")
    print(f"\nlargest difference {largest:.1e} after {options.steps} steps")


if __name__ == "__main__":
    main()
