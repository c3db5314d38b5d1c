"""Hosts reached by MPI, one agent each: Open MPI's mpirun, or MPICH's mpiexec (hydra).

mpirun gives its input to one rank only, so the agents call back."""

from __future__ import annotations

import os
import shlex
import shutil
from typing import TYPE_CHECKING

from ..runner import Runner, agent_command
from ..wire.protocol import Command
from ..wire.specification import Specification

if TYPE_CHECKING:
    from ...config.sections.layout import LaunchSection


def _agents(
    job: Specification, launch: LaunchSection, programs: tuple[str, ...], options: list[str], rank: str, **own: str
) -> list[Command]:
    """One command for all hosts, by the first of `programs` that is installed. `rank` is the variable with a host's
    number, and `own` are variables of the command."""
    program = next((each for each in programs if shutil.which(each)), programs[-1])
    agent = agent_command(job, launch, "--index", rank, "--credentials", "JOB_CREDENTIALS")
    return [Command((program, *options, *agent), tuple(range(len(job.hosts))), dials=True, environment=own)]


def _ssh(launch: LaunchSection) -> str:
    """Options of the ssh that MPI's program starts."""
    return shlex.join([*launch.ssh_options, *(["-p", str(launch.ssh_port)] if launch.ssh_port else [])])


def _openmpi(job: Specification, launch: LaunchSection) -> list[Command]:
    options, places = ["--oversubscribe"], "ppr:1:node"
    if launch.hostfile:  # other mappings begin with the host that mpirun is on, wherever it is in the list
        options, places = ["--host", ",".join(host.name for host in job.hosts)], "seq"
    options += ["-np", str(len(job.hosts)), "--map-by", places, "--bind-to", "none", "-x", "JOB_CREDENTIALS"]
    if launch.interface:
        options += ["--mca", "oob_tcp_if_include", launch.interface]
    if ssh := _ssh(launch):
        options += ["--mca", "plm_rsh_args", ssh]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    return _agents(job, launch, ("mpirun.openmpi", "mpirun"), options, "OMPI_COMM_WORLD_RANK")


def _mpich(job: Specification, launch: LaunchSection) -> list[Command]:
    options = ["-hosts", ",".join(host.name for host in job.hosts)] if launch.hostfile else []
    options += ["-n", str(len(job.hosts)), "-ppn", "1"]
    if launch.interface:
        options += ["-iface", launch.interface]
    ssh = _ssh(launch)
    own = {"HYDRA_LAUNCHER_EXTRA_ARGS": ssh} if ssh else {}
    return _agents(job, launch, ("mpiexec.hydra", "mpiexec.mpich", "mpiexec"), options, "PMI_RANK", **own)


OPENMPI = Runner(_openmpi, program="mpirun")
MPICH = Runner(_mpich, program="mpiexec")
