"""The accelerators of this machine, found without torch; which of them a rank sees, and the cores near them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}


def vendor() -> str | None:
    """ "nvidia", "amd" or None."""
    if Path("/dev/kfd").exists():
        return "amd"
    if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        return "nvidia"
    return None


def visible(environment: Mapping[str, str]) -> list[str] | None:
    """What the environment lets a process see, as it names the devices; None where it does not say."""
    for name in VISIBLE.get(vendor() or "nvidia", ()):
        if name in environment:
            return [
                each.strip()
                for each in environment[name].split(",")
                if each.strip() not in ("", "-1", "NoDevFiles")
            ]
    return None


def count(environment: Mapping[str, str] = os.environ) -> int:
    """Accelerators that a process with this environment can use."""
    maker = vendor()
    if maker is None:
        return 0
    installed = _count_amd() if maker == "amd" else len(nvidia_buses()) or _count_nvidia_files()
    chosen = visible(environment)
    if chosen is None:
        return installed
    return sum(
        not name.isdigit() or int(name) < installed for name in chosen
    )  # a UUID or a MIG slice counts as it is


def ranks_here(environment: Mapping[str, str] = os.environ, device: str = "auto") -> int:
    """Ranks that this machine starts when nobody says how many: one per accelerator, or 1."""
    return 1 if device == "cpu" else max(count(environment), 1)


def visibility(slots: tuple[int, ...], environment: Mapping[str, str], device: str) -> dict[str, str]:
    """The variable that shows all ranks of a host exactly the devices of its slots, in their order.

    Ranks of a host see each other's devices (peer-to-peer copies need that) and take the one of LOCAL_RANK.
    A slot counts within what the environment already allows, as users of shared machines expect.
    """
    maker = vendor()
    if maker is None or device == "cpu":
        return {}
    names = visible(environment)
    if names is None:
        names = [str(index) for index in range(count({}))]
    if any(slot >= len(names) for slot in slots):
        if device == "auto" and not names:
            return {}
        raise ValueError(
            f"slots {list(slots)} ask for more than the {len(names)} visible devices ({', '.join(names) or 'none'})"
        )
    name = next((each for each in VISIBLE[maker] if each in environment), VISIBLE[maker][0])
    return {name: ",".join(names[slot] for slot in slots)}


def nvidia_buses() -> list[str]:
    """PCI bus identifiers of the NVIDIA devices of this machine, in index order, from the driver's library."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2() != 0:
        return []
    try:
        number = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(number)) != 0:
            return []
        return [_nvidia_bus(library, index) for index in range(number.value)]
    finally:
        library.nvmlShutdown()


class _PciInfo(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("name", ctypes.c_char * 32),
    ]


def _nvidia_bus(library: ctypes.CDLL, index: int) -> str:
    handle, info = ctypes.c_void_p(), _PciInfo()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return ""
    if library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(info)) != 0:
        return ""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


def _count_nvidia_files() -> int:
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia*"))


def _count_amd() -> int:
    nodes = Path("/sys/class/kfd/kfd/topology/nodes")
    if not nodes.exists():
        return 0
    return sum((node / "gpu_id").read_text().strip() not in ("", "0") for node in nodes.iterdir())


def parse_cores(text: str) -> list[int]:
    """Core numbers of the kernel's list form, "0-3,8,10-11"."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def cores_of(local_rank: int, local_ranks: int, slot: int, bind: str) -> list[int] | None:
    """Cores for a rank: None for all; with "numa" those next to its device; with "cores" an equal share of all."""
    allowed = sorted(os.sched_getaffinity(0))
    if bind == "cores" and len(allowed) >= local_ranks:
        share = len(allowed) // local_ranks
        return allowed[local_rank * share : (local_rank + 1) * share]
    if bind == "numa" and vendor() == "nvidia":
        names, buses = visible(os.environ), nvidia_buses()
        index = int(names[slot]) if names and slot < len(names) and names[slot].isdigit() else slot
        near = Path(f"/sys/bus/pci/devices/{buses[index]}/local_cpulist") if index < len(buses) else None
        if near and near.exists():
            return sorted(set(parse_cores(near.read_text())) & set(allowed)) or None
    return None


def threads_per_rank(local_ranks: int) -> int:
    """A sensible OMP_NUM_THREADS: this host's cores shared by its ranks."""
    return max(len(os.sched_getaffinity(0)) // local_ranks, 1)
