"""Compare the graphs before and after every pass with fixtures, and run them beside the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from passes.normalize.order import NORMALIZE
from passes.pipeline import PHASES
from tests.support.golden_text import Golden
from tests.support.pairs.states import texts_of_pair
from tests.support.pairs.text import read_pair

HERE = Path(__file__).parent
PAIRS = sorted(path.relative_to(HERE).with_suffix("").as_posix() for path in HERE.rglob("*.txt"))


LONG = {
    "autograd/differentiate/collectives",
    "emit/place_on_mesh/data_parallel",
    "emit/programs/one_f_one_b",
    "normalize/inline/both_branches",
    "normalize/inline/steps_of_scan",
    "normalize/randomness/draw_order/recurrent",
    "spmd/halo/emit/exchange",
    "spmd/halo/emit/grid",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in PAIRS])
def test_golden_pair(name: str, golden: Golden) -> None:
    path = HERE / f"{name}.txt"
    pair = read_pair(path.read_text(encoding="utf-8"))
    golden.compare(path, pair.text(*texts_of_pair(pair)))


def test_every_pass_has_a_pair() -> None:
    """Except ``verify``, which changes nothing."""
    phases = {read_pair((HERE / f"{name}.txt").read_text(encoding="utf-8")).keywords()["phase"] for name in PAIRS}
    assert phases == {step.name for step in NORMALIZE} | {phase.name for phase in PHASES} - {"verify"}
