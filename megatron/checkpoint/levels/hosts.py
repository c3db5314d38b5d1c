"""The hosts of a run, private folders on them, and files that are sent from host to host."""

import os
import pwd
import socket
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from ..format.communicator import Communicator
from ..format.durable import CHUNK, read_fully, write_fully
from ..format.errors import CheckpointError


def host_name() -> str:
    """This machine's name."""
    return socket.gethostname()


@dataclass(frozen=True)
class Hosts:
    """The machines of a run: `names` by rank, the `rank` of this process, and its ways to the others."""

    names: tuple[str, ...]
    rank: int
    talk: Communicator  # of all ranks, for the main thread
    courier: "Courier | None"  # sends files from host to host. None in a run of one process.

    @classmethod
    def of(cls, talk: Communicator, device: torch.device | str) -> "Hosts":
        """All ranks call it."""
        courier = Courier(talk.rank, device) if talk.size > 1 else None
        return cls(tuple(talk.gather(host_name())), talk.rank, talk, courier)

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


@dataclass(frozen=True)
class Parcel:
    """A file of `size` bytes that rank `sender` reads and rank `receiver` writes. `name` is the path inside the
    checkpoint on both sides."""

    name: str
    size: int
    sender: int
    receiver: int


class Courier:
    """Sends files from rank to rank over a process group: gloo from the host's memory, NCCL through the device's."""

    def __init__(self, rank: int, device: torch.device | str = "cpu") -> None:
        self._rank, self._device = rank, torch.device(device)

    def carry(self, parcels: Iterable[Parcel], source: Path, target: Path) -> dict[str, OSError]:
        """Send all files. Every rank calls with the same list.

        A rank takes part only in its own parcels, in the order of the list. So pairs of ranks work in parallel, without
        deadlock.

        Args:
            source: folder of this rank's own files.
            target: folder for the received files.

        Returns:
            This rank's read and write errors, by name. An unreadable file arrives as zeros, which its checksum detects.
        """
        problems: dict[str, OSError] = {}
        for parcel in parcels:
            if self._rank not in (parcel.sender, parcel.receiver):
                continue
            sends = parcel.sender == self._rank
            failure = self._send(parcel, source) if sends else self._receive(parcel, target)
            if failure is not None:
                problems[parcel.name] = failure
        return problems

    def _send(self, parcel: Parcel, folder: Path) -> OSError | None:
        failure, handle = None, -1
        with ExitStack() as stack:
            try:
                handle = os.open(folder / parcel.name, os.O_RDONLY)
                stack.callback(os.close, handle)
            except OSError as error:
                failure = error
            for begin in range(0, parcel.size, CHUNK):
                chunk = torch.zeros(min(CHUNK, parcel.size - begin), dtype=torch.uint8)
                if failure is None:
                    try:
                        read_fully(handle, chunk.numpy().data, begin)
                    except OSError as error:
                        failure = error
                dist.send(chunk.to(self._device), parcel.receiver)
        return failure

    def _receive(self, parcel: Parcel, folder: Path) -> OSError | None:
        """Receive all chunks even if the disk is full, since the sender waits."""
        failure, handle, path = None, -1, folder / parcel.name
        with ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                stack.callback(os.close, handle)
            except OSError as error:
                failure = error
            for begin in range(0, parcel.size, CHUNK):
                chunk = torch.empty(min(CHUNK, parcel.size - begin), dtype=torch.uint8, device=self._device)
                dist.recv(chunk, parcel.sender)
                if failure is None:
                    try:
                        write_fully(handle, chunk.cpu().numpy().data)
                    except OSError as error:
                        failure = error
        return failure
