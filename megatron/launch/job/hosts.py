"""The hosts of a run (a hostfile, with hosts included or excluded), and the runner that starts its ranks there."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.registry import RUNNER, Registry, registry_of
from megatron.worker import devices

from ..runner import Runner, runner_of
from ..wire.specification import Host

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection
    from ..wire.protocol import Command
    from ..wire.specification import Specification


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")  # what ssh, pdsh and a log can all take as it is

MOST_SLOTS = 4096  # ranks of one host (the largest have a few hundred processors)


class HostError(ValueError):
    """A list of hosts that cannot be right."""


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a file with one `name slots=N` per line. `#` starts a comment.

    A missing file is an error: a start on only this machine was not asked for.

    Raises:
        HostError: no such file, or lines that are wrong: all of them at once, with their numbers.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise HostError(f"launch.hostfile: {path}: {error.strerror}") from error
    hosts: list[Host] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
            if any(host.name == other.name for other in hosts):
                raise HostError(f"host {host.name} is there twice")
            hosts.append(host)
        except HostError as error:
            problems.append(f"{path}:{number}: {error}")
    if not hosts and not problems:
        problems.append(f"{path}: no host in it: write one `name slots=N` per line")
    if problems:
        raise HostError("\n".join(problems))
    return hosts


def _host(words: list[str]) -> Host:
    name, *options = words
    if not _NAME.fullmatch(name):
        raise HostError(f"{name!r} is not a host name")
    if len(options) != 1 or not re.fullmatch(r"slots=[1-9]\d*", options[0]):
        raise HostError(f"after {name} there must be only `slots=N`, not {' '.join(options) or 'nothing'!r}")
    count = options[0][6:]
    if len(count) > 9 or int(count) > MOST_SLOTS:
        raise HostError(f"{name} has {count[:20]} slots, and must have at most {MOST_SLOTS}, one for each rank")
    return Host(name, tuple(range(int(count))))


def select(hosts: list[Host], include: str | None = None, exclude: str | None = None) -> list[Host]:
    """The hosts and slots that remain, in DeepSpeed's syntax: `name@name:0,2` (parts joined by `@`).

    Args:
        hosts: all hosts.
        include: use these hosts or slots only, in their order in `hosts`.
        exclude: without these.

    Raises:
        HostError: both are given, a name or slot is unknown, or nothing remains.
    """
    if include and exclude:
        raise HostError("launch.include and launch.exclude cannot be given together: one of them says it all")
    key, text = ("launch.include", include) if include else ("launch.exclude", exclude)
    if not text:
        return hosts
    named = _named(hosts, text, key)
    remaining = []
    for host in hosts:
        if include:
            slots = named.get(host.name, ())
        else:
            slots = tuple(slot for slot in host.slots if slot not in named.get(host.name, ()))
        if slots:
            remaining.append(Host(host.name, slots))
    if not remaining:
        raise HostError(f"{key} {text!r} leaves no host")
    return remaining


def _named(hosts: list[Host], text: str, key: str) -> dict[str, tuple[int, ...]]:
    """Slots by host name, of `name`, or `name:slot,slot`, joined by `@`."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, slots = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "")
        if name not in known:
            raise HostError(
                f"{key}: no host {name!r}. There are {', '.join(list(known)[:8])}{' ...' if len(known) > 8 else ''}"
            )
        if not colon:
            chosen = known[name].slots
        elif re.fullmatch(r"\d+(,\d+)*", slots):
            chosen = tuple(sorted({int(slot) for slot in slots.split(",")}))
        else:
            raise HostError(f"{key}: {part!r} must be a host, or a host and slots as in name:0,2")
        wrong = [slot for slot in chosen if slot not in known[name].slots]
        if wrong:
            raise HostError(f"{key}: host {name} has no slot {wrong[0]}. It has {len(known[name].slots)}, from 0")
        found[name] = tuple(sorted({*found.get(name, ()), *chosen}))
    return found


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
        raise HostError(f"launch.ranks is {ranks} on each host, but {path} gives {host.name} {len(host.slots)} slots")
    return Host(host.name, host.slots[:ranks])
