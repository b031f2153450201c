"""A table of what PyTorch offers around optimizers: on a partitioned model it gives the numbers of the model, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from torch.optim import lr_scheduler

from tests.support.optimizers import tool_cases as cases
from tests.support.processes.optimizer_cases import Mode, made
from tests.support.processes.processes import Workers

CLOSE = 1e-9
IN_PARTS = {
    "SAM": "SAM may read several elements or parameters at once, and this process has a part of the model",
    "LBFGS": "LBFGS reads all parameters at once, and this process has a part of the model",
}
"""Tool -> the refusal in a process that has a part of the model; all others are equal there."""
SOME = [
    "AdamW, fused",
    "SGD, foreach",
    "OneCycleLR",
    "ReduceLROnPlateau",
    "average: EMA",
    "SAM, declared",
    "SAM, declared, with the norm of pm.clip_grad_norm_",
    *IN_PARTS,
]


def check(found: Mapping[str, cases.Outcome], refusals: Mapping[str, str]) -> None:
    """Compare a table with what is expected."""
    for name, outcome in found.items():
        if name in refusals:
            assert isinstance(outcome, str), (name, outcome)
            assert refusals[name] in outcome
        else:
            assert isinstance(outcome, float), (name, outcome)
            assert outcome < CLOSE, (name, outcome)


def test_the_table_has_every_scheduler() -> None:
    assert cases.SCHEDULERS.keys() - {"SWALR"} == set(lr_scheduler.__all__) - {"LRScheduler"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fsdp", "tensor", "data", "pipeline"])
def test_all_ranks_in_one_process(mode: Mode) -> None:
    """Nothing is refused: parameters are those of the model."""
    found = cases.outcomes(made(mode, 2))
    assert len(found) == len(list(cases.rows()))
    check(found, {})


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("mode", "names"), [("fsdp", SOME), *((mode, None) for mode in ("fsdp", "tensor", "data", "pipeline"))])
def test_in_processes(mode: Mode, names: list[str] | None, workers: Callable[[int], Workers]) -> None:
    for found in workers(2).values(cases.outcomes_in_processes, mode, names, timeout=170):
        check(found, {} if mode == "data" else IN_PARTS)
