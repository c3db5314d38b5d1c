"""The hosts of the Slurm allocation we are in, by one srun with one agent per host: no ssh, no hostfile.

srun gives its input to every task and brings their output back, so nothing else is needed. It must never get a TERM
itself (it would kill its tasks at once): signals go to the agents, over its input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron.worker.place import expand_nodes

from ..job.hosts import HostError
from ..runner import Runner, agent_command, srun_options
from ..wire.protocol import Command
from ..wire.specification import Host, Specification

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
    options += srun_options(job.directory, launch)
    # By name: srun numbers hosts (SLURM_NODEID) in the order of its own table, whatever the order of --nodelist.
    agent = agent_command(job, launch, "--host", "SLURMD_NODENAME")
    return [Command(("srun", *options, *agent), tuple(range(number)), index=None)]


def _inside(environment: Mapping[str, str]) -> str:
    return f"inside Slurm job {environment['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in environment else ""


def _allocation(launch: LaunchSection, environment: Mapping[str, str]) -> list[Host]:
    """The hosts of the Slurm job we are in, each with a rank for each of our GPUs (or tasks) there."""
    nodes = environment.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise HostError(
            "launch.runner slurm works inside an allocation (salloc or sbatch). "
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
        return [Host(name, tuple(range(ranks))) for name in expand_nodes(nodes)]
    except ValueError as error:
        raise HostError(f"SLURM_JOB_NODELIST: {error}") from error


def _last_number(text: str) -> int:
    """The number in "8", "h100:8" or "gpu:h100:8", or 0."""
    last = text.rpartition(":")[2]
    return int(last) if last.isdigit() else 0


RUNNER = Runner(commands, program="srun", hosts=_allocation, inside=_inside)
