"""An agent's view of a rank: its beacon, the state of its process, its stack."""

import mmap
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.worker.beacon import ALL_STACKS_SIGNAL, BEACON, DONE, SIZE, STACK_SIGNAL, STACKS, RankProgress, read

LONGEST_STACK = 256 << 10  # bytes
_STATES = {"T": "stopped", "t": "stopped", "D": "in the disk or the network", "Z": "ended", "X": "ended"}
_FLOORS = {  # by phase, the key of `watch` that gives the least limit
    "start": "setup",
    "setup": "setup",
    "data": "data",
    "save": "save",
    "evaluate": "evaluation",
    "hooks": "evaluation",
    "end": "save",  # pictures, uploads
}


class Sight:
    """The agent's end of a rank's beacon. Both descriptors are memory: nothing is left when the processes are gone.

    Attributes:
        descriptors: what the rank inherits.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.descriptors = (os.memfd_create(f"beacon {rank}"), os.memfd_create(f"stacks {rank}"))
        os.ftruncate(self.descriptors[0], SIZE)
        self.memory = mmap.mmap(self.descriptors[0], SIZE)
        self.born = time.monotonic()

    @property
    def variables(self) -> dict[str, str]:
        """How the rank finds the descriptors."""
        return dict(zip((BEACON, STACKS), map(str, self.descriptors)))

    def place(self) -> RankProgress | None:
        """The rank's place by its beacon, or None before it has written one."""
        return read(self.memory)

    def early(self, limits: dict[str, float]) -> bool:
        """Whether a rank that has ended with status 0 had not done its work: only scripts that say so are asked."""
        place = self.place()
        return "start" in limits and place is not None and place.detail != DONE.decode()

    def late(self, limits: dict[str, float]) -> bool:
        """Whether the rank has been in one phase for longer than its limit, its imports included."""
        place, now = self.place(), time.monotonic()
        if place is None:
            return now - self.born > limits.get("start", float("inf"))
        return now - place.since > limit(place, limits)

    def tell(self, pid: int, alive: bool, limits: dict[str, float]) -> dict[str, Any]:
        """Everything about the rank, for the launcher. Times are seconds before now, since clocks differ."""
        now, place = time.monotonic(), self.place()
        known: dict[str, Any] = {"rank": self.rank, "pid": pid, "state": state(pid) if alive else "ended"}
        if place is None:
            age, most = now - self.born, limits.get("start", float("inf"))
            return {**known, "phase": "", "age": age, "limit": most, "calls": []}
        values = asdict(place)
        for call in values["calls"]:
            call["age"] = now - call.pop("at")
        sent = {name: values[name] for name in ("step", "done", "phase", "part", "parts", "detail", "layer", "calls")}
        return {**known, **sent, "age": now - place.since, "limit": limit(place, limits)}

    def last(self, pid: int) -> dict[str, Any]:
        """As `tell`, of a rank that has ended: only its last call, as if it were still inside of it. A rank that fails
        within a call has left it."""
        known = self.tell(pid, alive=False, limits={})
        latest = min(known["calls"], key=lambda call: call["age"], default=None)
        return {**known, "calls": [{**latest, "inside": True}] if latest else []}

    def ask(self, pid: int, *, everything: bool) -> bool:
        """Have the rank write its stack. False where its handler is not known to be set (the signal would end it)."""
        place = self.place()
        if place is None or not place.stacks or place.pid != pid:
            return False
        os.ftruncate(self.descriptors[1], 0)
        os.lseek(self.descriptors[1], 0, os.SEEK_SET)
        try:
            os.kill(pid, ALL_STACKS_SIGNAL if everything else STACK_SIGNAL)
        except ProcessLookupError:
            return False
        return True

    def stack(self) -> str:
        """The rank's output since it was asked."""
        return os.pread(self.descriptors[1], LONGEST_STACK, 0).decode("utf-8", "replace")

    def close(self) -> None:
        self.memory.close()
        for each in self.descriptors:
            os.close(each)


def limit(place: RankProgress, limits: dict[str, float]) -> float:
    """Seconds that the rank may stay in its phase: a multiple of the longest stay before, and at least the floor."""
    if not limits:
        return float("inf")
    floor = limits[_FLOORS.get(place.phase, "step")]
    if place.done < 2:  # compiling, first allocations, first connections
        floor = max(floor, limits["setup"])
    return max(floor, limits["factor"] * place.longest.get(place.phase, 0.0))


def state(pid: int) -> str:
    """The state of a process in words: running, waiting, stopped, ..."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "ended"
    return _STATES.get(letter, "running" if letter == "R" else "waiting")
