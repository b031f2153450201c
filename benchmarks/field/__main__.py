"""Print the tables of the field: what our plans and programs need, beside the formulas of what people train with.

python -m benchmarks.field                        # all parts
python -m benchmarks.field --parts tensor
python -m benchmarks.field --models Llama Qwen2   # parts of names

tensor      bytes of tensor parallelism, parameters of a rank (``benchmarks.field.tensor``)
data        bytes, messages and sums of data parallelism beside DistributedDataParallel and FSDP2 (``benchmarks.field.data``)
memory      measured memory and time of recomputation (``benchmarks.field.memory``)
published   plans of Llama 3.1 405B on 8,192 and 16,384 devices beside the published figures (``benchmarks.field.published``)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from benchmarks.field import data, memory, published, tensor

PARTS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "tensor": tensor.main,
    "data": data.main,
    "memory": memory.main,
    "published": published.main,
}
"""Name of a part -> the function that prints its tables, for models whose names contain one of the given words (none: all)."""


def main() -> None:
    """Print the parts that were asked for."""
    parser = argparse.ArgumentParser(description="Tables of the field.")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--models", nargs="*", default=[], help="parts of their names; all where nothing is said")
    arguments = parser.parse_args()
    for name in arguments.parts:
        PARTS[name](arguments.models)


if __name__ == "__main__":
    main()
