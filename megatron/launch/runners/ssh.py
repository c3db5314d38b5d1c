"""Hosts reached by ssh: one connection each, whose input and output are the agent's."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..runner import Runner
from ..wire.connection import Command
from ..wire.specification import Specification
from .agent_command import agent_command

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection

# Never ask anything, and notice within 15 s that a host has fallen silent. The first value of an option counts
# for ssh, so the user's come before these.
OPTIONS = (
    "-T",
    "-x",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)


def ssh_options(launch: LaunchSection) -> list[str]:
    """Options that go before the host's name."""
    port = ["-p", str(launch.ssh_port)] if launch.ssh_port else []
    return [*launch.ssh_options, *port, *OPTIONS]


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    remote = "exec " + shlex.join(agent_command(job, launch))
    return [
        Command(("ssh", *ssh_options(launch), host.name, remote), (index,), index=index)
        for index, host in enumerate(job.hosts)
    ]


RUNNER = Runner(commands, program="ssh", needs_hostfile=True)
