"""The hosts of a run, and private folders on them."""

from __future__ import annotations

import os
import pwd
import socket
import stat
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..format.communicator import Communicator
from ..format.errors import CheckpointError


def host_name() -> str:
    """This machine's name."""
    return socket.gethostname()


@dataclass(frozen=True)
class Hosts:
    """The machines of a run: `names` by rank, and the `rank` of this process."""

    names: tuple[str, ...]
    rank: int

    @classmethod
    def of(cls, communicator: Communicator) -> Hosts:
        """All ranks call it."""
        return cls(tuple(communicator.gather(host_name())), communicator.rank)

    @cached_property
    def members(self) -> list[list[int]]:
        """The ranks of each host, in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(self.names):
            found.setdefault(name, []).append(rank)
        return list(found.values())

    @cached_property
    def number_of(self) -> dict[int, int]:
        """The number of each rank's host."""
        return {rank: number for number, ranks in enumerate(self.members) for rank in ranks}

    @property
    def own(self) -> int:
        """The number of this rank's host."""
        return self.number_of[self.rank]

    @property
    def name(self) -> str:
        return self.names[self.rank]

    @property
    def place(self) -> tuple[int, int]:
        """(position of this rank on its host, number of ranks there)."""
        ranks = self.members[self.own]
        return ranks.index(self.rank), len(ranks)

    @property
    def leads(self) -> bool:
        """Whether this rank does the work that is done once per host."""
        return self.place[0] == 0


def private(folder: Path) -> Path:
    """Make a folder that only this user can read.

    Raises:
        CheckpointError: it belongs to another user or is readable by others, so its content cannot be trusted.
        OSError: it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        whose = "" if found.st_uid == os.geteuid() else f", and it belongs to {_user(found.st_uid)}"
        raise CheckpointError(folder, f"it must be a folder that only this user owns and can read{whose}: remove it")
    return folder


def own_folder(folder: Path) -> tuple[Path, str]:
    """A private folder: `folder`, or the first of `folder-1` to `folder-7` that belongs to no other user.

    All ranks of a host, and all starts of a run, find the same one.

    Returns:
        The folder, and why it is not `folder`.

    Raises:
        CheckpointError, OSError: as `private`.
    """
    why = ""
    for number in range(8):
        made = folder.with_name(f"{folder.name}-{number}") if number else folder
        try:
            return private(made), why and f"{why}: {made} is used"
        except CheckpointError:
            if (owner := os.lstat(made).st_uid) == os.geteuid() or number == 7:
                raise
            why = f"{made} belongs to {_user(owner)}"
    raise AssertionError("unreachable")


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
