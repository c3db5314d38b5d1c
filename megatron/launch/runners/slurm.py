"""The hosts of the Slurm allocation we are in, by one srun with one agent per host: no ssh, no hostfile.

srun gives its input to every task and brings their output back, so nothing else is needed. It must never get a TERM
itself (it would kill its tasks at once): signals go to the agents, over its input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..connection import Command
from ..specification import Specification
from .agent_command import agent_command

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection


def commands(job: Specification, launch: LaunchSection) -> list[Command]:
    number = len(job.hosts)
    # Always both -N and --ntasks-per-node: with one of them Slurm may put several tasks on one host.
    options = [
        "-N",
        str(number),
        "-n",
        str(number),
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--mpi=none",
        "--overlap",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--no-kill",
    ]
    options.append("--nodelist=" + ",".join(host.name for host in job.hosts))
    agent = [*agent_command(launch.python), "--index", "SLURM_NODEID"]
    return [Command(("srun", *options, *agent), tuple(range(number)), index=None)]
