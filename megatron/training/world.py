"""This process among the others: device, process group, mesh, and communicators for checkpoints. Its wall time."""

import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint import SOLO, GroupCommunicator, StoreCommunicator
from megatron.checkpoint.format.communicator import Communicator
from megatron.config import Config
from megatron.engine.deepspeed.process import prepare_deepspeed
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.worker import devices
from megatron.worker.beacon import DONE, END, EVALUATE, NAMES, SAVE, SETUP, START, Beacon
from megatron.worker.job import check_agreement
from megatron.worker.place import WorkerEnvironment
from megatron.worker.rendezvous import leave_store, open_store

SINCE = "JOB_SINCE"  # when the launcher started the ranks
_KINDS = {START: "start", SETUP: "start", EVALUATE: "evaluation", SAVE: "save", END: "end"}


@dataclass(frozen=True)
class WallTime:
    """The account of one start of a run."""

    beacon: Beacon  # measures the phases of this process
    since: float = field(default_factory=time.time)  # time of launch, in seconds since the epoch
    before: float = 0.0  # seconds from then until the beacon was made
    attempt: int = 0  # number of earlier starts, which failed

    @classmethod
    def of(cls, beacon: Beacon, attempt: int, environment: Mapping[str, str] = os.environ) -> "WallTime":
        """From the launcher's start of this process. Without a launcher, from the start of the process."""
        now, age = time.time(), time.monotonic() - beacon.born
        try:
            since = float(environment[SINCE])
        except (KeyError, ValueError):
            since = now - _process_age(age)
        return cls(beacon, since, max(now - age - since, 0.0), attempt)

    def spent(self, completed: int) -> dict[str, Any]:
        """A mark for the ledger after this number of updates. See `megatron.report.ledger`."""
        kinds = {"start": self.before, "steps": 0.0, "evaluation": 0.0, "save": 0.0, "end": 0.0}
        within = {"waiting": 0.0}
        for phase, (seconds, waited) in enumerate(zip(self.beacon.spent(), self.beacon.waits())):
            kinds[_KINDS.get(phase, "steps")] += seconds
            if phase not in _KINDS:
                within[NAMES[phase]] = seconds - waited
                within["waiting"] += waited
        rounded = {kind: round(seconds, 6) for kind, seconds in kinds.items()}
        parts = {part: round(seconds, 6) for part, seconds in within.items()}
        return {"since": self.since, "attempt": self.attempt, "completed": completed, **rounded, "within": parts}


def _process_age(least: float) -> float:
    """Seconds since this process began, or `least` if the system does not provide it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), least)
    except (OSError, ValueError, IndexError, AttributeError):
        return least


@dataclass(frozen=True)
class World:
    """This process's place."""

    device: torch.device
    mesh: Mesh
    communicator: Communicator  # over all ranks, for the main thread
    background: Communicator  # over all ranks, for the thread that writes checkpoints
    beacon: Beacon = field(default_factory=Beacon)  # reports the phase of this process
    wall_time: WallTime | None = None  # the account of this start's time
    store: dist.Store | None = None  # of the rendezvous. None with one rank.

    @property
    def is_main(self) -> bool:
        return self.mesh.rank == 0


def choose_device(config: Config, local_rank: int) -> torch.device:
    """The accelerator of this rank, or the CPU.

    Raises:
        RuntimeError: launch.device asks for a missing accelerator, or torch cannot use the existing one.
    """
    wanted = config.launch.device
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _check_that_cpu_is_meant(wanted, local_rank)
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()  # the launcher may show each rank only its own device
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_that_cpu_is_meant(wanted: str, local_rank: int) -> None:
    """torch sees no GPU. If this machine has one that torch is built for, its driver is at fault."""
    built = {"nvidia": torch.version.cuda, "amd": torch.version.hip}
    here = devices.count() > 0
    if here and built.get(devices.vendor() or ""):
        raise RuntimeError(
            f"this machine has a GPU, but torch {torch.__version__} cannot use it: {_why_without_gpu()}. Fix that, "
            "install a torch built for this driver, or train on the CPU with launch.device=cpu"
        )
    if wanted != "auto":
        raise RuntimeError(
            "launch.device: cuda, but torch sees no GPU here. Use launch.device=cpu, or a torch built for this machine"
        )
    if here and local_rank == 0:
        warnings.warn(
            f"this machine has a GPU, but torch {torch.__version__} is built without it: training on the CPU",
            stacklevel=2,
        )


def _why_without_gpu() -> str:
    try:
        torch.cuda.init()
    except Exception as error:  # the driver's errors vary
        return " ".join(str(error).split()) or type(error).__name__
    return "it sees no device"


@contextmanager
def joined(config: Config, place: WorkerEnvironment) -> Iterator[World]:
    """The process group of all ranks, in this context. After a block without an error rank 0 leaves last."""
    world = join(config, place)
    try:
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    world.beacon.at(END, detail=DONE)
    if world.store is not None:
        leave_store(world.store, place.rank, place.world_size, timedelta(seconds=config.launch.timeout))


def join(config: Config, place: WorkerEnvironment) -> World:
    """Enter the process group, check that all ranks run the same thing, and build the mesh.

    The thread that writes checkpoints communicates over the rendezvous store: at 10,000 ranks, a second process
    group would mean a connection between every two of them."""
    beacon = Beacon.inherited()
    beacon.at(SETUP, detail=b"meeting the other ranks")
    wall_time = WallTime.of(beacon, place.attempt)
    os.environ.update(place.variables)
    device = choose_device(config, place.local_rank)
    if device.type == "cpu":
        # torch records the last 2,000 calls of gloo, 4 KB each. They fragment the heap between the tensors of a step,
        # which costs 0.13 MB a step. Hangs are diagnosed by the beacon.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    prepare_deepspeed(device)
    timeout = timedelta(seconds=config.launch.timeout)
    if place.world_size == 1:
        dist.init_process_group(_backend(device), rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
        return World(device, Mesh.single(), SOLO, SOLO, beacon, wall_time)
    rank, size = place.rank, place.world_size
    # torch queries the name service about numeric addresses too. One that does not answer delays even a local start.
    beacon.at(SETUP, detail=b"opening the store of the ranks, which needs an answer of the name service (DNS)")
    store = open_store(rank, size, place.master_address, place.master_port, timeout, one_host=place.one_host)
    beacon.at(SETUP, detail=b"meeting the other ranks")
    dist.init_process_group(
        _backend(device),
        store=dist.PrefixStore("ranks", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    communicator = GroupCommunicator(device=device)
    agree(place, communicator)
    mesh = Mesh.build(Layout.of(config, place.world_size), timeout)
    background = StoreCommunicator(store, rank, size, "background", config.launch.timeout)
    return World(device, mesh, communicator, background, beacon, wall_time, store)


def agree(place: WorkerEnvironment, communicator: Communicator) -> None:
    """Check that all ranks run what rank 0 runs. Only if one does not, gather all to report who differs.

    Raises:
        LaunchError: on every rank.
    """
    if communicator.any_rank([place.fingerprint != communicator.broadcast(place.fingerprint)])[0]:
        check_agreement(place, communicator.gather)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
