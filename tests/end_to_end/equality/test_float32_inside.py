"""Models that compute norms or losses in float32 whatever they are given, as they are: casts among the calls that are cut.

``tests.end_to_end.equality.test_mesh_transparency`` compares them to 1e-9 with float64 instead of float32.
Here the casts stay, and one step is compared to what float32 is exact to: loss and gradients, which no optimizer has enlarged.
"""

from __future__ import annotations

import pytest

from partitioner import PartitionedModel
from tests.end_to_end.equality.test_mesh_transparency import SETTINGS
from tests.support.models.case import Case
from tests.support.models.pretrained import FLOAT32_INSIDE
from tests.support.models.zoo import ZOO
from tests.support.running.transparency import compare_gradients, compare_values, make_partitioned, reference_steps

CASES = [case for case in ZOO if case.tolerance >= FLOAT32_INSIDE]

ROUNDING = 10 * FLOAT32_INSIDE
"""Parts are added in another order than the whole is."""


def test_there_are_such_models() -> None:
    assert {"gpt2", "llama", "t5", "whisper"} <= {case.name for case in CASES}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("setting", ["tensor3", "fsdp2", "data2-pipeline2-tensor2"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step(case: Case, setting: str) -> None:
    chosen = SETTINGS[setting]
    reference = reference_steps(case, n_steps=1, batch_size=chosen.batch_size)
    instance = case.build(batch_size=chosen.batch_size)
    pm: PartitionedModel = make_partitioned(instance, n_microbatches=chosen.n_microbatches, **chosen.arguments)
    loss = pm.train_step(*instance.args, target=instance.target, loss_fn=case.loss_fn, **instance.kwargs)
    assert compare_values(reference.losses[0], loss.detach(), ROUNDING) is None
    assert compare_gradients(reference.gradients[0], pm.full_gradients(), ROUNDING) is None
