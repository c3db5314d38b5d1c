"""deepy.py where something else has started the ranks already (srun, mpirun, torchrun, a pod): it becomes one
of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from megatron.worker.place import worker_environment

from .job.job_plan import script_arguments
from .job.settings import launch_section

_NAMES = {
    "environment": "RANK and WORLD_SIZE are set",
    "slurm": "inside a step of srun",
    "openmpi": "inside mpirun",
    "mpich": "inside mpiexec",
}


def rank_command(
    script: str, words: Sequence[str], overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], str] | None:
    """The command that this process becomes, and rank 0's note about it, or None where the ranks are ours to start.

    Args:
        script, words, overrides: as in `make_plan`.
        environment: of this process.

    Raises:
        LaunchError: the environment makes no sense.
        ConfigError, ArgumentError: mistakes of the user.
    """
    place = worker_environment(environment)
    if place.world_size == 1 or place.starter not in _NAMES:
        return None
    taken = script_arguments(script, words)
    if launch_section(taken.files, [*taken.overrides, *overrides]).runner != "auto":
        return None
    own = ["--", *taken.own] if taken.own and not taken.own[0].startswith("-") else taken.own
    command = [sys.executable, "-u", script, *taken.files, *taken.overrides, *overrides, *own]
    said = f"no runner ({_NAMES[place.starter]}): this process is one of {place.world_size} ranks"
    return command, said if place.rank == 0 else ""
