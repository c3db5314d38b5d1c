"""Which accelerators a rank sees, which cores it runs on and which variables it gets, on machines made of files."""

from __future__ import annotations

import os
import socket

import pytest

from megatron.worker import devices


def amd(folder, buses, cores):
    """A machine with two processors and AMD devices. `buses` as (domain, bus, device, function), None a hidden one."""
    (folder / "dev").mkdir()
    (folder / "dev" / "kfd").touch()
    nodes = folder / "sys" / "class/kfd/kfd/topology/nodes"
    for index, bus in enumerate([(), (), *buses]):  # the first two are the processors
        node = nodes / str(index)
        node.mkdir(parents=True)
        if bus is None:
            (node / "gpu_id").mkdir()  # reading fails, as it does on what a control group keeps from us
            continue
        (node / "gpu_id").write_text("0\n" if not bus else f"{1000 + index}\n")
        domain, number, device, function = bus or (0, 0, 0, 0)
        location = number << 8 | device << 3 | function
        (node / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count 440\nlocation_id {location}\ndomain {domain}\n"
        )
    for (domain, number, device, function), near in zip([bus for bus in buses if bus], cores):
        place = folder / "sys/bus/pci/devices" / f"{domain:04x}:{number:02x}:{device:02x}.{function}"
        place.mkdir(parents=True)
        (place / "local_cpulist").write_text(f"{near}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "DEV", tmp_path / "dev")
    monkeypatch.setattr(devices, "SYS", tmp_path / "sys")
    return tmp_path


# A node of Frontier or LUMI: eight dies, near to the eight groups of cores in an order of their own.
BUSES = [(0, number, 0, 0) for number in (0xC1, 0xC6, 0xC9, 0xCE, 0xD1, 0xD6, 0xD9, 0xDE)]
NEAR = ["48-55", "56-63", "16-23", "24-31", "0-7", "8-15", "32-39", "40-47"]


@pytest.fixture
def frontier(machine, monkeypatch):
    amd(machine, BUSES, NEAR)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)) - {0, 8, 16, 24, 32, 40, 48, 56})


def test_amd_devices_in_the_kernels_order(machine):
    amd(machine, [(0, 0xC1, 0, 0), None, (2, 0x0A, 0x1F, 3), *[(0, number, 0, 0) for number in range(16, 26)]], [])
    buses = devices.amd_buses()
    assert buses[:2] == ["0000:c1:00.0", "0002:0a:1f.3"] and len(buses) == 12, "without the one that is not ours"
    assert buses[2:] == [f"0000:{number:02x}:00.0" for number in range(16, 26)], "node 10 comes after node 9"
    assert devices.count({}) == devices.ranks_here({}) == 12 and devices.ranks_here({}, "cpu") == 1


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, "01234567"),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, "31"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7"}, "4567"),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "2,0"}, "64"),  # HIP counts within ROCR
        ({"ROCR_VISIBLE_DEVICES": "7,6", "CUDA_VISIBLE_DEVICES": "1"}, "6"),
        ({"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "1,2"}, "5"),  # HIP before CUDA
        ({"HIP_VISIBLE_DEVICES": "7,8,9"}, "7"),  # there are eight
        ({"HIP_VISIBLE_DEVICES": ""}, ""),
    ],
)
def test_what_a_rank_sees_on_amd(frontier, environment, seen):
    assert devices.physical(environment) == list(seen) and devices.count(environment) == len(seen)


@pytest.mark.parametrize(
    ("slots", "environment", "expected"),
    [
        ((0, 1), {}, {"HIP_VISIBLE_DEVICES": "0,1"}),
        ((6, 2), {}, {"HIP_VISIBLE_DEVICES": "6,2"}),
        ((1,), {"HIP_VISIBLE_DEVICES": "4,7"}, {"HIP_VISIBLE_DEVICES": "7"}),
        ((1,), {"ROCR_VISIBLE_DEVICES": "4,7"}, {"ROCR_VISIBLE_DEVICES": "7"}),  # as Slurm gives them
        ((1,), {"ROCR_VISIBLE_DEVICES": "4,7", "HIP_VISIBLE_DEVICES": "1,0"}, {"HIP_VISIBLE_DEVICES": "0"}),
        ((0,), {"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "5"}),
    ],
)
def test_slots_on_amd(frontier, slots, environment, expected):
    assert devices.visibility(slots, environment, "auto") == expected
    rest = devices.physical({**environment, **expected})
    assert rest == [devices.physical(environment)[slot] for slot in slots], "what the ranks see is what was meant"


def test_more_slots_than_devices(frontier):
    with pytest.raises(ValueError, match="exceed the 8 visible devices"):
        devices.visibility((8,), {}, "auto")
    assert devices.visibility((8,), {}, "cpu") == {}


def test_ranks_run_on_the_cores_next_to_their_device(frontier):
    cores = [devices.cores_of(local, 8, {}, "numa") for local in range(8)]
    assert cores[0] == list(range(49, 56)) and cores[4] == list(range(1, 8)), "core 0 of each group is the system's"
    assert len({core for each in cores for core in each}) == 56, "nobody shares"
    some = {"ROCR_VISIBLE_DEVICES": "4,2", "HIP_VISIBLE_DEVICES": "1,0"}
    assert [devices.cores_of(local, 2, some, "numa")[0] for local in range(2)] == [17, 1]
    assert devices.cores_of(0, 1, {"HIP_VISIBLE_DEVICES": "GPU-1234"}, "numa") is None, "nobody knows where it is"
    assert devices.cores_of(3, 8, {}, "none") is None
    assert devices.cores_of(1, 8, {}, "cores") == [9, 10, 11, 12, 13, 14, 15]


def test_cores_of_another_job_are_no_choice(frontier, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    assert devices.cores_of(4, 8, {}, "numa") == [1, 2] and devices.cores_of(0, 8, {}, "numa") is None


def test_nvidia_ranks_and_their_order(machine, monkeypatch):
    (machine / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
        (machine / "dev" / name).touch()
    buses = ["0000:1b:00.0", "0000:9d:00.0"]
    monkeypatch.setattr(devices, "nvidia_buses", lambda: buses)
    for bus, near in zip(buses, ("0-1", "2-3")):
        place = machine / "sys/bus/pci/devices" / bus
        place.mkdir(parents=True)
        (place / "local_cpulist").write_text(near)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    seen = devices.visibility((1, 0), {}, "auto")
    assert seen == {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [devices.cores_of(local, 2, seen, "numa") for local in range(2)] == [[2, 3], [0, 1]]
    assert devices.visibility((0,), {"CUDA_VISIBLE_DEVICES": "MIG-7,GPU-8"}, "auto")["CUDA_VISIBLE_DEVICES"] == "MIG-7"
    monkeypatch.setattr(devices, "nvidia_buses", list)
    assert devices.count({}) == 2, "without the driver's library, by the files"


@pytest.fixture
def interfaces(monkeypatch):
    def have(*names):
        monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(names)))

    return have


def test_slingshot_is_told_to_rccl(frontier, interfaces):
    interfaces("lo", "bond0", "hsn0", "hsn1")
    found = devices.fabric_defaults({"NCCL_NET_GDR_LEVEL": "SYS"})
    assert found["NCCL_SOCKET_IFNAME"] == "hsn" and found["FI_MR_CACHE_MONITOR"] == "userfaultfd"
    assert found["HSA_NO_SCRATCH_RECLAIM"] == "1" and "NCCL_NET_GDR_LEVEL" not in found, "what is set is left alone"


def test_other_networks_need_nothing(frontier, interfaces, machine):
    interfaces("lo", "eth0", "ib0")
    assert devices.fabric_defaults({}) == {"HSA_NO_SCRATCH_RECLAIM": "1"}
    (machine / "dev" / "kfd").unlink()
    interfaces("lo", "hsn0")
    assert devices.fabric_defaults({}) == {}, "a machine without accelerators"
    (machine / "dev" / "nvidiactl").touch()
    assert (
        "HSA_NO_SCRATCH_RECLAIM" not in devices.fabric_defaults({})
        and "FI_CXI_RX_MATCH_MODE" in devices.fabric_defaults({})
    )
