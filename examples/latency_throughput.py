"""Latency against throughput: what more devices, and more requests in flight, do to a token; simulated, and measured beside it.

    python examples/latency_throughput.py                                     # 1, 2 and 4 of this machine's cores, one of them measured
    python examples/latency_throughput.py --cluster h100:1x8 --devices 1 2 4 8
    torchrun --standalone --nproc-per-node 2 examples/latency_throughput.py   # two processes, simulated and measured

"tensor" cuts the products of every layer, so a token comes sooner; a "pipeline" has whole layers on each device, of which one computes at a
time, until several requests are in flight: then each device computes a token of another, and a token takes no longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers

from partitioner import Cluster, Constraints, PartitionedModel, partition

WORDS, PROMPT, NEW, ROUNDS = 1024, 16, 16, 3
GREEDY = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
HEAD = ("devices", "mode", "requests", "simulated", "", "measured", "")


def llama(layers: int, width: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "num_attention_heads": 8}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes)).eval()


def placements(model: transformers.LlamaForCausalLM, devices: int, cluster: Cluster | str) -> Iterator[tuple[str, PartitionedModel, int]]:
    """Yield name, model and number of requests in flight of each way to use so many devices."""
    example, layers = torch.zeros(4, PROMPT, dtype=torch.long), len(model.model.layers)
    starts = {f"model.layers.{layers * stage // devices}": "beginning" for stage in range(1, devices)}
    for mode in ("model",) if devices == 1 else ("tensor", "pipeline"):
        options: dict[str, Any] = {"schedule": "1F1B", "constraints": Constraints(split_spec=starts)} if mode == "pipeline" else {}
        pm = partition(model, ["cpu"] * devices, mode, example_inputs=(example,), cluster=cluster, progress=False, **options)
        for requests in (1, devices) if mode == "pipeline" else (1,):
            yield mode, pm, requests


def measured(pm: PartitionedModel, model: transformers.LlamaForCausalLM, prompts: Sequence[torch.Tensor]) -> float:
    """Return the seconds that requests in flight take; their tokens must be those of the model."""
    for prompt, tokens in zip(prompts, pm.generate(prompts, **GREEDY), strict=True):
        assert torch.equal(tokens, model.generate(prompt, **GREEDY)), "other tokens than those of the model"
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        pm.generate(prompts, **GREEDY)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cells(latency: float, tokens: int) -> tuple[str, str]:
    return f"{latency / NEW * 1e3:.2f} ms/token", f"{tokens / latency:,.0f} tokens/s"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cluster", help="hardware that is simulated, and not measured (default: this machine)")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    for name, default in (("rows", 4), ("layers", 8), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # a device is a core
    here = int(os.environ.get("WORLD_SIZE", "1"))
    model = llama(options.layers, options.width)
    rows = [HEAD]
    for devices in [here] if here > 1 else options.devices:
        for mode, pm, requests in placements(model, devices, options.cluster or Cluster.detect(devices)):
            (simulated,) = pm.simulate_inference((options.rows,), PROMPT, NEW, requests=requests).batches
            tokens = requests * options.rows * NEW
            found = ("", "")
            if devices == here and options.cluster is None:
                prompts = list(torch.randint(1, WORDS, (requests, options.rows, PROMPT), generator=torch.Generator().manual_seed(1)))
                found = cells(measured(pm, model, prompts), tokens)
            rows.append((str(devices), mode, str(requests), *cells(simulated.latency, tokens), *found))
    if os.environ.get("RANK", "0") == "0":
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(f"Llama, {options.layers} layers of width {options.width}; a request is {options.rows} prompts of {PROMPT} tokens\n")
        print("\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows))


if __name__ == "__main__":
    main()
