"""Hosts reached by MPICH's mpiexec (hydra), one agent each. The agents call back."""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING

from ..runner import Runner
from ..wire.connection import Command
from ..wire.specification import Specification
from .agent_command import agent_command

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection

PROGRAMS = ("mpiexec.hydra", "mpiexec.mpich", "mpiexec")


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    program = next((each for each in PROGRAMS if shutil.which(each)), PROGRAMS[-1])
    number = len(job.hosts)
    options = ["-hosts", ",".join(host.name for host in job.hosts)] if launch.hostfile else []
    options += ["-n", str(number), "-ppn", "1"]
    if launch.interface:
        options += ["-iface", launch.interface]
    ssh = [*launch.ssh_options, *(["-p", str(launch.ssh_port)] if launch.ssh_port else [])]
    agent = agent_command(job, launch, "--index", "PMI_RANK", "--credentials", "JOB_CREDENTIALS")
    environment = {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(ssh)} if ssh else {}
    return [Command((program, *options, *agent), tuple(range(number)), dials=True, environment=environment)]


RUNNER = Runner(commands, program="mpiexec")
