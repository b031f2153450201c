"""Load a Llama of 1.2 billion parameters from safetensors files, with one rank a process: memory of each rank, and tokens.

    python -m benchmarks.load_safetensors                            # tensor, pipeline and fsdp, on 4 processes
    python -m benchmarks.load_safetensors --modes tensor --layers 2

The model is made on the meta device, partitioned, and read from four files with an index; then it generates tokens, which are compared with
those of the model on one device.

part         bytes of a rank's parameters
beside       the most that a rank holds at once beyond that: tensors that are there after partition, and every storage that PyTorch
             allocates in load_safetensors; files that are mapped into memory are not counted
seconds      of partition, and of loading
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.live_storages import LiveStorages, held
from partitioner import partition

MIB = 2**20
PARTS, NEW_TOKENS = 4, 8
PROMPT = torch.arange(100, 116).view(2, 8)


def config(layers: int) -> LlamaConfig:
    """Return that of Llama 3.2 1B, with so many layers."""
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256}
    return LlamaConfig(
        num_hidden_layers=layers, max_position_embeddings=2048, rope_theta=500000.0, tie_word_embeddings=True, dtype="bfloat16", **sizes
    )


def write_files(folder: Path, layers: int) -> list[list[int]]:
    """Save a model with random weights; return the tokens that it generates on one device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config(layers)).eval()
    tensors = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    files = {f"model-{part + 1:05}-of-{PARTS:05}.safetensors": dict(tensors[part::PARTS]) for part in range(PARTS)}
    for file, content in files.items():
        save_file(content, folder / file)
    weight_map = {name: file for file, content in files.items() for name in content}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tokens: list[list[int]] = model.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0).tolist()
    return tokens


def run_rank(folder: Path, mode: str, layers: int) -> None:
    """Load and generate on this rank; print one line of JSON."""
    torch.set_default_dtype(torch.bfloat16)
    start = time.perf_counter()
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers)).eval()
    pm = partition(model, int(os.environ["WORLD_SIZE"]), mode, example_inputs=(PROMPT,), progress=False)
    planned, before = time.perf_counter(), held()
    with LiveStorages() as counter:
        pm.load_safetensors(folder)
    loaded, peak = time.perf_counter(), before + counter.peaks[0]
    part = sum(parameter.nbytes for parameter in pm.parameters())
    tokens = pm.generate(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0).tolist()
    seconds = planned - start, loaded - planned
    line = {"rank": pm.traced.runtime.local_ranks[0], "part": part, "peak": peak, "seconds": seconds, "tokens": tokens}
    sys.stdout.write(json.dumps(line) + "\n")  # one write: those of other ranks go to the same pipe


def measure(folder: Path, mode: str, ranks: int, layers: int, tokens: list[list[int]]) -> bool:
    """Run a mode on so many processes, and print a line for each; return whether tokens are equal and memory is within the bound."""
    module = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "benchmarks.load_safetensors")
    arguments = (sys.executable, *module, "--rank-of", str(folder), "--modes", mode, "--layers", str(layers))
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if len(lines) < ranks:
        raise RuntimeError(ended.stderr)
    for line in sorted(lines, key=lambda line: int(line["rank"])):
        beside, (planning, loading) = line["peak"] - line["part"], line["seconds"]
        same = "equal" if line["tokens"] == tokens else "OTHER"
        print(
            f"{mode:10} rank {line['rank']}  part {line['part'] / MIB:7.1f} MiB  beside {beside / MIB:6.1f} MiB  "
            f"partition {planning:5.1f} s  load {loading:5.1f} s  tokens {same}",
            flush=True,
        )
    return all(line["tokens"] == tokens and line["peak"] - line["part"] <= 64 * MIB for line in lines)


def main() -> int:
    """Write the files, and measure each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["tensor", "pipeline", "fsdp"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        run_rank(options.rank_of, options.modes[0], options.layers)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_files(Path(folder), options.layers)
        results = [measure(Path(folder), mode, options.ranks, options.layers, tokens) for mode in options.modes]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
