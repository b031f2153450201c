"""The command line.

    partitioner plan     net.py:factory --devices 4 --cluster h100:1x4 --json plan.json
    partitioner inspect  net.py:factory --devices 2 --rank 1
    partitioner simulate net.py:factory --devices 4 --cluster h100:1x4 --timeline step.svg
    partitioner check    net.py:factory --devices 4 --mode data=2,tensor=2
    partitioner sweep    sweep.toml --store runs.db
    partitioner report   runs.db --html out.html

``factory()`` returns ``(model, args)`` or ``(model, args, kwargs)``. Exit codes: 0 it worked; 1 a check did not find everything equal, or
no placement of a sweep could be planned; 2 the request was wrong or cannot be met; 3 a defect of this program; 130 it was interrupted.
"""

from __future__ import annotations

from partitioner.cli.run import main

__all__ = ["main"]
