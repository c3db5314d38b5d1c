"""Facts and speeds of a host as JSON on standard output, messages between hosts, and comparisons of hosts.

The doctor starts it on every host. A host is an outlier whose rate is below the median of the others by more than a
factor. Rates are the best of a few repetitions, since other work of a host makes it slower, never faster. In a pair
either side may be to blame. Each host therefore meets others in up to three rounds and counts by its best pair. Without
torch."""

import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from megatron.worker import devices
from megatron.worker.place import worker_environment
from megatron.worker.rendezvous import open_store

ROUNDS = 3


@dataclass(frozen=True)
class Measure:
    """What is compared."""

    name: str  # in the table and of the key of a host's answer
    unit: str  # of a shown rate
    size: float  # of that unit.
    # A host is slow that has less than the others' median by this factor. Disks and networks are shared with other
    # work, and vary more.
    factor: float
    advice: str  # what to do about such a host


MEASURES = (
    Measure("products", "GFLOP/s", 1e9, 1.3, "other work there, heat, a power limit, or a device that fails"),
    Measure("memory rate", "GB/s", 1e9, 1.3, "other work there, or memory modules that are missing or fail"),
    Measure("disk rate", "MB/s", 1e6, 3.0, "a disk that is full, busy or failing, or a slow way to the shared one"),
)
PAIRS = Measure("pairs", "MB/s", 1e6, 2.0, "its card, cable or port: ethtool, ibstat")


def partners(rank: int, world: int) -> list[int | None]:
    """Whom a host meets in each round, None where it waits: all pairs are different ones (the circle method of
    tournaments)."""
    seats = world + world % 2
    found: list[int | None] = []
    for round_ in range(min(seats - 1, ROUNDS)):
        circle = [0, *(1 + (place + round_) % (seats - 1) for place in range(seats - 1))]
        other = circle[seats - 1 - circle.index(rank)]
        found.append(other if other < world else None)
    return found


def best_pairs(answers: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """The rate of each host's best pair.

    Args:
        answers: of each host, the rate with each host that it met.
    """
    return {host: max(rates.values(), default=0.0) for host, rates in answers.items()}


def outliers(rates: Sequence[float], factor: float) -> list[tuple[int, float]]:
    """Hosts that are slower than the median of the others by more than a factor, and the others' median."""
    found = []
    for host, rate in enumerate(rates):
        others = [each for other, each in enumerate(rates) if other != host]
        if others and rate * factor < median(others):
            found.append((host, median(others)))
    return found


PACKAGES = ("torch", "deepspeed", "transformers", "pydantic", "tokenizers")
SIZE = 1 << 20  # elements of the all-reduce, 4 bytes each
COPIED, WRITTEN = 64 << 20, 32 << 20  # bytes of the copy in memory and of the file
REPEAT = 5


def facts(shared: str) -> dict[str, Any]:
    """All facts for the doctor. `shared` is a folder that should be the same on all hosts."""
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
    text = ctypes.create_string_buffer(80)
    with devices.nvidia_library() as library:
        if not library:
            return "none" if library is None else "NVIDIA, but its library does not work"
        return f"NVIDIA {text.value.decode()}" if library.nvmlSystemGetDriverVersion(text, 80) == 0 else "NVIDIA"


def _shared(folder: Path) -> bool:
    """Whether the doctor's file is in the folder here too, and it can be written to."""
    try:
        content = (folder / "token").read_text()
        (folder / f"seen.{os.environ['RANK']}").write_text(content)
    except OSError:
        return False
    return True


def speeds() -> dict[str, float]:
    """Rates of this host, the best of a few: floating-point operations, bytes copied and bytes written per second. With
    several devices, the slowest one counts. The disk is that of the current folder. With the number of devices."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    places = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    return {
        "products": min(map(_products, places)),
        "memory rate": min(map(_copies, places)),
        "disk rate": WRITTEN / _best(_write, lambda: None),
        "devices": count,
    }


def _products(device: Any) -> float:
    import torch

    width, kind = (4096, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    matrix = torch.ones(width, width, device=device, dtype=kind)
    return 2 * width**3 / _best(lambda: matrix @ matrix, _waiter(device))


def _copies(device: Any) -> float:
    import torch

    source = torch.ones(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _best(lambda: target.copy_(source), _waiter(device))


def _write() -> None:
    """A file without a name, on the disk: nothing is left, however this ends."""
    with tempfile.TemporaryFile(dir=".") as file:
        file.write(bytes(WRITTEN))
        file.flush()
        os.fsync(file.fileno())


def _waiter(device: Any) -> Callable[[], None]:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return wait


def _best(run: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Seconds of the fastest of a few, after one that warms up."""
    times = []
    for _ in range(1 + REPEAT):
        begin = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _join(backend: str) -> tuple[int, int, Any]:
    """(rank, ranks, device) once all hosts are in one process group."""
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
    return rank, world, device


def reduce(backend: str) -> dict[str, Any]:
    """All-reduce of 4 MiB over all hosts: seconds of the fastest of five, and whether the sum is right."""
    import torch
    import torch.distributed as dist

    rank, world, device = _join(backend)
    wait, times = _waiter(device), []
    for _ in range(REPEAT):
        data = torch.full((SIZE,), float(rank + 1), device=device)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        wait()
        times.append(time.perf_counter() - begin)
    right = bool((data == world * (world + 1) / 2).all())
    dist.destroy_process_group()
    return {"seconds": min(times), "right": right, "bytes": 4 * SIZE}


def pairs(backend: str) -> dict[str, Any]:
    """There and back again with each partner: bytes per second one way, the best of a few, by partner."""
    import torch
    import torch.distributed as dist

    rank, world, device = _join(backend)
    wait, data = _waiter(device), torch.ones(SIZE, device=device)
    rates: dict[int, float] = {}

    def there_and_back(other: int) -> None:
        if rank < other:
            dist.send(data, other)
            dist.recv(data, other)
        else:
            dist.recv(data, other)
            dist.send(data, other)

    for other in partners(rank, world):
        dist.barrier()  # rounds do not mix
        if other is not None:
            rates[other] = 2 * 4 * SIZE / _best(partial(there_and_back, other), wait)
    dist.barrier()
    dist.destroy_process_group()
    return {"rates": rates}


def main(arguments: list[str]) -> int:
    """`facts FOLDER`, `speeds`, `reduce BACKEND` or `pairs BACKEND`."""
    asked: dict[str, Callable[..., dict[str, Any]]]
    asked = {"facts": facts, "speeds": speeds, "reduce": reduce, "pairs": pairs}
    sys.stdout.write(json.dumps(asked[arguments[0]](*arguments[1:])) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
