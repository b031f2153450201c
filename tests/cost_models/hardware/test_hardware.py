"""Devices, links and clusters: what is read is what was written, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import cost_models
import partitioner
from cost_models.hardware.clusters import Cluster, Device, Level, Link
from cost_models.hardware.units import format_bytes, format_seconds, parse_bytes
from passes.ir.errors import ConfigError

FAST, SLOW = Link(1e-6, 100e9), Link(1e-5, 10e9)
DEVICE = Device("mine", {"float32": 1e12, "bfloat16": 4e12}, memory_bytes=2**30, memory_bandwidth=1e11)


@pytest.mark.parametrize("name", ["h200", "h100", "a100-80gb", "a100-40gb", "v100", "l4", "rtx-4090", "cpu"])
def test_every_preset_is_a_machine(name: str) -> None:
    cluster = Cluster.preset(name, nodes=2, devices_per_node=4)
    assert len(cluster.devices) == 8
    assert cluster.link(0, 3).bandwidth > cluster.link(3, 4).bandwidth
    assert cluster.devices[0].flops(torch.float32) > 1e10


def test_an_unknown_preset_is_named_with_the_close_one() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'a100'.*a100-80gb"):
        Cluster.preset("a100")


def test_the_short_text_is_nodes_by_devices() -> None:
    assert Cluster.parse("h100:8x4") == Cluster.preset("h100", nodes=8, devices_per_node=4)
    assert Cluster.parse("l4:4") == Cluster.preset("l4", devices_per_node=4)
    assert len(Cluster.parse("cpu").devices) == 1
    for text in ("h100:", "h100:x8", "h100:8x", "h100:0x4"):
        with pytest.raises(ConfigError):
            Cluster.parse(text)


def test_links_by_level_and_by_pair() -> None:
    cluster = Cluster([DEVICE] * 6, [Level(6, SLOW), Level(2, FAST)])
    assert [cluster.link(2, other) for other in (0, 1, 3, 4)] == [SLOW, SLOW, FAST, SLOW]
    assert cluster.link(2, 2).latency == 0
    pairs = Cluster([DEVICE] * 3, {(0, 1): FAST, (1, 2): SLOW})
    assert pairs.link(1, 0) == FAST
    with pytest.raises(ConfigError, match="ranks 0 and 2"):
        pairs.link(0, 2)
    with pytest.raises(ConfigError, match="join 2 devices"):
        Cluster([DEVICE] * 3, [Level(2, FAST)])


def test_a_dtype_without_a_rate_runs_at_the_slowest() -> None:
    assert DEVICE.flops(torch.float64) == DEVICE.flops(torch.float32)
    assert DEVICE.flops(torch.bfloat16) == 4 * DEVICE.flops(torch.float32)


@pytest.mark.parametrize("wrong", [{"memory_bytes": 0}, {"peak_flops": {}}, {"compute_efficiency": 1.5}, {"launch_overhead": -1.0}])
def test_an_impossible_device_is_refused(wrong: dict[str, object]) -> None:
    fields = {"name": "bad", "peak_flops": {"float32": 1e12}, "memory_bytes": 1, "memory_bandwidth": 1e9, **wrong}
    with pytest.raises(ConfigError, match="bad"):
        Device(**fields)  # type: ignore[arg-type]


def test_clusters_are_values() -> None:
    assert Cluster.preset("h100", 2, 2) == Cluster.preset("h100", 2, 2)
    assert len({Cluster.preset("h100", 2, 2), Cluster.preset("h100", 2, 2)}) == 1


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        'ranks = ["h100", "mine"]\nlinks = [{ size = 2, latency = 1e-5, bandwidth = 1e10 }]\n'
        '[devices.mine]\nmemory = "1GiB"\nmemory_bandwidth = 1e11\npeak_flops = { float32 = 1e12, bfloat16 = 4e12 }\n'
    )
    assert Cluster.from_toml(file) == Cluster([Cluster.preset("h100").devices[0], DEVICE], [Level(2, SLOW)])
    file.write_text('device = "v100"\nnodes = 2\ndevices_per_node = 3\n')
    assert Cluster.from_toml(file) == Cluster.preset("v100", 2, 3)
    file.write_text(
        'ranks = ["v100", "v100"]\nlinks = [{ size = 1, latency = 1e-6, bandwidth = 1e11 }, '
        '{ size = 2, latency = 1e-5, bandwidth = 1e10, name = "Ethernet", shared = true }]\n'
    )
    assert Cluster.from_toml(file).links == (Level(1, Link(1e-6, 1e11)), Level(2, Link(1e-5, 1e10, "Ethernet"), shared=True))
    for text in ("ranks = 3", "device = 'nothing'", "not toml", "device = 'v100'\nnodes = 0", "ranks = ['v100', 'v100']"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            Cluster.from_toml(file)


def test_the_path_of_a_file_is_a_cluster_as_text(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    with pytest.raises(ConfigError, match=r"the cluster file .* cannot be read: No such file") as found:
        Cluster.parse(str(file))
    assert found.value.remedy == "pass the path of a TOML file"
    file.write_text('device = "v100"\nnodes = 2\ndevices_per_node = 3\n')
    assert Cluster.parse(str(file)) == Cluster.preset("v100", 2, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("peak_flops = { flt32 = 1e13 }\nmemory_bandwidth = 1e11", r"(?s)peak_flops has no dtype 'flt32'.*did you mean 'float32'\?"),
        ("peak_flops = { half = 1e13 }\nmemory_bandwidth = 1e11", r"(?s)peak_flops has no dtype 'half'.*did you mean 'float16'\?"),
        ("peak_flops = { float32 = 1e13 }\nmemory_bandwidth = inf", "memory_bandwidth must be finite"),
        ("peak_flops = { float32 = inf }\nmemory_bandwidth = 1e11", r"peak_flops\['float32'\] must be finite"),
    ],
)
def test_rates_that_no_device_has_are_refused(fields: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'device = "mine"\n[devices.mine]\nmemory = "1GiB"\n{fields}\n')
    with pytest.raises(ConfigError, match=message):
        Cluster.from_toml(file)


def test_sizes_as_text() -> None:
    assert parse_bytes("16GiB") == 16 * 2**30
    assert parse_bytes("80 gb") == 80 * 10**9
    for wrong in ("16 gigs", "", "-3GB", 0, "GiB"):
        with pytest.raises(ConfigError):
            parse_bytes(wrong)
    assert format_bytes(parse_bytes("16GiB")) == "16.0 GiB"
    assert format_seconds(0.0123) == "12.3 ms"


def test_hardware_is_imported_from_either_package() -> None:
    assert (cost_models.Cluster, cost_models.Device, cost_models.Link) == (partitioner.Cluster, partitioner.Device, partitioner.Link)
