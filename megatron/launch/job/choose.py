"""Which runner starts the ranks, on which hosts: from the launch section and from where we are."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.config.registry import RUNNER, Registry, registry_of
from megatron.worker import devices

from ..runner import Runner, runner_of
from ..wire.specification import Host
from .hosts import HostError, read_hostfile, select

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection
    from ..wire.connection import Command
    from ..wire.specification import Specification

HERE, BY_HOSTFILE = "local", "ssh"  # what `auto` takes without and with a hostfile
JOB_SCRIPT = "slurm"  # what a job script is written for


@dataclass(frozen=True)
class RunnerChoice:
    """The choice and its reason, in words for the user. `carrier` brings agents to the hosts where `runner` does not.
    `spares` are hosts without ranks, which may take the place of others."""

    runner: str
    hosts: tuple[Host, ...]
    reason: str
    carrier: str = ""
    registry: Registry = field(default_factory=registry_of, repr=False)
    spares: tuple[Host, ...] = ()

    @property
    def transport(self) -> str:
        """The runner that brings agents to the hosts: torchrun itself stands on another one."""
        return self.carrier or self.runner

    @property
    def starter(self) -> Runner:
        """The thing that the name of `transport` stands for."""
        return runner_of(self.registry, self.transport)

    @property
    def wrapper(self) -> Runner:
        """The thing that the name of `runner` stands for."""
        return runner_of(self.registry, self.runner)

    @property
    def ranks(self) -> int:
        return sum(len(host.slots) for host in self.hosts)

    def commands(self, job: Specification, launch: LaunchSection) -> list[Command]:
        """The runner that starts the agents of a job."""
        start = self.starter.commands
        if start is None:
            raise ValueError(f"{self.transport} starts no agents: it stands on another runner")
        return start(job, launch)


def choose_runner(
    launch: LaunchSection, environment: Mapping[str, str], registry: Registry | None = None
) -> RunnerChoice:
    """The runner and the hosts.

    `auto` takes, in this order: the hostfile, if one is named, then the scheduler's allocation around us, then this
    machine.

    Args:
        registry: has the runners. None takes the package's own.

    Raises:
        HostError: the hosts cannot be right, or the runner does not fit to where we are.
        UserError: the runner cannot be used.
    """
    registry = registry or registry_of()
    if "RANK" in environment and "WORLD_SIZE" in environment:
        raise HostError(
            "RANK and WORLD_SIZE are set: something has started ranks already. Start the script itself there "
            "(`python train.py a.yml`), or unset them to let deepy.py start the ranks"
        )
    carrier, reason = _where(launch, environment, registry)
    if launch.runner == "auto":
        runner, carrier = carrier, ""
    elif runner_of(registry, launch.runner).wrap:
        runner, reason = launch.runner, f"launch.runner says so, by {carrier}: {reason}"
    else:
        runner, carrier, reason = launch.runner, "", "launch.runner says so"
    name = carrier or runner
    starter = runner_of(registry, name)
    if starter.here and launch.hostfile:
        raise HostError(f"launch.runner is {name}, but there is a launch.hostfile: remove one of them")
    hosts = _hosts(launch, name, starter, environment)
    if starter.program and not shutil.which(starter.program):
        raise HostError(f"launch.runner {name} needs the program {starter.program}, which is not installed here")
    used, spares = _kept_back(hosts, launch.spares)
    return RunnerChoice(runner, used, reason, carrier, registry, spares)


def _kept_back(hosts: list[Host], spares: int) -> tuple[tuple[Host, ...], tuple[Host, ...]]:
    """The hosts that ranks start on, and the spares.

    Raises:
        HostError: no host would be left, or a spare could take no place.
    """
    number = len(hosts) - spares
    if number < 1:
        raise HostError(f"launch.spares must be fewer than the hosts: {spares} of {len(hosts)}")
    used, kept = tuple(hosts[:number]), tuple(hosts[number:])
    least = min(len(host.slots) for host in used)
    if small := [host.name for host in kept if len(host.slots) < least]:
        raise HostError(f"launch.spares: {', '.join(small)} must have at least {least} slots, as the other hosts have")
    return used, kept


def some_hosts(launch: LaunchSection) -> RunnerChoice:
    """Hosts that a scheduler will give later.

    Raises:
        HostError: the number of ranks of a host is not known.
    """
    if launch.ranks is None:
        raise HostError("a job script needs the number of ranks on each host: --ranks N (launch.ranks)")
    if launch.spares >= launch.batch.nodes:
        raise HostError(f"launch.spares must be fewer than launch.batch.nodes: {launch.spares} of {launch.batch.nodes}")
    nodes = launch.batch.nodes - launch.spares
    hosts = tuple(Host(f"host{index}", tuple(range(launch.ranks))) for index in range(nodes))
    return RunnerChoice(JOB_SCRIPT, hosts, "for a job script")


def _where(launch: LaunchSection, environment: Mapping[str, str], registry: Registry) -> tuple[str, str]:
    """The natural runner of this place, and why."""
    if launch.hostfile:
        return BY_HOSTFILE, f"hosts of {launch.hostfile}"
    for name in registry.names(RUNNER):
        if reason := runner_of(registry, name).inside(environment):
            return name, reason
    return HERE, "one machine: no hostfile, no Slurm job"


def _hosts(launch: LaunchSection, name: str, runner: Runner, environment: Mapping[str, str]) -> list[Host]:
    if launch.hostfile:
        hosts = read_hostfile(launch.hostfile)
        if launch.ranks:
            hosts = [_cut(host, launch.ranks, launch.hostfile) for host in hosts]
    elif runner.hosts:
        hosts = runner.hosts(launch, environment)
    elif runner.needs_hostfile:
        raise HostError(f"launch.runner {name} needs launch.hostfile (--hostfile FILE)")
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
