"""Which runner starts the ranks, on which hosts: from the launch section and from where we are."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.worker import devices
from megatron.worker.slurm_nodes import expand

from .hosts import HostError, read_hostfile, select
from .specification import Host

if TYPE_CHECKING:
    from ..config.sections.layout import LaunchSection


@dataclass(frozen=True)
class RunnerChoice:
    """What was chosen, and why, in words for the user. `carrier` brings agents to the hosts where `runner` does not."""

    runner: str
    hosts: tuple[Host, ...]
    reason: str
    carrier: str = ""

    @property
    def transport(self) -> str:
        """The runner that brings agents to the hosts: torchrun itself stands on another one."""
        return self.carrier or self.runner

    @property
    def ranks(self) -> int:
        return sum(len(host.slots) for host in self.hosts)


def choose(launch: LaunchSection, environment: Mapping[str, str]) -> RunnerChoice:
    """The runner and the hosts.

    `auto` takes, in this order: the hostfile, if one is named; the Slurm allocation we are in; this machine.

    Raises:
        HostError: the hosts cannot be right, or the runner does not fit to where we are.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        raise HostError(
            "RANK and WORLD_SIZE are set: something has started ranks already. Start the script itself there "
            "(`python train.py a.yml`), or unset them to let deepy.py start the ranks"
        )
    carrier, reason = _where(launch, environment)
    if launch.runner == "auto":
        runner, carrier = carrier, ""
    elif launch.runner == "torchrun":
        runner, reason = "torchrun", f"launch.runner says so; by {carrier}: {reason}"
    else:
        runner, carrier, reason = launch.runner, "", "launch.runner says so"
    if runner == "local" and launch.hostfile:
        raise HostError("launch.runner is local, but there is a launch.hostfile: remove one of them")
    hosts = _hosts(launch, carrier or runner, environment)
    program = {"ssh": "ssh", "pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun", "mpich": "mpiexec"}.get(
        carrier or runner
    )
    if program and not shutil.which(program):
        raise HostError(f"launch.runner {carrier or runner} needs the program {program}, which is not installed here")
    return RunnerChoice(runner, tuple(hosts), reason, carrier)


def some_hosts(launch: LaunchSection) -> RunnerChoice:
    """Hosts that a scheduler will give later.

    Raises:
        HostError: nobody says how many ranks each of them has.
    """
    if launch.ranks is None:
        raise HostError("a job script needs the number of ranks on each host: --ranks N (launch.ranks)")
    hosts = tuple(Host(f"host{index}", tuple(range(launch.ranks))) for index in range(launch.batch.nodes))
    return RunnerChoice("slurm", hosts, "for a job script")


def _where(launch: LaunchSection, environment: Mapping[str, str]) -> tuple[str, str]:
    """The natural runner of this place, and why."""
    if launch.hostfile:
        return "ssh", f"hosts of {launch.hostfile}"
    if "SLURM_JOB_ID" in environment:
        return "slurm", f"inside Slurm job {environment['SLURM_JOB_ID']}"
    return "local", "one machine: no hostfile, no Slurm job"


def _hosts(launch: LaunchSection, runner: str, environment: Mapping[str, str]) -> list[Host]:
    if launch.hostfile:
        hosts = read_hostfile(launch.hostfile)
        if launch.ranks:
            hosts = [_cut(host, launch.ranks, launch.hostfile) for host in hosts]
    elif runner == "slurm":
        hosts = _allocation(launch, environment)
    elif runner in ("ssh", "pdsh"):
        raise HostError(f"launch.runner {runner} needs launch.hostfile (--hostfile FILE)")
    else:
        ranks = launch.ranks or devices.ranks_here({**environment, **launch.environment}, launch.device)
        hosts = [Host(socket.gethostname(), tuple(range(ranks)))]
    return select(hosts, launch.include, launch.exclude)


def _cut(host: Host, ranks: int, path: str) -> Host:
    if ranks > len(host.slots):
        raise HostError(
            f"launch.ranks asks for {ranks} ranks on each host, but {path} gives {host.name} {len(host.slots)} slots"
        )
    return Host(host.name, host.slots[:ranks])


def _allocation(launch: LaunchSection, environment: Mapping[str, str]) -> list[Host]:
    """The hosts of the Slurm job we are in, each with as many ranks as it has GPUs (or tasks) for us."""
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise HostError(
            "launch.runner slurm works inside an allocation (salloc or sbatch); "
            "`deepy.py --sbatch ...` writes and submits a job script"
        )
    ranks = launch.ranks or next(
        (
            number
            for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE")
            if (number := _last_number(environment.get(name, "")))
        ),
        1,
    )
    try:
        return [Host(name, tuple(range(ranks))) for name in expand(nodes)]
    except ValueError as error:
        raise HostError(f"SLURM_JOB_NODELIST: {error}") from error


def _last_number(text: str) -> int:
    """The number of "8", "h100:8" or "gpu:h100:8"; 0 if there is none."""
    last = text.rpartition(":")[2]
    return int(last) if last.isdigit() else 0
