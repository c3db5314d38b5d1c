"""Send files from host to host over the process group."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from ..format.durable import CHUNK, read_fully, write_fully


@dataclass(frozen=True)
class Parcel:
    """A file of `size` bytes that rank `sender` reads and rank `receiver` writes. `name` is the path inside the
    checkpoint on both sides."""

    name: str
    size: int
    sender: int
    receiver: int


class Courier(Protocol):
    """Sends files from rank to rank."""

    def carry(self, parcels: Iterable[Parcel], source: Path, target: Path) -> dict[str, OSError]:
        """Send all files. Every rank calls with the same list.

        Args:
            source: folder of this rank's own files.
            target: folder for the received files.

        Returns:
            This rank's read and write errors, by name. An unreadable file arrives as zeros, which its checksum detects.
        """


class GroupCourier:
    """Over a process group: gloo from the host's memory, NCCL through the device's."""

    def __init__(self, rank: int, device: torch.device | str = "cpu") -> None:
        self._rank, self._device = rank, torch.device(device)

    def carry(self, parcels: Iterable[Parcel], source: Path, target: Path) -> dict[str, OSError]:
        """See `Courier`. A rank takes part only in its own parcels, in the order of the list. So pairs of ranks work in
        parallel, without deadlock."""
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
