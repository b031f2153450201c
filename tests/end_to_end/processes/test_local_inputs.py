"""Each process has its own rows: real processes with a loader each train as one device does on the union of their rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from partitioner import partition
from passes.ir.errors import ConfigError
from tests.support.processes import local_input_cases as cases
from tests.support.processes.processes import Workers

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(180)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "name", "mode"),
    [
        pytest.param(2, "gpt", "data", id="rows_of_tokens", marks=pytest.mark.slow),
        pytest.param(2, "batch_norm_convolution", "data", id="statistics_of_all_rows"),
        pytest.param(2, "bert", "fsdp", id="own_loss_that_counts_labels", marks=pytest.mark.slow),
        pytest.param(4, "group_norm_convolution", {"data": 2, "tensor": 2}, id="tensor_beside", marks=pytest.mark.slow),
        pytest.param(4, "gpt", {"fsdp": 2, "pipeline": 2}, id="pipeline_beside", marks=pytest.mark.slow),
    ],
)
def test_training(workers: Callable[[int], Workers], size: int, name: str, mode: cases.Mode) -> None:
    assert workers(size).values(cases.training_difference, name, mode, timeout=120) == [None] * size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param("gpt", {"data": 2, "pipeline": 2}, id="counted_targets"),
        ("nested_outputs", "pipeline"),
    ],
)
def test_ranks_leave_out_what_they_do_not_read(workers: Callable[[int], Workers], name: str, mode: cases.Mode) -> None:
    assert workers(4).values(cases.training_difference, name, mode, True, timeout=120) == [None] * 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data", "zero1", {"data": 2, "fsdp": 2}, {"data": 2, "pipeline": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "t5", "vit", "unet", "shared_layer", "nested_outputs", "integers_and_flags"])
def test_models(workers: Callable[[int], Workers], name: str, mode: cases.Mode) -> None:
    assert workers(4).values(cases.training_difference, name, mode, timeout=170) == [None] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("gpt", "data"),
        ("perceptron", "fsdp"),
        ("group_norm_convolution", "fsdp"),
    ],
)
def test_calls_return_own_rows(workers: Callable[[int], Workers], name: str, mode: cases.Mode) -> None:
    assert workers(2).values(cases.call_difference, name, mode, timeout=120) == [None] * 2


@pytest.mark.slow
def test_check_takes_the_whole_batch(workers: Callable[[int], Workers]) -> None:
    for equal, text in workers(2).values(cases.check_report, "perceptron", "data"):
        assert equal, text


@pytest.mark.slow
def test_rows_that_mix(workers: Callable[[int], Workers]) -> None:
    for answer in workers(2).call(cases.rows_that_mix):
        assert isinstance(answer.error, ConfigError), answer.error
        assert "target has the rows of one rank, and the loss takes those of all" in str(answer.error)


_EITHER_FIRST = (
    ("rank 0 has local batch size 4", "rank 1 has 3"),
    ("rank 1 has local batch size 3", "rank 0 has 4"),
)
"""A different rank is named with the majority's value; of two ranks neither is a majority."""


def test_unequal_rows(workers: Callable[[int], Workers]) -> None:
    for answer in workers(2).call(cases.unequal_rows, 1):
        assert isinstance(answer.error, ConfigError), answer.error
        assert any(f"{one}, {other}" in str(answer.error) for one, other in _EITHER_FIRST)
        assert "DistributedSampler" in str(answer.error)


@pytest.mark.parametrize("everywhere", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_inputs_that_are_missing(workers: Callable[[int], Workers], everywhere: bool) -> None:
    errors = [str(answer.error) for answer in workers(2).call(cases.nothing_where_inputs_are_read, everywhere)]
    assert "None now" in errors[0]
    assert "None now" in errors[1] or "rank 0 failed" in errors[1]


def test_one_process_passes_the_rows_of_all() -> None:
    x = torch.randn(4, 3)
    model = nn.Linear(3, 3)
    pm = partition(model, 2, "data", example_inputs=(x,), inputs="local")
    assert (pm.data_parallel_size, pm.data_parallel_rank) == (1, 0)
    assert torch.equal(pm(x), model(x))
    loss = pm.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(loss, nn.functional.mse_loss(model(x), x))
    with pytest.raises(ConfigError, match="there is no inputs="):
        partition(nn.Linear(3, 3), 2, "data", inputs="rows")
