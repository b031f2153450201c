"""A plan's step time equals the simulation of its programs: two ways to one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.transformer import gpt
from cost_models.hardware.clusters import Cluster, Device, Link
from partitioner import Constraints, PartitionedModel, partition
from tests.support.running.slow_values import all_but, slow

TOLERANCE = 0.05
"""Plans count what overlaps by formula, the simulation by events; a plan does not know which message waits for which."""

Mode = str | Mapping[str, int]

SETTINGS: Mapping[str, tuple[Mode, int, Mapping[str, Any]]] = {
    "layers": ("model", 2, {}),
    "GPipe": ("pipeline", 2, {"schedule": "GPipe", "n_microbatches": 4}),
    "1F1B": ("pipeline", 4, {"schedule": "1F1B", "n_microbatches": 8}),
    "recomputed": ("pipeline", 2, {"schedule": "1F1B", "n_microbatches": 4, "recompute": "full"}),
    "interleaved": ("pipeline", 2, {"schedule": "Interleaved1F1B", "n_microbatches": 4}),
    "zero bubble": ("pipeline", 2, {"schedule": "ZB1P", "n_microbatches": 4}),
    "data": ("data", 2, {}),
    "data, four ranks": ("data", 4, {}),
    "gathered parameters": ("fsdp", 2, {}),
    "cut state": ("zero1", 4, {}),
    "cut state, microbatches": ("zero1", 4, {"n_microbatches": 4}),
    "cut state and gradients, microbatches": ("zero2", 4, {"n_microbatches": 4}),
    "tensor": ("tensor", 2, {}),
    "tensor, four ranks": ("tensor", 4, {}),
    "data and tensor": ({"data": 2, "tensor": 2}, 4, {}),
    "pipeline and tensor": ({"pipeline": 2, "tensor": 2}, 4, {"schedule": "1F1B", "n_microbatches": 4}),
    "data and pipeline": ({"data": 2, "pipeline": 2}, 4, {"schedule": "1F1B", "n_microbatches": 4}),
    "cut state and pipeline": ({"zero1": 2, "pipeline": 2}, 4, {"schedule": "1F1B", "n_microbatches": 4}),
    "cut state, pipeline, bfloat16 and float32": (
        {"zero1": 2, "pipeline": 4},
        8,
        {"schedule": "1F1B", "n_microbatches": 8, "precision": "bf16-mixed"},
    ),
    "cut state, interleaved, bfloat16 and float32": (
        {"zero1": 4, "pipeline": 2},
        8,
        {"schedule": "Interleaved1F1B", "n_microbatches": 4, "precision": "bf16-mixed"},
    ),
    "gathered parameters and pipeline": ({"fsdp": 4, "pipeline": 2}, 8, {"schedule": "Interleaved1F1B", "n_microbatches": 4}),
    "selective": ("tensor", 4, {"recompute": "selective", "precision": "bf16-mixed"}),
}


def on_a100s(setting: tuple[Any, int, Mapping[str, Any]]) -> PartitionedModel:
    """Return a wide GPT, on paper."""
    mode, devices, options = setting
    with torch.device("meta"):
        model, tokens = gpt(4, 2048), torch.zeros(16, 512, dtype=torch.int64)
    return partition(model, devices, mode, example_inputs=(tokens,), cluster="a100-80gb:1x8", progress=False, **options)


@pytest.mark.parametrize("mesh", [{"pipeline": 2, "fsdp": 4}, *slow({"pipeline": 2, "zero1": 4})], ids=str)
def test_stages_that_share_a_weight_each_gather_it(mesh: dict[str, int]) -> None:
    """An embedding that is tied to the head, and takes as long to gather as the blocks compute."""
    with torch.device("meta"):
        blocks, tokens = [*gpt(4, 512)][1:-1], torch.zeros(16, 64, dtype=torch.int64)
        embedding, head = nn.Embedding(65536, 512), nn.Linear(512, 65536, bias=False)
        head.weight = embedding.weight
        model = nn.Sequential(embedding, *blocks, head)
    options: dict[str, Any] = {"schedule": "GPipe", "n_microbatches": 2, "recompute": "none"}
    pm = partition(model, 8, mesh, example_inputs=(tokens,), cluster="a100-80gb:2x4", progress=False, **options)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE)


def test_stages_that_share_a_weight_need_not_follow_each_other() -> None:
    """The first and the third of four; only neighbours send activations."""
    with torch.device("meta"):
        shared, x = nn.Linear(2048, 2048), torch.ones(16384, 2048)
        model = nn.Sequential(shared, nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), shared, nn.Tanh(), nn.Linear(2048, 2048))
    ranks = Constraints(pin={"2": 1, "4": 2, "6": 3})
    pm = partition(model, 4, "pipeline", example_inputs=(x,), constraints=ranks, cluster="a100-80gb:1x4", progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE)


@pytest.mark.parametrize("recompute", ["full", *slow("selective")])
def test_batch_normalization_is_computed_again(recompute: str) -> None:
    """Without its running statistics, and without a result that the backward does not read: a sum of residuals follows."""

    def block() -> nn.Module:
        return Residual(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64))

    with torch.device("meta"):
        model, x = nn.Sequential(*(block() for _ in range(8))), torch.ones(64, 64, 28, 28)
    pm = partition(model, 8, "data", example_inputs=(x,), cluster="h100:1x8", progress=False, recompute=recompute)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.03)


class Residual(nn.Module):
    """Adds its input to its result."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


class Masked(nn.Module):
    """Reads a mask by row and column, as transformers' masks are made, before each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        allowed = mask[rows, torch.arange(9, device=x.device)]
        y: Tensor = self.second(torch.tanh(self.first(x * allowed)) * allowed) * allowed
        return y


def test_what_every_stage_gathers_to_compute_a_mask() -> None:
    """No unit reads it."""
    mesh, inputs = {"data": 2, "pipeline": 2}, (torch.ones(4, 9), torch.ones(4, 9, dtype=torch.bool))
    pm = partition(Masked(), 4, mesh, example_inputs=inputs, cluster="cpu:1x4", progress=False)
    assert pm.plan.step_time > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_plan_and_simulation_agree(name: str) -> None:
    """Casts of parameters that ZeRO-1 gathers once a step are priced once, not in every microbatch."""
    pm = on_a100s(SETTINGS[name])
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE)


@pytest.mark.parametrize("n_microbatches", [4, *slow(2)])
def test_gathers_of_a_microbatch_wait_for_scatters_of_the_one_before(n_microbatches: int) -> None:
    """Of few rows, most of the time is that of messages."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(6)))
        rows = torch.randn(64, 2048)
    options: dict[str, Any] = {"n_microbatches": n_microbatches, "recompute": "none", "cluster": "h100:1x4", "progress": False}
    pm = partition(model, 4, "fsdp", example_inputs=(rows,), **options)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.03)


class Vocabulary(nn.Module):
    """Layers, and the loss of logits over 32,768 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(4)))
        self.head = nn.Linear(512, 32768)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)).float(), target)


@pytest.mark.parametrize("precision", ["bf16-mixed", *slow("32-true")])
def test_a_loss_over_a_sharded_vocabulary_is_computed_again_without_its_sums(precision: str) -> None:
    with torch.device("meta"):
        model, rows = Vocabulary(), (torch.zeros(8192, 512), torch.zeros(8192, dtype=torch.int64))
    options: dict[str, Any] = {"recompute": "selective", "precision": precision, "cluster": "h100:1x4", "progress": False}
    pm = partition(model, 4, "tensor", example_inputs=rows, **options)
    assert sum(node.target is torch.ops.aten.exp.default for node in pm.graphs[0].graph.nodes) == 2
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.02)


class GatedLayer(nn.Module):
    """A layer whose normalised input is cast once by autocast, and read by three products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.gate, self.up, self.side = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        y: Tensor = x + nn.functional.silu(self.gate(normed)) * self.up(normed) + self.side(normed)
        return y


class Classifier(nn.Module):
    """Three such layers and a cross-entropy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(GatedLayer(width) for _ in range(3)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x).float(), target)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_backwards_of_pointwise_operations_are_priced_as_they_run(precision: str) -> None:
    """Gradients of several readers are added, in float32 if they read a cast; those of broadcast weights are summed."""
    with torch.device("meta"):
        model, x, target = Classifier(1024), torch.zeros(65536, 1024), torch.zeros(65536, dtype=torch.int64)
    pm = partition(model, 1, "model", example_inputs=(x, target), cluster="h100:1x1", precision=precision, progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.02)


class GeluLayer(nn.Module):
    """A layer with biases and dropout, whose GELU multiplies values of 16 bits with values of 32 bits under autocast, as GPT-2's does."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        hidden = 0.5 * hidden * (1.0 + torch.tanh(hidden + 0.04 * hidden.pow(3)))
        return x + nn.functional.dropout(self.down(hidden), self.dropout)


@pytest.mark.parametrize("dropout", [*slow(0.0), 0.1])
@pytest.mark.parametrize(("mode", "devices"), [("model", 1), ("data", 4), ("tensor", 4)])
def test_biases_masks_and_narrow_arguments_are_priced_as_they_run(mode: str, devices: int, dropout: float) -> None:
    """The gradient of a bias is a kernel; that of an argument of 16 bits is cast; ranks draw masks whole, and copy their parts."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(GeluLayer(1024, dropout) for _ in range(3))), torch.zeros(64, 1024, 1024)
    pm = partition(model, devices, mode, example_inputs=(x,), cluster="h100:1x4", precision="bf16-mixed", progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.03)


@pytest.mark.parametrize("flops", [2e10, 2e13], ids=["computing is longer", "messages are longer"])
@pytest.mark.parametrize("mode", ["fsdp", "zero1"])
def test_large_parameters_are_sent_while_ranks_compute(mode: Mode, flops: float) -> None:
    """Whatever takes longer is waited for; a link that takes a fifth of the processors delays the computing by that.

    The sum of the loss, and messages of biases, which begin when the links are busy, are left out of prices: 4 and 3 ms here.
    """
    pm = over_a_slow_link(2048, 4, mode, 0.2, n_layers=6, flops=flops)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE, abs=0.015)


def test_messages_that_are_shorter_than_the_computing_cost_a_part_of_the_processors() -> None:
    without, with_share = (over_a_slow_link(2048, 4, "fsdp", share, n_layers=6, flops=2e10).plan.step_time for share in (0.0, 0.2))
    sent = max(over_a_slow_link(2048, 4, "fsdp", n_layers=6).simulate().communication.values()) / 1e9
    assert 0.1 * sent < with_share - without < 0.4 * sent


def over_a_slow_link(
    width: int, devices: int, mode: Mode, host_share: float = 0.0, n_layers: int = 12, flops: float = 1e10, **options: Any
) -> PartitionedModel:
    """Square layers over a link whose messages take long to begin."""
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(n_layers) for layer in (nn.Linear(width, width), nn.ReLU())))
        x = torch.zeros(256, width)
    kind = Device("d", {"float32": flops}, 2**40, 1e10, launch_overhead=0.0, compute_efficiency=1.0)
    cluster = Cluster([kind] * devices, Link(1e-3, 1e9, host_share=host_share))
    return partition(model, devices, mode, example_inputs=(x,), cluster=cluster, progress=False, **options)


@pytest.mark.parametrize("devices", [*slow(2), 4])
def test_small_parameters_that_travel_together_are_priced_so(devices: int) -> None:
    """One or two messages for all twenty-four, not one for each; the second begins before the first is read, and plans count both."""
    pm = over_a_slow_link(128, devices, "zero1")
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE, abs=0.0012)


@pytest.mark.slow
def test_small_parameters_of_each_stage_travel_by_themselves() -> None:
    """Four messages for each microbatch where there are four stages: gathers are waited for, and scatters as the links are free."""
    pm = over_a_slow_link(128, 8, {"fsdp": 2, "pipeline": 4}, n_layers=16, n_microbatches=8, schedule="1F1B")
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.05)


@pytest.mark.slow
def test_a_recomputed_forward_gathers_again_under_fsdp_alone() -> None:
    """ZeRO-1 keeps parameters whole from their first use to the last backward, whatever is recomputed."""
    kept, dropped = (over_a_slow_link(128, 4, mode, recompute="full") for mode in ("zero1", "fsdp"))
    assert kept.simulate().step_time < 0.7 * dropped.simulate().step_time
    assert kept.plan.step_time < 0.85 * dropped.plan.step_time  # it leaves out that the sum of the loss delays the gather


@pytest.mark.slow
def test_every_message_of_gradients_begins_anew() -> None:
    """Four of them, where processors that move messages compute nothing meanwhile; a plan counts no overlap of two beginnings."""
    pm = over_a_slow_link(768, 4, "data", 1.0)
    simulated = pm.simulate().step_time
    assert 0.99 * simulated <= pm.plan.step_time <= 1.09 * simulated


def test_gradients_that_are_larger_than_a_message_go_alone_and_whole() -> None:
    """Two of 64 MiB are two messages, not seventeen."""
    pm = over_a_slow_link(4096, 4, "data", 1.0, n_layers=2, flops=1e12)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE)


def _images(norm: nn.Module) -> tuple[nn.Module, Tensor, Mapping[str, int], Constraints]:
    return (
        nn.Sequential(nn.Conv2d(4, 16, 1), norm, nn.Conv2d(16, 1, 1)),
        torch.zeros(4, 4, 512, 512),
        {"tile": 2},
        Constraints(halo="exchange"),
    )


def _rows(norm: nn.Module) -> tuple[nn.Module, Tensor, Mapping[str, int], Constraints]:
    model = nn.Sequential(nn.Linear(16, 1024), norm, nn.Linear(1024, 16))
    return model, torch.zeros(32, 1024, 16), {"tensor": 2}, Constraints(axes={"hidden": "tensor"})


WRITTEN_OUT: Mapping[str, Callable[[], tuple[nn.Module, Tensor, Mapping[str, int], Constraints]]] = {
    "batch": lambda: _images(nn.BatchNorm2d(16)),
    "group": lambda: _images(nn.GroupNorm(4, 16)),
    "instance": lambda: _images(nn.InstanceNorm2d(16)),
    "layer": lambda: _rows(nn.LayerNorm(1024)),
    "root mean square": lambda: _rows(nn.RMSNorm(1024)),
}


@pytest.mark.parametrize("name", all_but(("batch",), WRITTEN_OUT))
def test_norms_over_what_is_cut_are_priced_as_they_run(name: str) -> None:
    """Such a norm is ten kernels forward and more back; one kernel reads twice and writes once."""
    with torch.device("meta"):
        model, x, mode, constraints = WRITTEN_OUT[name]()
    pm = partition(model, 2, mode, example_inputs=(x,), cluster="l4:1x2", constraints=constraints, training=True, progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE)


def test_a_norm_has_one_kernel_for_all_gradients() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.LayerNorm(1024) for _ in range(4)), nn.Linear(1024, 1)), torch.zeros(65536, 1024)
    pm = partition(model, 1, "model", example_inputs=(x,), cluster="h100:1x1", training=True, progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE)


def test_small_kernels_beside_large_ones_take_as_long_as_their_starts() -> None:
    """Of a normalization over ranks on a fast device, three kernels move the images, and twenty the statistics of channels."""
    with torch.device("meta"):
        layers = [layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64))]
        model, x = nn.Sequential(*layers, nn.Conv2d(64, 4, 1)), torch.zeros(32, 64, 112, 112)
    pm = partition(model, 2, "data", example_inputs=(x,), cluster="h100:1x2", training=True, progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=TOLERANCE)


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_a_recomputed_norm_repeats_its_last_kernel(precision: str | None) -> None:
    """The sums over ranks are saved: neither they nor the messages of them are repeated."""
    with torch.device("meta"):
        model = nn.Sequential(*(each for _ in range(4) for each in (nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU())))
        x = torch.zeros(8, 16, 256, 256)
    saving, repeating = (
        partition(model, 2, "data", example_inputs=(x,), cluster="l4:1x2", precision=precision, recompute=recompute, progress=False)
        for recompute in ("none", "selective")
    )
    assert any(name.startswith("batch_norm") for name in repeating.plan.recomputed)
    longer = repeating.simulate().step_time - saving.simulate().step_time
    assert repeating.plan.step_time - saving.plan.step_time == pytest.approx(longer, rel=0.1)


@pytest.mark.parametrize(
    ("mesh", "options"), [({"tensor": 4}, {}), ({"pipeline": 2, "tensor": 2}, {"schedule": "ZB1P", "n_microbatches": 4})]
)
def test_gradients_of_inputs_are_reduced_beside_those_of_weights(mesh: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """Not in backwards of two halves, whose weight halves are computed later."""
    with torch.device("meta"):
        model, x = nn.Sequential(*(GeluLayer(2048, 0.0) for _ in range(4))), torch.zeros(16, 512, 2048)
    pm = partition(model, 4, mesh, example_inputs=(x,), cluster="h100:1x4", progress=False, **options)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.02)


class Tagger(nn.Module):
    """A table of embeddings, whose backward does not read it, and layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(65536, width), nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_recomputed_layers_do_not_gather_the_table_before_them_again() -> None:
    with torch.device("meta"):
        model, tokens = Tagger(1024), torch.zeros(16, 512, dtype=torch.int64)
    options: Mapping[str, Any] = {"cluster": "h100:8x2", "recompute": "full", "progress": False}
    pm = partition(model, 16, {"fsdp": 16}, example_inputs=(tokens,), **options)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.03)


class Convolutions(nn.Module):
    """Convolutions with normalizations over the batch, which update running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = ((nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(6))
        self.layers = nn.Sequential(*(layer for each in layers for layer in each))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize(
    ("mesh", "options"), [({"tensor": 4}, {}), ({"pipeline": 2, "tensor": 2}, {"schedule": "ZB1P", "n_microbatches": 1})]
)
def test_convolutions_compute_all_gradients_at_once(mesh: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """Not in the second half of a backward. Calls that update running statistics are not recomputed."""
    with torch.device("meta"):
        model, x = Convolutions(256), torch.zeros(32, 256, 64, 64)
    pm = partition(model, 4, mesh, example_inputs=(x,), cluster="h100:1x4", recompute="selective", progress=False, **options)
    simulated = pm.simulate()
    assert pm.plan.step_time == pytest.approx(simulated.step_time, rel=0.03)
    assert max(pm.plan.memory) == pytest.approx(max(simulated.peak_memory), rel=0.05)


@pytest.mark.parametrize("is_residual", [*slow(False), True])
def test_sums_over_ranks_are_sent_again_where_a_backward_reads_them(*, is_residual: bool) -> None:
    """Of convolutions that are computed again, which normalizations read; not of those that enter a region, which are saved."""

    def block() -> nn.Module:
        layers = (nn.Conv2d(256, 256, 3, padding=1, bias=False), nn.BatchNorm2d(256), nn.ReLU())
        return Residual(*layers, nn.Conv2d(256, 256, 3, padding=1, bias=False), nn.BatchNorm2d(256))

    with torch.device("meta"):
        model = nn.Sequential(*(block() for _ in range(4))) if is_residual else Convolutions(256)
        x = torch.zeros(128, 256, 14, 14)
    options: Mapping[str, Any] = {"recompute": "full", "memory_limit": 2**45, "progress": False}
    pm = partition(model, 4, "tensor", example_inputs=(x,), cluster="h100:4x1", **options)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.02)


def test_resizing_takes_the_kernels_into_which_autograd_decomposes_it() -> None:
    """Indices of nearest elements forward, and a sum by them backward; a pool writes the indices of its maxima."""
    with torch.device("meta"):
        layers = (nn.Conv2d(64, 64, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.Upsample(scale_factor=2))
        model, x = nn.Sequential(nn.Conv2d(64, 64, 1), *layers), torch.zeros(2, 64, 128, 128)
    pm = partition(model, 1, "model", example_inputs=(x,), cluster="h100:1x1", progress=False)
    assert pm.plan.step_time == pytest.approx(pm.simulate().step_time, rel=0.02)
