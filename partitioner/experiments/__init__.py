"""Many placements of models on devices: planned, simulated or run, kept, compared.

from partitioner.experiments import sweep

results = sweep(models={"gpt": gpt}, devices=[2, 4, 8], modes=["data", "pipeline"], clusters="h100:1x8", store="runs.db")
results.best(by="step_time")
"""

from __future__ import annotations

from partitioner.experiments.results.report import write_report
from partitioner.experiments.results.results import Results
from partitioner.experiments.run.sweep import sweep

__all__ = ["Results", "sweep", "write_report"]
