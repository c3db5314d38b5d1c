"""Hosts reached by pdsh: one command for all. pdsh carries no input, so the agents call the launcher.

The address and secret for that are in a file, which must be on a disk that all hosts share. The ssh runner needs none.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ..runner import Runner
from ..wire.connection import Command
from ..wire.specification import Specification
from .agent_command import agent_command
from .ssh import ssh_options

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection

FAN_OUT = 1024


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    # pdsh itself replaces %n by the host's number, and %% by a percent sign.
    agent = shlex.join(agent_command(job, launch)).replace("%", "%%")
    file = job.credentials_file
    remote = f"exec {agent} --index %n --credentials {shlex.quote(file).replace('%', '%%')}"
    names = ",".join(host.name for host in job.hosts)
    arguments = ("pdsh", "-S", "-R", "ssh", "-f", str(FAN_OUT), "-w", names, remote)
    environment = {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": shlex.join(ssh_options(launch))}
    return [
        Command(arguments, tuple(range(len(job.hosts))), dials=True, credentials_file=file, environment=environment)
    ]


RUNNER = Runner(commands, program="pdsh", needs_hostfile=True)
