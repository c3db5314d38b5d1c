"""Hosts reached by Open MPI's mpirun, one agent each. mpirun gives its input to one rank only, so agents call back."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING

from ..runner import Runner
from ..wire.connection import Command
from ..wire.specification import Specification
from .agent_command import agent_command

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection

PROGRAMS = ("mpirun.openmpi", "mpirun")


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    program = next((each for each in PROGRAMS if shutil.which(each)), PROGRAMS[-1])
    number = len(job.hosts)
    options, places = ["--oversubscribe"], "ppr:1:node"
    if launch.hostfile:  # other mappings begin with the host that mpirun is on, wherever it is in the list
        options, places = ["--host", ",".join(host.name for host in job.hosts)], "seq"
    options += ["-np", str(number), "--map-by", places, "--bind-to", "none", "-x", "JOB_CREDENTIALS"]
    if launch.interface:
        options += ["--mca", "oob_tcp_if_include", launch.interface]
    ssh = [*launch.ssh_options, *(["-p", str(launch.ssh_port)] if launch.ssh_port else [])]
    if ssh:
        options += ["--mca", "plm_rsh_args", shlex.join(ssh)]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    agent = agent_command(job, launch, "--index", "OMPI_COMM_WORLD_RANK", "--credentials", "JOB_CREDENTIALS")
    return [Command((program, *options, *agent), tuple(range(number)), dials=True)]


RUNNER = Runner(commands, program="mpirun")
