"""The accelerators of this machine, found without torch: the devices that a rank sees, and the cores near them."""

import ctypes
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

# In the order in which they count: HIP takes HIP_VISIBLE_DEVICES before CUDA_VISIBLE_DEVICES, and either of them counts
# within what ROCR_VISIBLE_DEVICES, a level below, has left over.
VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}
DEV, SYS = Path("/dev"), Path("/sys")  # tests have others


def vendor() -> str | None:
    """ "nvidia", "amd" or None."""
    if (DEV / "kfd").exists():
        return "amd"
    if (DEV / "nvidiactl").exists() or (DEV / "dxg").exists():
        return "nvidia"
    return None


def visible(environment: Mapping[str, str]) -> list[str] | None:
    """The devices that the environment lets a process see, as it names them, or None."""
    return next((_names(environment[key]) for key in VISIBLE.get(vendor() or "nvidia", ()) if key in environment), None)


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip() not in ("", "-1", "NoDevFiles")]


def physical(environment: Mapping[str, str]) -> list[str]:
    """The devices that a process sees, in its order: as the driver numbers them, or by the name (UUID) given."""
    maker = vendor()
    found = [str(index) for index in range(_installed(maker))]
    chosen = [environment[name] for name in ("ROCR_VISIBLE_DEVICES",) if maker == "amd" and name in environment]
    above = (name for name in VISIBLE.get(maker or "", ()) if name != "ROCR_VISIBLE_DEVICES")
    chosen += [environment[name] for name in above if name in environment][:1]
    for text in chosen:
        names = [name for name in _names(text) if not name.isdigit() or int(name) < len(found)]
        found = [found[int(name)] if name.isdigit() else name for name in names]
    return found


def count(environment: Mapping[str, str] = os.environ) -> int:
    """Accelerators that a process with this environment can use."""
    return len(physical(environment))


def _installed(maker: str | None) -> int:
    if maker == "amd":
        return len(amd_buses())
    files = (path.name[6:] for path in DEV.glob("nvidia*"))
    return len(nvidia_buses()) or sum(map(str.isdigit, files)) if maker == "nvidia" else 0


def ranks_here(environment: Mapping[str, str] = os.environ, device: str = "auto") -> int:
    """Default number of ranks of this machine: one per accelerator, or 1."""
    return 1 if device == "cpu" else max(count(environment), 1)


def visibility(slots: tuple[int, ...], environment: Mapping[str, str], device: str) -> dict[str, str]:
    """The variable that shows all ranks of a host exactly the devices of its slots, in their order.

    Ranks of a host see each other's devices (peer-to-peer copies need that) and take the one of LOCAL_RANK.
    A slot counts within what the environment already allows, as users of shared machines expect."""
    maker = vendor()
    if maker is None or device == "cpu":
        return {}
    names = visible(environment)
    if names is None:
        names = [str(index) for index in range(count({}))]
    if any(slot >= len(names) for slot in slots):
        if device == "auto" and not names:
            return {}
        raise ValueError(f"slots {list(slots)} exceed the {len(names)} visible devices ({', '.join(names) or 'none'})")
    name = next((each for each in VISIBLE[maker] if each in environment), VISIBLE[maker][0])
    order = {"CUDA_DEVICE_ORDER": environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")} if maker == "nvidia" else {}
    return {name: ",".join(names[slot] for slot in slots), **order}  # the driver's order, in which cores are searched


@contextmanager
def nvidia_library() -> Iterator[ctypes.CDLL | None | Literal[False]]:
    """The library of NVIDIA's driver. None where there is none, False where it does not work."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if library.nvmlInit_v2() != 0:
        yield False
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def nvidia_buses() -> list[str]:
    """PCI bus identifiers of the NVIDIA devices of this machine, in index order, from the driver's library."""
    number = ctypes.c_uint()
    with nvidia_library() as library:
        if not library or library.nvmlDeviceGetCount_v2(ctypes.byref(number)) != 0:
            return []
        return [_nvidia_bus(library, index) for index in range(number.value)]


def name_of_first(environment: Mapping[str, str] = os.environ) -> str | None:
    """The first device that a process with this environment sees, as its maker and torch call it. None where there is
    none, or only torch could say (AMD, slices of a device). Takes nothing of the device."""
    seen = physical(environment) if vendor() == "nvidia" else []
    if not seen or not seen[0].isdigit():
        return None
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    with nvidia_library() as library:
        if not library or library.nvmlDeviceGetHandleByIndex_v2(int(seen[0]), ctypes.byref(handle)) != 0:
            return None
        return text.value.decode(errors="replace") if library.nvmlDeviceGetName(handle, text, 96) == 0 else None


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


def amd_buses() -> list[str]:
    """PCI bus identifiers of the AMD devices that this process may open, in index order, from the kernel's topology."""
    nodes = SYS / "class/kfd/kfd/topology/nodes"
    if not nodes.exists():
        return []
    found = []
    for node in sorted(nodes.iterdir(), key=lambda each: int(each.name)):
        try:
            if (node / "gpu_id").read_text().strip() in ("", "0"):  # a CPU
                continue
            values = dict(line.split() for line in (node / "properties").read_text().splitlines())
        except OSError:  # not ours: a container or a scheduler keeps it from us
            continue
        place = int(values.get("location_id", 0))
        found.append(f"{int(values.get('domain', 0)):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}")
    return found


def parse_cores(text: str) -> list[int]:
    """Core numbers of the kernel's list form, "0-3,8,10-11"."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def cores_of(local_rank: int, local_ranks: int, environment: Mapping[str, str], bind: str) -> list[int] | None:
    """Cores for a rank: None for all. "numa": the ones next to its device. "cores": an equal share of all.

    Args:
        environment: of the rank, which sees the devices of all ranks of its host.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if bind == "cores" and len(allowed) >= local_ranks:
        share = len(allowed) // local_ranks
        return allowed[local_rank * share : (local_rank + 1) * share]
    maker = vendor()
    if bind != "numa" or maker is None:
        return None
    seen, buses = physical(environment), amd_buses() if maker == "amd" else nvidia_buses()
    name = seen[local_rank] if local_rank < len(seen) else ""
    if not name.isdigit() or int(name) >= len(buses):  # a UUID, a slice of a device
        return None
    near = SYS / "bus/pci/devices" / buses[int(name)] / "local_cpulist"
    return sorted(set(parse_cores(near.read_text())) & set(allowed)) or None if near.exists() else None


def threads_per_rank(local_ranks: int) -> int:
    """A sensible OMP_NUM_THREADS: this host's cores shared by its ranks."""
    return max(len(os.sched_getaffinity(0)) // local_ranks, 1)


SLINGSHOT = {
    "NCCL_SOCKET_IFNAME": "hsn",  # a prefix: hsn0, hsn1, ... (the management network is slow, or closed)
    "NCCL_NET_GDR_LEVEL": "PHB",  # the network card reads the memory of GPUs behind the same host bridge
    "NCCL_CROSS_NIC": "1",  # rings may leave by one card and return by another: all cards are in one network
    "FI_MR_CACHE_MONITOR": "userfaultfd",  # the default hooks into malloc, and deadlocks with torch's allocator
    "FI_CXI_DISABLE_HOST_REGISTER": "1",  # registering host memory calls the GPU's runtime, which may deadlock there
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",  # room for completions when thousands of ranks talk at once
    "FI_CXI_RX_MATCH_MODE": "software",  # the card's own matching has room for few messages, and fails when it is full
}
# GPU memory that kernels have borrowed for their stacks is kept: giving it back stalls RCCL's kernels (AMD's RCCL
# guide).
AMD = {"HSA_NO_SCRATCH_RECLAIM": "1"}


def fabric_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this host's network and devices call for and `environment` does not have."""
    maker = vendor()
    if maker is None:
        return {}
    wanted = dict(AMD) if maker == "amd" else {}
    if any(name.startswith("hsn") for _, name in socket.if_nameindex()):
        wanted |= SLINGSHOT
    return {name: value for name, value in wanted.items() if name not in environment}
