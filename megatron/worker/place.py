"""A worker's place in the world, however it was started: by the agent, torchrun, srun, mpirun, or by hand."""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.installation import code_version

from . import devices
from .network import free_port, interface_towards


class LaunchError(RuntimeError):
    """The environment that this process was started in does not make sense."""


class StartError(LaunchError):
    """The checkpoint or weights of a start are missing, damaged or do not fit: a restart would not help."""


@dataclass(frozen=True)
class WorkerEnvironment:
    """Where this process stands."""

    rank: int = 0  # rank, world_size: among all processes
    world_size: int = 1
    local_rank: int = 0  # local_rank, local_world_size: among this host's processes
    local_world_size: int = 1
    master_address: str = "127.0.0.1"  # master_address, master_port: where rank 0 listens
    master_port: int = 0
    # "agent", "environment" (torchrun, deepspeed, ...), "slurm", "openmpi", "mpich" or "single"
    starter: str = "single"
    config_sha256: str = ""  # digest of the values of the configuration that this rank has read. Set by `read_job`.
    config_text: str = ""  # the resolved configuration as a file, with the origin of each value. Set by `read_job`.
    attempt: int = 0  # how often the run has been started again after a failure
    own: tuple[str, ...] = ()  # the script's own arguments.
    # The network interface towards the other hosts, where it was found out. gloo would take the one of this host's
    # name, which is loopback on many machines.
    interface: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The place as the environment variables that torch.distributed and DeepSpeed read. Set them before init."""
        network = {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}
        return {
            **(devices.fabric_defaults(os.environ) if self.starter != "agent" else {}),  # the agent has set them
            **network,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }

    @property
    def one_host(self) -> bool:
        """Whether all ranks are surely on this machine: no other machine then needs to reach them.

        RANK and WORLD_SIZE do not show it, but an address of loopback does."""
        told = self.starter != "environment" or self.master_address in ("127.0.0.1", "localhost", "::1")
        return told and self.world_size == self.local_world_size

    @property
    def fingerprint(self) -> str:
        """Digests that all ranks must have in common: of the configuration and of the source code."""
        return f"configuration {self.config_sha256[:16]}, code {code_version()[:16]}"


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, None if default is None else str(default))
    try:
        return int(text or "")
    except ValueError:
        raise LaunchError(
            f"the environment variable {name} is {text!r} and must be a whole number, as the launcher sets it"
        ) from None


def _stable_port(*words: str) -> int:
    """The same port on every rank of a job, most likely unlike that of another: from 20000 to 29999."""
    return 20000 + zlib.crc32(":".join(words).encode()) % 10000


def worker_environment(environment: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """This process's place, from its starter, or a single process without one.

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
            f"{place.local_world_size}, which cannot be: start with deepy.py, or unset these variables"
        )
    if (
        place.world_size > 1
        and place.interface is None
        and place.starter != "agent"
        and "GLOO_SOCKET_IFNAME" not in env
    ):
        place = replace(place, interface="lo" if place.one_host else interface_towards(place.master_address))
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
    names = expand_nodes(hosts) if nodes > 1 and hosts else ["127.0.0.1"]
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
    rank, local_rank = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_LOCAL_RANK")
    return WorkerEnvironment(rank, size, local_rank, local, address, port, "openmpi")


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


_BRACKETS = re.compile(r"\[([^\]]*)\]")
MOST = 1_000_000  # hosts of a list. No cluster has more


def expand_nodes(text: str) -> list[str]:
    """All host names of a node list, in its order.

    Raises:
        ValueError: not a node list, or one of more than `MOST` hosts.
    """
    names: list[str] = []
    for part in _split(text):
        names += _expand_one(part)
        _limit(part, len(names))
    return names


def _limit(part: str, count: int) -> None:
    if count > MOST:
        raise ValueError(f"{part!r} gives {count:,} hosts, and a list of nodes must have at most {MOST:,}")


def _split(text: str) -> list[str]:
    parts = [part for part in re.split(r",(?![^\[]*\])", text.strip()) if part]
    if not parts or text.count("[") != text.count("]"):
        raise ValueError(f"{text!r} is not a list of nodes")
    return parts


def _expand_one(part: str) -> list[str]:
    match = _BRACKETS.search(part)
    if not match:
        return [part]
    before, after = part[: match.start()], _expand_one(part[match.end() :])
    numbers: list[str] = []
    for each in match.group(1).split(","):
        first, _, last = each.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"{part!r} is not a list of nodes: {each!r} is not a range of numbers")
        _limit(part, len(numbers) + int(last or first) - int(first) + 1 if len(first) + len(last) < 40 else MOST + 1)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    _limit(part, len(numbers) * len(after))
    return [before + number + rest for number in numbers for rest in after]
