"""Real processes that talk over gloo: equal numbers, and errors instead of waiting for ever."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.ir.errors import CommunicationError, ConfigError
from tests import ROOT
from tests.support.models.zoo import ZOO
from tests.support.processes import torchrun_cases as cases
from tests.support.processes import torchrun_meshes as meshes
from tests.support.processes.processes import Workers
from tests.support.running.slow_values import slow

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV")
PROMPTLY = 60.0
"""Seconds within which a failure must reach every rank, on a busy machine; the waits themselves would last 300."""

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(180)]


# -- equal numbers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "name", "schedule", "batch_size"),
    [
        pytest.param(2, "gpt", "1F1B", 8, id="tied_weights_on_first_and_last_rank", marks=pytest.mark.slow),
        pytest.param(2, "unet", "ZBV", 8, id="skips_over_stages", marks=pytest.mark.slow),
        pytest.param(2, "batch_norm_convolution", "Interleaved1F1B", 8, id="buffers", marks=pytest.mark.slow),
        pytest.param(2, "nested_outputs", "DualPipeV", 2, id="batch_smaller_than_microbatches"),
        pytest.param(4, "integers_and_flags", "1F1B", 9, id="nine_rows_in_four", marks=pytest.mark.slow),
        pytest.param(4, "shared_layer", "ZB1P", 8, id="tied_weights_on_all_ranks", marks=pytest.mark.slow),
        pytest.param(4, "branches", "Interleaved1F1B", 8, id="values_for_every_later_rank", marks=pytest.mark.slow),
    ],
)
def test_training(workers: Callable[[int], Workers], size: int, name: str, schedule: str, batch_size: int) -> None:
    assert workers(size).values(cases.training_difference, name, schedule, batch_size, timeout=120) == [None] * size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "size"),
    [(case.name, SCHEDULES[row % len(SCHEDULES)], (2, 4)[row // len(SCHEDULES) % 2]) for row, case in enumerate(ZOO)],
)
def test_training_of_every_model(workers: Callable[[int], Workers], name: str, schedule: str, size: int) -> None:
    """Every model, and every schedule with several: what the embedded runtime shows for all of them is not shown again."""
    assert workers(size).values(cases.training_difference, name, schedule, timeout=170) == [None] * size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [("gpt", "tensor"), ("group_norm_convolution", "data"), ("shared_layer", "zero1"), ("gpt", "fsdp")],
)
def test_training_over_cut_axes(workers: Callable[[int], Workers], name: str, mode: str) -> None:
    assert workers(2).values(meshes.mesh_training_difference, name, mode, timeout=120) == [None] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [("gpt", "tensor"), ("batch_norm_convolution", "data"), ("shared_layer", "fsdp")])
def test_calls_over_cut_axes(workers: Callable[[int], Workers], name: str, mode: str) -> None:
    """Nothing is cut in stages, so ``backward()`` reaches all that it has to."""
    assert workers(2).values(meshes.mesh_call_difference, name, mode, timeout=120) == [None] * 2


@pytest.mark.slow
def test_training_over_tiles(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(meshes.mesh_training_difference, "segmentation_of_volumes", "tile", timeout=170) == [None] * 2


@pytest.mark.parametrize("attention", slow("ring", "ulysses", "zigzag"))
def test_attention_shared_over_the_sequence(workers: Callable[[int], Workers], attention: str) -> None:
    assert workers(2).values(meshes.attention_training_difference, attention, timeout=170) == [None] * 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        ("transposed_unet", "tile", 2),
        ("dcgan_generator", "tile", 4),
        ("residual_images", {"tile": (2, 2)}, 4),
        ("segmentation_of_volumes", {"data": 2, "tile": 2}, 4),
        ("transposed_unet_of_groups", {"pipeline": 2, "tile": 2}, 4),
    ],
)
def test_models_over_tiles(workers: Callable[[int], Workers], name: str, mode: Any, size: int) -> None:
    assert workers(size).values(meshes.mesh_training_difference, name, mode, timeout=300) == [None] * size
    if "pipeline" not in mode:
        assert workers(size).values(meshes.mesh_call_difference, name, mode, timeout=300) == [None] * size


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "data", "fsdp", "zero1", "zero2"])
@pytest.mark.parametrize("name", ["resnet", "t5", "unet", "lstm"])
def test_models_over_cut_axes(workers: Callable[[int], Workers], name: str, mode: str) -> None:
    assert workers(2).values(meshes.mesh_training_difference, name, mode, timeout=170) == [None] * 2
    assert workers(2).values(meshes.mesh_call_difference, name, mode, timeout=170) == [None] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in ("gpt", "resnet", "t5") for mode in ({"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2})),
        # Not resnet: a microbatch of two replicas has other rows than the one of the reference, and normalises over them.
        *((name, {"data": 2, "pipeline": 2}) for name in ("gpt", "unet", "t5")),
    ],
)
def test_meshes(workers: Callable[[int], Workers], name: str, mode: dict[str, int]) -> None:
    assert workers(4).values(meshes.mesh_training_difference, name, mode, timeout=170) == [None] * 4
    if "pipeline" not in mode:
        assert workers(4).values(meshes.mesh_call_difference, name, mode, timeout=170) == [None] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "mode", "size"),
    [
        ("products", "data", 2),
        ("index", "data", 2),
        ("index", {"data": 2, "tensor": 2}, 4),
        ("dropless", "data", 2),
        ("dropless", {"data": 2, "pipeline": 2}, 4),
    ],
)
def test_tokens_go_to_their_experts(workers: Callable[[int], Workers], way: str, mode: Any, size: int) -> None:
    assert workers(size).values(meshes.expert_training_difference, way, mode, "data", timeout=170) == [None] * size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "saved", "loaded", "size"),
    [
        ("gpt", "tensor", "fsdp", 2),
        ("shared_layer", "pipeline", "tensor", 2),
        ("batch_norm_convolution", "fsdp", "data", 2),
        ("gpt", {"fsdp": 2, "pipeline": 2}, {"data": 2, "tensor": 2}, 4),
        ("gpt", {"pipeline": (2, 1)}, "fsdp", 3),
        ("shared_layer", "tensor", {"pipeline": (1, 2)}, 3),
        ("nested_outputs", {"pipeline": 2, "tensor": (2, 1)}, "fsdp", 3),
        ("nested_outputs", "tensor", {"pipeline": 2, "tensor": (1, 2)}, 3),
    ],
)
def test_checkpoints_of_blocks(workers: Callable[[int], Workers], name: str, saved: Any, loaded: Any, size: int, tmp_path: Path) -> None:
    assert workers(size).values(meshes.checkpoint_difference, name, saved, loaded, str(tmp_path), timeout=170) == [None] * size


def test_every_rank_has_the_outputs(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.forward_difference, "nested_outputs") == [None, None]


@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        pytest.param("gpt", {"pipeline": (2, 1)}, 3, id="tied_weights", marks=pytest.mark.slow),
        pytest.param("nested_outputs", {"pipeline": (1, 2)}, 3, id="two_ranks_with_the_loss", marks=pytest.mark.slow),
        pytest.param("unet", {"pipeline": (1, 2, 1)}, 4, id="in_the_middle", marks=pytest.mark.slow),
        pytest.param("gpt", {"pipeline": (3, 1)}, 4, id="three_and_one", marks=pytest.mark.slow),
    ],
)
def test_stages_that_ranks_take_turns_at(workers: Callable[[int], Workers], name: str, mode: Any, size: int) -> None:
    assert workers(size).values(meshes.mesh_training_difference, name, mode, timeout=170) == [None] * size
    assert workers(size).values(cases.forward_difference, name, mode, timeout=170) == [None] * size


@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        pytest.param("nested_outputs", {"pipeline": 2, "tensor": (2, 1)}, 3, id="two_and_one", marks=pytest.mark.slow),
        pytest.param("returns_loss", {"pipeline": (1, 2), "tensor": (2, 1)}, 4, id="together_and_in_turn", marks=pytest.mark.slow),
        pytest.param("unet", {"pipeline": 3, "tensor": (1, 2, 1)}, 4, id="in_the_middle", marks=pytest.mark.slow),
        pytest.param("group_norm_convolution", {"data": 2, "pipeline": 2, "tensor": (1, 2)}, 6, id="replicas", marks=pytest.mark.slow),
    ],
)
def test_stages_of_unlike_width(workers: Callable[[int], Workers], name: str, mode: Any, size: int) -> None:
    assert workers(size).values(meshes.mesh_training_difference, name, mode, timeout=170) == [None] * size
    assert workers(size).values(cases.forward_difference, name, mode, timeout=170) == [None] * size


@pytest.mark.slow
def test_state(workers: Callable[[int], Workers]) -> None:
    assert workers(2).values(cases.state_moves) == [None, None]


@pytest.mark.slow
def test_processes_that_measure_share_a_plan(workers: Callable[[int], Workers]) -> None:
    """Each measures other times, and would make another plan."""
    first, other = workers(2).values(cases.plans_by_measured_times, timeout=PROMPTLY)
    assert first == other
    assert first[0] == first[1]  # planned anew, and the same: no rank waits for a plan that is not new


@pytest.mark.slow
def test_check_compares_what_a_process_sees(workers: Callable[[int], Workers]) -> None:
    for equal, text in workers(2).values(cases.check_report, "gpt"):
        assert equal, text
        assert "gradients, train_step" in text
        assert "values of nodes are compared where all ranks are in one process" in text


@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        pytest.param("gpt", "pipeline", 2, marks=pytest.mark.slow),
        pytest.param("branches", "pipeline", 4, marks=pytest.mark.slow),
        pytest.param("nested_outputs", "pipeline", 2, marks=pytest.mark.slow),
        pytest.param("shared_layer", "pipeline", 2, marks=pytest.mark.slow),
        pytest.param("t5", "pipeline", 4, marks=pytest.mark.slow),
        pytest.param("unet", "pipeline", 4, marks=pytest.mark.slow),
        pytest.param("gpt", {"data": 2, "pipeline": 2}, 4, marks=pytest.mark.slow),
        pytest.param("gpt", {"pipeline": 2, "tensor": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_calls_over_stages(workers: Callable[[int], Workers], name: str, mode: Any, size: int) -> None:
    """Each process calls ``backward()`` on its copy of the results."""
    assert workers(size).values(meshes.mesh_call_difference, name, mode, timeout=170) == [None] * size


def test_processes_with_unlike_losses_are_refused(workers: Callable[[int], Workers]) -> None:
    for answer in workers(2).call(cases.backward_of_unlike_losses, timeout=60):
        assert isinstance(answer.error, ConfigError)
        assert "gradient of the result" in str(answer.error)


def test_a_process_that_leaves_out_backward_is_named(workers: Callable[[int], Workers]) -> None:
    for answer in workers(2).call(cases.backward_on_one_rank, timeout=60):
        assert isinstance(answer.error, ConfigError)
        assert re.search(r"rank 0 has program forward \w+ of model \d+, rank 1 has backward", str(answer.error))


@pytest.mark.parametrize("tagged", [True, False], ids=["one_group", "group_a_channel"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensors_of_every_kind(workers: Callable[[int], Workers], size: int, tagged: bool) -> None:
    """Empty, without dimensions, strided; and sums that are the same on all ranks to the last bit."""
    sums = workers(size).values(cases.exchanged, tagged)
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    parts = [(torch.randn(1000, generator=g), torch.randn(3, 5, dtype=torch.float64, generator=g)) for g in generators]
    for which, ranks in ((slice(0, 2), range(size)), (slice(2, 4), (0, size - 1))):
        for rank in ranks:
            for index, got in enumerate(sums[rank][which]):
                torch.testing.assert_close(got, torch.stack([parts[other][index] for other in ranks]).sum(0))
                assert torch.equal(got, sums[0][which][index])


@pytest.mark.parametrize("tagged", [True, False], ids=["calls_for_gloo", "calls_for_nccl"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_collectives_of_every_kind(workers: Callable[[int], Workers], size: int, tagged: bool) -> None:
    """Each rank compares whole numbers with the formula; sums of real numbers are the same on all ranks to the last bit."""
    sums = workers(size).values(cases.collectives, tagged)
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    for index, count in enumerate((100, 200_000)):
        expected = torch.stack([torch.randn(count, generator=generator) for generator in generators]).sum(0)
        for rank in range(size):
            torch.testing.assert_close(sums[rank][index], expected)
            assert torch.equal(sums[rank][index], sums[0][index])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_messages_without_tags(workers: Callable[[int], Workers], schedule: str) -> None:
    """As NCCL has it: what is sent first is received first."""
    assert workers(2).values(cases.training_over_channels, "unet", schedule) == [None, None]


SCRIPT = """
import torch
from torch import nn
from partitioner import partition

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]).double()
x, target = torch.randn(6, 8).double(), torch.randn(6, 8).double()
pm = partition(model, devices=2, mode="pipeline", example_inputs=(x,), n_microbatches=3)
optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = pm.train_step(x, target=target, loss_fn=nn.functional.mse_loss)
    optimizer.step()
print(f"\\nloss {loss:.12f}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_the_same_script_under_torchrun(tmp_path: Path) -> None:
    """Nothing else is printed: the process group that the runtime has made is taken down when the script ends."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = [printed_losses(way, script) for way in ([], launch)]
    assert len(losses[0]) == 1
    assert losses[1] == losses[0] * 2


def printed_losses(launch: list[str], script: Path) -> list[str]:
    command = [sys.executable, *launch, str(script)]
    path = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=path, cwd=script.parent, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")]


# -- failures ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_with_different_batches(workers: Callable[[int], Workers]) -> None:
    """Also on the ranks that have begun the step."""
    for answer in workers(4).call(cases.different_batch_sizes, 2, timeout=PROMPTLY):
        assert isinstance(answer.error, ConfigError)
        assert "rank 2 has batch size 6, the others 8" in str(answer.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "inputs"),
    [
        ("pipeline", "global"),
        ("data", "local"),
        ("sequence", "global"),
        ("tensor", "global"),
    ],
)
def test_lengths_that_were_not_planned(workers: Callable[[int], Workers], mode: str, inputs: str) -> None:
    for differences in workers(2).values(cases.length_differences, mode, inputs, timeout=150):
        assert max(differences) < 1e-12


@pytest.mark.slow
def test_ranks_with_different_lengths(workers: Callable[[int], Workers]) -> None:
    for answer in workers(2).call(cases.different_lengths, timeout=150):
        assert isinstance(answer.error, ConfigError)
        assert "length of the inputs" in str(answer.error)


@pytest.mark.parametrize(("difference", "measured"), [("weights", True), ("operation", True), ("operation", False), ("batch", True)])
def test_ranks_with_different_models(workers: Callable[[int], Workers], difference: str, measured: bool) -> None:
    """Before anything is planned, on every rank at once."""
    for answer in workers(2).call(cases.partition_another_model, difference, measured, timeout=PROMPTLY):
        assert isinstance(answer.error, ConfigError)
        assert "rank 0 has model Sequential for 8 rows" in str(answer.error)
        assert f"rank 1 has Sequential for {4 if difference == 'batch' else 8} rows" in str(answer.error)


@pytest.mark.slow
def test_ranks_that_make_different_calls(workers: Callable[[int], Workers]) -> None:
    for answer in workers(4).call(cases.evaluate_on_one_rank, timeout=PROMPTLY):
        assert isinstance(answer.error, ConfigError)
        assert "rank 0 has program forward" in str(answer.error)
        assert "the others train_step" in str(answer.error)


@pytest.mark.slow
def test_a_loss_that_raises_on_one_rank(workers: Callable[[int], Workers]) -> None:
    answers = workers(4).call(cases.failing_loss, timeout=PROMPTLY)
    raised = [rank for rank, answer in enumerate(answers) if isinstance(answer.error, ValueError)]
    assert raised == [3]
    for rank, answer in enumerate(answers[:3]):
        assert isinstance(answer.error, CommunicationError)
        assert f"rank {rank} could not" in str(answer.error)
        assert "first failure: rank 3 failed: ConfigError: loss_fn fails" in str(answer.error)
        assert "ValueError: no such label: 17" in str(answer.error)


@pytest.mark.slow
def test_a_rank_that_does_not_answer(workers: Callable[[int], Workers]) -> None:
    answers = workers(2).call(cases.silent_loss, timeout=PROMPTLY)
    assert all(isinstance(answer.error, CommunicationError) for answer in answers)
    said = "rank 0 could not receive"
    assert str(answers[0].error).startswith(said)
    assert "from rank 1: nothing happened for 4 s" in str(answers[0].error)
    assert f"first failure: {said}" in str(answers[1].error)


def test_a_failed_model_says_so_and_a_new_one_works(workers: Callable[[int], Workers]) -> None:
    for said in workers(2).values(cases.use_after_failure):
        assert "no longer connected: rank 0 failed: ValueError: 17" in said
    assert workers(2).values(cases.training_difference, "linear", "1F1B") == [None, None]


@pytest.mark.slow
def test_a_rank_that_is_killed_in_mid_step(workers: Callable[[int], Workers]) -> None:
    """Rank 0 does not communicate with rank 2: it hears of it from rank 1."""
    endings = workers(4).end_with(cases.train_for_ever, 2, timeout=PROMPTLY)
    assert endings[2].code == -9
    for rank in (0, 1, 3):
        assert endings[rank].code == 1
        assert "CommunicationError" in endings[rank].output
        assert "rank 2 has left" in endings[rank].output


@pytest.mark.slow
def test_a_script_that_fails_between_steps(workers: Callable[[int], Workers]) -> None:
    endings = workers(2).end_with(cases.fail_between_steps, 1, timeout=PROMPTLY)
    assert [ending.code for ending in endings] == [1, 1]
    assert "rank 1 failed: KeyError: 'no such file'" in endings[0].output
