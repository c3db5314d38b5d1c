"""What a host is like, as JSON on standard output; and a small all-reduce. Started on every host by the doctor."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from megatron.worker import devices
from megatron.worker.place import worker_environment
from megatron.worker.rendezvous import open_store

PACKAGES = ("torch", "deepspeed", "transformers", "pydantic", "tokenizers")
SIZE = 1 << 20  # elements of the all-reduce, 4 bytes each


def facts(shared: str) -> dict[str, Any]:
    """Everything the doctor looks at. `shared` is a folder that should be the same on all hosts."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "kernel": platform.release(),
        "driver": driver(),
        "accelerators": devices.count(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm": shm.total if shm else 0,
        "shm free": shm.free if shm else 0,
        "disk free": shutil.disk_usage(".").free,
        "shared": _shared(Path(shared)),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def driver() -> str:
    """The accelerator's driver: "NVIDIA 550.54", "amdgpu 6.7", or "none"."""
    amd = Path("/sys/module/amdgpu/version")
    if devices.vendor() == "amd":
        return f"amdgpu {amd.read_text().strip()}" if amd.exists() else "amdgpu"
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return "none"
    text = ctypes.create_string_buffer(80)
    if library.nvmlInit_v2() != 0:
        return "NVIDIA, but its library does not work"
    try:
        return f"NVIDIA {text.value.decode()}" if library.nvmlSystemGetDriverVersion(text, 80) == 0 else "NVIDIA"
    finally:
        library.nvmlShutdown()


def _shared(folder: Path) -> bool:
    """Whether the doctor's file is in the folder here too, and it can be written to."""
    try:
        content = (folder / "token").read_text()
        (folder / f"seen.{os.environ['RANK']}").write_text(content)
    except OSError:
        return False
    return True


def reduce(backend: str) -> dict[str, Any]:
    """All-reduce of 4 MiB over all hosts: seconds of the fastest of five, and whether the sum is right."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place, timeout = worker_environment(), timedelta(seconds=30)
    rank, world = place.rank, place.world_size
    store = open_store(rank, world, place.master_address, place.master_port, timeout, one_host=place.one_host)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    times = []
    for _ in range(5):
        data = torch.full((SIZE,), float(rank + 1), device=device)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    right = bool((data == world * (world + 1) / 2).all())
    dist.destroy_process_group()
    return {"seconds": min(times), "right": right, "bytes": 4 * SIZE}


def main(arguments: list[str]) -> int:
    """`facts FOLDER` or `reduce BACKEND`."""
    answer = facts(arguments[1]) if arguments[0] == "facts" else reduce(arguments[1])
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
