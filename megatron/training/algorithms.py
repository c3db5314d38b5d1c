"""Algorithms of a run's collectives: sums in shared memory of a host, and a table that is checked against the job."""

import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.format.communicator import from_rank_0
from megatron.config import Config
from megatron.config.arithmetic.algorithm_table import OTHER, AlgorithmTable, table_of
from megatron.parallel.transport.routes import Router, Routes, groups_of
from megatron.parallel.transport.shared_sums import SharedSums
from megatron.worker.place import StartError

from .world import World


def hosts_of(config: Config, world: World) -> list[Hashable]:
    """The host of each rank, or the island where the configuration has islands. All ranks call it."""
    island = config.parallel.communication.island
    if island is not None:
        return [rank // island for rank in range(world.mesh.layout.world_size)]
    return list(world.communicator.gather(gethostname()))


def pairs_of(config: Config, hosts: Sequence[Hashable]) -> list[Hashable]:
    """The pair of each rank, where the configuration has pairs.

    Args:
        hosts: of each rank, the same on all ranks.

    Raises:
        StartError: ranks of a pair are on several hosts.
    """
    pair = config.parallel.communication.pair
    if pair is None:
        return []
    for first in range(0, len(hosts), pair):
        own = list(dict.fromkeys(hosts[first : first + pair]))
        if len(own) > 1:
            raise StartError(
                f"parallel.communication.pair must lie within a host: with {pair}, ranks {first} to "
                f"{min(first + pair, len(hosts)) - 1} are one pair, on {', '.join(map(str, own))}. Fix: give a number "
                "that divides the ranks of each host, or remove the key"
            )
    return [rank // pair for rank in range(len(hosts))]


def device_words(device: torch.device) -> str:
    """The name of an accelerator, or of a host's processor."""
    return processor() if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def job_facts(world: World, hosts: list[Hashable]) -> dict[str, Any]:
    """The job that a table is made for."""
    return {
        "ranks": world.mesh.layout.world_size,
        "hosts": len(set(hosts)),
        "backend": dist.get_backend(),
        "device": device_words(world.device),
    }


def memory_of_hosts(config: Config, log: Callable[[str], Any]) -> AbstractContextManager[Any]:
    """Sum gradients of a host's ranks in their shared memory, in this context. Does nothing where a key forbids it.

    Args:
        log: gets a line if that is impossible.
    """
    return SharedSums(log).installed() if config.parallel.communication.shared_memory else nullcontext()


@contextmanager
def chosen_algorithms(config: Config, world: World, log: Callable[[str], Any]) -> Iterator[None]:
    """Route collectives by the table, in this context. All ranks call it.

    Raises:
        StartError: there is no such table, or it is for another job.
    """
    path = config.parallel.communication.table
    if path is None or world.mesh.layout.world_size == 1:
        yield
        return
    table, hosts = _read(path, world), hosts_of(config, world)
    facts = job_facts(world, hosts)
    device = facts.pop("device")
    key = f"parallel.communication.table: {path}"
    if wrong := table.differs(facts):
        raise StartError(
            f"{key} must have been made on such a job ({'; '.join(wrong)}). "
            "Fix: make one with bench/communication.py --tune, or remove the key"
        )
    names = {name for steps in table.choices.values() for _, name in steps if name.startswith(OTHER)}
    missing = sorted(name for name in names if not dist.is_backend_available(name.removeprefix(OTHER)))
    if any(lacking := world.communicator.gather(missing)):
        where = [str(rank) for rank, each in enumerate(lacking) if each]
        raise StartError(
            f"{key} must name backends that torch has, and has {', '.join(sorted(set(sum(lacking, []))))}, which "
            f"ranks {', '.join(where)} lack. Fix: make the table again on this installation"
        )
    if table.facts["device"] != device:
        log(f"warning: {key} was measured on {table.facts['device']}, and this is {device}: its choices may be slow")
    mesh, routes = world.mesh, Routes(table, hosts, pairs_of(config, hosts))
    router = Router(routes, groups_of(mesh.layout, mesh.at), mesh.rank, mesh.timeout)
    for line in described(table, router):
        log(line)
    with router.installed():
        yield


def _read(path: str, world: World) -> AlgorithmTable:
    """Read by rank 0, so that all ranks have the same table."""

    def read() -> str:
        text = Path(path).read_text(encoding="utf-8")
        table_of(text)
        return text

    text, failure = from_rank_0(world.communicator, read, OSError, ValueError)
    if failure:
        raise StartError(
            f"parallel.communication.table: {path} must be a machine.yml with algorithms ({failure}). "
            "Fix: make one with bench/communication.py --tune"
        )
    return table_of(text)


def described(table: AlgorithmTable, router: Router) -> Iterator[str]:
    """The table's choices in the groups of this rank, a line for each operation and form of group."""
    forms = {(way.hosts, way.ranks) for way in router.ways.values()}
    for (operation, hosts, ranks), steps in sorted(table.choices.items()):
        if (hosts, ranks) in forms:
            words = ", ".join(f"{name} from {size:,} bytes" for size, name in steps)
            yield f"communication: {operation} of {ranks} ranks on {hosts} hosts: {words}"
