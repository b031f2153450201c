"""How fast the formulas of a step are: a million machines and batches at once, beside one by one.

python -m benchmarks.formulas
"""

from __future__ import annotations

import time

import numpy as np
import sympy
import torch

from benchmarks.transformer import VOCABULARY, gpt
from partitioner import partition


def main() -> None:
    """Print seconds for a grid, and for single points of it."""
    tokens = torch.randint(0, VOCABULARY, (16, 32))
    mesh = {"data": 2, "tensor": 2}
    pm = partition(gpt(4, 256).train(), ["cpu"] * 4, mesh, example_inputs=(tokens,), cluster="a100-80gb:1x4", progress=False)
    formula = pm.cost_formula()
    grid = {
        "batch": np.linspace(16, 16384, 50)[:, None, None, None],
        "microbatches": np.arange(1.0, 21.0)[:, None, None],
        "replicas": np.arange(1.0, 51.0)[:, None],
        "bandwidth_data": np.logspace(9, 12, 20),
    }
    formula.evaluate()  # compiles
    start = time.perf_counter()
    seconds, _ = formula.evaluate(**grid)
    print(f"{seconds.size:,} points: {time.perf_counter() - start:.3f} s")
    values = {sympy.Symbol(name, positive=True): value for name, value in formula.defaults.items()}
    start = time.perf_counter()
    for _ in range(20):
        formula.step_time.subs(values)
    print(f"one point by substitution: {(time.perf_counter() - start) / 20 * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
