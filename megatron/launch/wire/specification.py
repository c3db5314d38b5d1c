"""The facts that an agent needs to start its ranks. It travels as one JSON line, never as an argument."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

from . import protocol


@dataclass(frozen=True)
class Host:
    """A machine and the devices it gives to the run."""

    name: str  # as the runner reaches it
    slots: tuple[int, ...]  # indices of its devices (or plain places, on CPU), one rank each


@dataclass(frozen=True)
class Seat:
    """A host's seat in the job, without the names of the other hosts."""

    index: int  # which of them it is
    host: Host  # itself
    hosts: int  # how many there are
    first_rank: int  # the global rank of its first slot
    world_size: int  # slots of all hosts together


@dataclass(frozen=True)
class Specification:
    """The whole job, the same for every host."""

    hosts: tuple[Host, ...]  # all hosts. Their order numbers the ranks. None in a host's message, which has its seat.
    command: tuple[str, ...]  # the argument list that every rank executes
    directory: str  # folder in which ranks start.
    # Variables set for every rank, over what the agent inherits
    environment: dict[str, str] = field(default_factory=dict)
    configuration: str = ""  # the text of the resolved configuration
    code: str = ""  # digest of the launcher's source code
    logs: str | None = None  # folder of the ranks' log files, relative to `directory`
    console: str = "first"  # "first" (rank 0 speaks, the others write log files) or "all"
    plain: bool = False  # whether rank 0's output goes to the console as it is, without a prefix.
    # Rows and columns of the launcher's terminal for (stdout, stderr), or None where that is not one
    terminal: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)
    grace: float = 60.0  # seconds between a stop signal and the kill
    heartbeat: float = 0.0  # seconds of silence after which an agent takes the launcher for lost. 0 is never.
    device: str = "auto"  # "auto", "cpu" or "cuda"
    bind: str = "none"  # "none", "numa" or "cores"
    # True where the command starts the host's ranks itself (torchrun): one process per host, and RANK, WORLD_SIZE and
    # the like are its business
    wrapper: bool = False
    attempt: int = 0  # 0 for the first start, then counting restarts.
    # The numbers of the section `watch` that limit how long a phase may take
    watch: dict[str, float] = field(default_factory=dict)
    credentials_file: str = ""  # the file with the launcher's address and secret, if the runner needs one

    @cached_property
    def _starts(self) -> list[int]:
        """The first rank of each host, and behind them the number of ranks."""
        return list(accumulate((len(host.slots) for host in self.hosts), initial=0))

    @property
    def world_size(self) -> int:
        return self._starts[-1]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.configuration.encode()).hexdigest()

    def index_of(self, name: str) -> int:
        """Which of the hosts has this name.

        Raises:
            ValueError: none.
        """
        names = [host.name for host in self.hosts]
        if name not in names:
            some = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(f"this host is {name} for its scheduler, which must be one of the job's hosts: {some}")
        return names.index(name)

    def first_rank(self, index: int) -> int:
        """The global rank of the first slot of host `index`."""
        return self._starts[index]

    def seat(self, index: int | None) -> Seat:
        """The seat of host `index`.

        Raises:
            ValueError: there is no such host.
        """
        if index is None or not 0 <= index < len(self.hosts):
            raise ValueError(f"this host's index {index} is not one of the job's {len(self.hosts)} hosts")
        return Seat(index, self.hosts[index], len(self.hosts), self.first_rank(index), self.world_size)

    def to_message(self, index: int | None) -> dict[str, Any]:
        """The message for host `index`, with its seat. None is one message for all, with all hosts: each agent knows
        its index or name."""
        if index is None:
            told: dict[str, Any] = {"hosts": [dataclasses.asdict(host) for host in self.hosts]}
        else:
            told = {"seat": dataclasses.asdict(self.seat(index))}
        # Agents of all versions read the index before they compare versions, which they could not say otherwise.
        return {"type": "specification", "version": protocol.VERSION, "index": index, "job": self._values, **told}

    @cached_property
    def _values(self) -> dict[str, Any]:
        """All but the hosts. Each host's message has them, so for 1,280 hosts they are not made 1,280 times."""
        values = dataclasses.asdict(dataclasses.replace(self, hosts=()))
        del values["hosts"]
        return values

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> "Specification":
        """The specification in a message, with the hosts that it has.

        Raises:
            ValueError: another version of the protocol, or not a specification.
        """
        if message.get("version") != protocol.VERSION or message.get("type") != "specification":
            raise ValueError(
                f"the launcher speaks version {message.get('version')} of the protocol, this host's code "
                f"version {protocol.VERSION}: bring both to the same code"
            )
        job = dict(message["job"])
        job["hosts"] = tuple(_host(each) for each in message.get("hosts", ()))
        job["command"] = tuple(job["command"])
        job["terminal"] = tuple(tuple(size) if size else None for size in job["terminal"])
        return cls(**job)


def seat_in(message: dict[str, Any], job: Specification, index: int | None, name: str | None) -> Seat:
    """The seat of the agent that a message has reached.

    Args:
        job: the message's.
        index, name: what the agent knows of itself, where the message has all hosts.

    Raises:
        ValueError: it is none of the hosts.
    """
    if "seat" in message:
        seat = message["seat"]
        return Seat(**{**seat, "host": _host(seat["host"])})
    return job.seat(index if name is None else job.index_of(name))


def _host(values: dict[str, Any]) -> Host:
    return Host(values["name"], tuple(values["slots"]))
