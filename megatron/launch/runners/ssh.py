"""This machine by a child of the launcher, and hosts by ssh (a connection each) or pdsh (one command for all).

pdsh carries no input, so its agents call the launcher. The address and secret for that are in a file, which must be on
a disk that all hosts share. ssh needs none: its input and output are the agent's."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..runner import Runner, agent_command
from ..wire.protocol import Command
from ..wire.specification import Specification

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection

# Never ask anything, and notice within 15 s that a host has fallen silent. The first value of an option counts
# for ssh, so the user's come before these.
OPTIONS = "-T -x -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3".split()
FAN_OUT = 1024  # connections that pdsh has at once


def _local(job: Specification, launch: LaunchSection) -> list[Command]:
    return [Command(tuple(agent_command(job, launch)), (0,), index=0)]


def _ssh_options(launch: LaunchSection) -> list[str]:
    port = ["-p", str(launch.ssh_port)] if launch.ssh_port else []
    return [*launch.ssh_options, *port, *OPTIONS]


def _ssh(job: Specification, launch: LaunchSection) -> list[Command]:
    remote = "exec " + shlex.join(agent_command(job, launch))
    return [
        Command(("ssh", *_ssh_options(launch), host.name, remote), (index,), index=index)
        for index, host in enumerate(job.hosts)
    ]


def _pdsh(job: Specification, launch: LaunchSection) -> list[Command]:
    # pdsh itself replaces %n by the host's number, and %% by a percent sign.
    agent = shlex.join(agent_command(job, launch)).replace("%", "%%")
    file = job.credentials_file
    remote = f"exec {agent} --index %n --credentials {shlex.quote(file).replace('%', '%%')}"
    names = ",".join(host.name for host in job.hosts)
    arguments = ("pdsh", "-S", "-R", "ssh", "-f", str(FAN_OUT), "-w", names, remote)
    own = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": shlex.join(_ssh_options(launch))}
    return [Command(arguments, tuple(range(len(job.hosts))), dials=True, credentials_file=file, environment=own)]


LOCAL = Runner(_local, here=True)
SSH = Runner(_ssh, program="ssh", needs_hostfile=True)
PDSH = Runner(_pdsh, program="pdsh", needs_hostfile=True)
