"""A worker's place in the world, however it was started: by the agent, torchrun, srun, mpirun, or by hand."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import arguments as words
from . import fabric
from .code_version import code_version
from .network import free_port, interface_towards
from .slurm_nodes import expand
from .status import CONFIG_ERROR

if TYPE_CHECKING:
    from ..config.schema import Config


class LaunchError(RuntimeError):
    """The environment that this process was started in does not make sense."""


class StartError(LaunchError):
    """What a run should start from is missing, damaged or does not fit: starting it again would not help."""


@dataclass(frozen=True)
class WorkerEnvironment:
    """Where this process stands.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among those of this host.
        master_address, master_port: where rank 0 listens.
        starter: "agent", "environment" (torchrun, deepspeed, ...), "slurm", "openmpi", "mpich" or "single".
        config_sha256: digest of the values of the configuration that this rank has read; set by `read_job`.
        config_text: the resolved configuration as a file, with the origin of each value; set by `read_job`.
        attempt: how often the run has been started again after a failure.
        own: the script's own arguments.
        interface: the network interface towards the other hosts, where it was found out. gloo would take the one
            of this host's name, which is loopback on many machines.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    starter: str = "single"
    config_sha256: str = ""
    config_text: str = ""
    attempt: int = 0
    own: tuple[str, ...] = ()
    interface: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The place as the environment variables that torch.distributed and DeepSpeed read; set them before init."""
        network = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        return {
            **(fabric.defaults(os.environ) if self.starter != "agent" else {}),  # the agent has set them
            **network,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }

    @property
    def fingerprint(self) -> str:
        """What all ranks must have in common: the configuration and the source code."""
        return f"configuration {self.config_sha256[:16]}, code {code_version()[:16]}"


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, None if default is None else str(default))
    try:
        return int(text)
    except (TypeError, ValueError):
        raise LaunchError(
            f"the environment variable {name} is {text!r}; it must be a whole number, as the launcher sets it"
        ) from None


def _stable_port(*words: str) -> int:
    """The same port on every rank of a job, most likely unlike that of another: from 20000 to 29999."""
    return 20000 + zlib.crc32(":".join(words).encode()) % 10000


def worker_environment(environment: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """This process's place, from whatever started it; a single process if nothing did.

    Raises:
        LaunchError: half of what is needed is missing, or the numbers contradict each other.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env:
        place = _from_variables(env)
    elif "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        place = _from_slurm(env)
    elif "OMPI_COMM_WORLD_RANK" in env:
        place = _from_openmpi(env)
    elif "PMI_RANK" in env:
        place = _from_mpich(env)
    else:
        place = WorkerEnvironment(master_port=free_port("127.0.0.1"))
    if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size <= place.world_size):
        raise LaunchError(
            f"the environment says rank {place.rank} of {place.world_size} and local rank {place.local_rank} of "
            f"{place.local_world_size}, which cannot be; start with deepy.py, or unset these variables"
        )
    several = place.world_size > place.local_world_size
    if several and place.interface is None and place.starter != "agent" and "GLOO_SOCKET_IFNAME" not in env:
        place = replace(place, interface=interface_towards(place.master_address))
    if not place.attempt:  # whoever starts ranks in a job that was queued again, it is not the run's first start
        place = replace(place, attempt=_number(env, "SLURM_RESTART_COUNT", 0))
    return place


def _from_variables(env: Mapping[str, str]) -> WorkerEnvironment:
    world = _number(env, "WORLD_SIZE")
    if world > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise LaunchError(
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT: "
            "set them to rank 0's host and a free port"
        )
    local_world = _number(env, "LOCAL_WORLD_SIZE", 1 if world == 1 else _number(env, "LOCAL_SIZE", world))
    return WorkerEnvironment(
        _number(env, "RANK"),
        world,
        _number(env, "LOCAL_RANK", 0),
        local_world,
        env.get("MASTER_ADDR", "127.0.0.1"),
        _number(env, "MASTER_PORT", 0),
        "agent" if "JOB_CONFIG" in env else "environment",
        attempt=_number(env, "JOB_ATTEMPT", 0) or _number(env, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _from_slurm(env: Mapping[str, str]) -> WorkerEnvironment:
    """srun. Outside a step SLURM_PROCID says nothing: a batch script has it too, as a single process."""
    size = _number(env, "SLURM_STEP_NUM_TASKS")
    nodes = _number(env, "SLURM_STEP_NUM_NODES", 1)
    node = _number(env, "SLURM_NODEID", 0)
    local = _tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(size)), nodes, node)
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    names = expand(hosts) if nodes > 1 and hosts else ["127.0.0.1"]
    other = names[1 if node == 0 else 0] if len(names) > 1 and "GLOO_SOCKET_IFNAME" not in env else None
    port = _stable_port(env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", ""), env.get("SLURM_RESTART_COUNT", ""))
    return WorkerEnvironment(
        _number(env, "SLURM_PROCID"),
        size,
        _number(env, "SLURM_LOCALID"),
        local,
        env.get("MASTER_ADDR", names[0]),
        _number(env, "MASTER_PORT", port),
        "slurm",
        interface=interface_towards(other) if other else None,
    )


def _tasks_of_node(text: str, nodes: int, node: int) -> int:
    """Tasks on one node, from Slurm's form "4(x3),2"."""
    counts: list[int] = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1) if number.isdigit() else []
    if len(counts) != nodes or node >= nodes:
        raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, which does not fit {nodes} nodes")
    return counts[node]


def _from_openmpi(env: Mapping[str, str]) -> WorkerEnvironment:
    size, local = _number(env, "OMPI_COMM_WORLD_SIZE"), _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    address, port = _mpi_master(env, size, local, "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500", job)
    return WorkerEnvironment(
        _number(env, "OMPI_COMM_WORLD_RANK"),
        size,
        _number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local,
        address,
        port,
        "openmpi",
    )


def _from_mpich(env: Mapping[str, str]) -> WorkerEnvironment:
    """MPICH, Intel MPI and Cray's: PMI_RANK, with the local numbers under one of three names."""
    size = _number(env, "PMI_SIZE")
    local = next(
        (_number(env, name) for name in ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE") if name in env), size
    )
    mine = next(
        (_number(env, name) for name in ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID") if name in env),
        _number(env, "PMI_RANK"),
    )
    job = env.get("PALS_APID") or env.get("HYDI_CONTROL_FD", "") + str(os.getppid())
    address, port = _mpi_master(env, size, local, "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500", job)
    return WorkerEnvironment(_number(env, "PMI_RANK"), size, mine, local, address, port, "mpich")


def _mpi_master(env: Mapping[str, str], size: int, local: int, how: str, job: str) -> tuple[str, int]:
    if size != local and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise LaunchError(
            "several hosts, but MASTER_ADDR and MASTER_PORT are not both set: "
            f"{how} (rank 0's host and a free port there), or use deepy.py, which chooses them"
        )
    return env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT", _stable_port(job))


def read_job(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None, *, check_inputs: bool = True
) -> tuple[Config, WorkerEnvironment]:
    """The configuration and the place of this worker: all that train.py needs to begin.

    Under deepy.py the configuration is the resolved file that JOB_CONFIG names, checked against JOB_CONFIG_SHA256.
    Otherwise (`python train.py a.yml`, `srun ... python train.py a.yml`, torchrun) it is resolved here, from the
    script's arguments, for as many ranks as there are.

    Args:
        argv: the script's arguments; `sys.argv[1:]` if None.
        environment: `os.environ` if None.
        check_inputs: whether the training data must be there (train.py needs them, generate.py does not).

    Raises:
        ConfigError: the configuration has mistakes.
        LaunchError: the environment makes no sense, or the configuration's file is not the one that was sent.
    """
    from .. import config as configuration

    env = os.environ if environment is None else environment
    place = worker_environment(env)
    given = list(sys.argv[1:] if argv is None else argv)
    if "JOB_CONFIG" in env:
        path, own = Path(env["JOB_CONFIG"]), tuple(given)  # the launcher passes on nothing but the script's own
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != env.get("JOB_CONFIG_SHA256"):
            raise LaunchError(
                f"{path} is not the configuration that was sent: its SHA-256 is {digest}, "
                f"JOB_CONFIG_SHA256 says {env.get('JOB_CONFIG_SHA256')}"
            )
        resolved, text = configuration.read_resolved(path), path.read_text(encoding="utf-8")
    else:
        taken = words.split(given)
        loaded, own = (
            configuration.load(taken.files, taken.overrides, ranks=place.world_size, check_inputs=check_inputs),
            taken.own,
        )
        resolved, text = loaded.config, loaded.text()
    digest = configuration.config_hash(resolved)
    return resolved, WorkerEnvironment(**{**vars(place), "config_sha256": digest, "config_text": text, "own": own})


def check_agreement(place: WorkerEnvironment, gather: Callable[[str], Sequence[str]]) -> None:
    """See that all ranks have the same configuration and the same code; call it as the first collective.

    Args:
        place: this worker's environment.
        gather: gives every rank's string, in rank order (for example by `torch.distributed.all_gather_object`).

    Raises:
        LaunchError: on every rank, naming the ranks that differ from rank 0.
    """
    said = gather(place.fingerprint)
    other = [rank for rank, each in enumerate(said) if each != said[0]]
    if other:
        raise LaunchError(
            f"ranks {other[:8]}{' ...' if len(other) > 8 else ''} do not run what rank 0 runs: rank 0 has {said[0]}; "
            f"rank {other[0]} has {said[other[0]]}. Bring all hosts to the same commit and the same files"
        )


def guarded(main: Callable[[], Any]) -> int:
    """Run a script's main function: mistakes of the user become a message and status 2, without a traceback.

    So do data files and checkpoints that are missing, damaged or do not fit: starting again would not help.
    """
    from ..config.problems import ConfigError
    from ..data.errors import DataError

    try:
        return int(main() or 0)
    except (ConfigError, DataError, LaunchError, words.ArgumentError) as error:
        sys.stderr.write(f"{error}\n")
        return CONFIG_ERROR
