"""Devices, networks, and how long collectives take on them, against formulas and worked examples."""

from __future__ import annotations

import pytest

from megatron.config import ConfigError
from megatron.parallel.layout.layout import Layout
from megatron.plan.devices import Cluster, cluster, known_devices
from megatron.plan.step import Group, collective, group, groups, ring


def test_every_device_has_peaks_and_plausible_figures():
    devices, networks = known_devices()
    for name, device in devices.items():
        assert device.peak("bf16") >= device.peak("fp32") > 0, name
        # A product of 8192-wide matrices is bound by arithmetic on every device.
        assert device.peak("bf16") / (device.bandwidth * 1e9) < 8192 / 3, name
    assert devices["h100"].peak("bf16") == 989e12 and devices["mi250x"].peak("bf16") == 191.5e12
    assert {"ib200", "ib400", "roce", "slingshot", "ethernet"} <= networks.keys()


def test_ring_of_a_worked_example():
    """n = 4, 20 us, 1 GB/s, 1 MB: 120 us + 1.5 ms."""
    assert ring("all_reduce", 4, 1e6, 20e-6, 1e9) == pytest.approx(1.62e-3)
    assert ring("all_gather", 4, 1e6, 20e-6, 1e9) == pytest.approx(0.81e-3)
    assert ring("send", 2, 1e6, 20e-6, 1e9) == pytest.approx(1.02e-3)
    assert ring("all_reduce", 1, 1e6, 20e-6, 1e9) == 0


def test_small_messages_take_the_tree():
    assert ring("all_reduce", 64, 8, 1e-5, 1e9) == pytest.approx(2 * 6 * 1e-5, rel=1e-3)


def test_places_of_groups_are_those_of_the_layouts_ranks():
    """Against the ranks themselves, host by host."""
    for layout in (
        Layout(tensor=4, data=8, pipeline=2),
        Layout(tensor=2, data=4, context=2, pipeline=4),
        Layout(tensor=16, data=2, pipeline=2),
        Layout(data=64),
    ):
        found = groups(layout, 8)
        for axis in ("tensor", "context", "pipeline"):
            members = layout.groups(axis)[0]
            hosts = [rank // 8 for rank in members]
            assert found[axis] == Group(len(members), max(hosts.count(host) for host in hosts)), (layout, axis)


def test_rings_that_leave_a_host_share_its_adapters():
    at = cluster(64, "h100", network="ib400")
    alone = collective(at, group(64, 1, 8), "all_gather", 1e9)  # one ring, which has all adapters
    shared = collective(at, group(8, 8, 8), "all_gather", 1e9)  # eight rings, of one device of each host
    assert alone == pytest.approx(63 * ((5 * 56 + 15 * 8) / 64 * 1e-6 + 1e9 / (64 * 384e9)))
    assert shared == pytest.approx(7 * (15e-6 + 1e9 / (8 * 48e9)))
    inside = collective(at, group(8, 1, 8), "all_gather", 1e9)
    assert inside == pytest.approx(7 * (5e-6 + 1e9 / (8 * 400e9)))
    assert inside < alone < shared


def test_own_devices(tmp_path):
    path = tmp_path / "mine.yml"
    path.write_text(
        "devices:\n  npu: {name: NPU, tflops: {bf16: 100}, memory: 32, bandwidth: 1000, watts: 300, per_host: 4,\n"
        "    units: 24, link: {bandwidth: 30, latency: 5}, efficiency: {matrix: 0.5, attention: 0.4, memory: 0.7},\n"
        "    launch: 5}\nnetworks:\n  mesh: {bandwidth: 10, adapters: 2, latency: 9}\n"
    )
    at = cluster(16, "npu", network="mesh", path=str(path))
    assert isinstance(at, Cluster) and at.hosts == 4 and at.device.peak("bf16") == 100e12


@pytest.mark.parametrize(
    "text, said",
    [
        ("devices: {x: {name: y}}", "devices.x.memory"),
        ("devices: [1]", "devices"),
        ("- 1", "must have the keys"),
        ("a: [", "readable YAML"),
        ("networks: {n: {bandwidth: -1, adapters: 1, latency: 1}}", "networks.n.bandwidth"),
        ("networks: {n: {bandwidth: .nan, adapters: 1, latency: 1}}", "networks.n.bandwidth"),
    ],
)
def test_broken_files_of_machines(tmp_path, text, said):
    path = tmp_path / "broken.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        known_devices(str(path))
    assert said in str(error.value) and str(path) in str(error.value)


def test_requests_that_name_nothing():
    with pytest.raises(ConfigError, match="must be one of .*h100"):
        cluster(8, "h101")
    with pytest.raises(ConfigError, match="must fill the hosts evenly"):
        cluster(12, "h100")
    with pytest.raises(ConfigError, match="--gpus"):
        cluster(512, "h100", hosts=100)
    assert cluster(12, "h100", hosts=3).per_host == 4
