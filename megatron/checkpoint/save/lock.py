"""One run writes to a folder of checkpoints at a time, and a second one is told so before it does any harm."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from ..format.communicator import SOLO, Communicator
from ..format.errors import CheckpointError

LOCK_NAME = ".writer"


@contextmanager
def sole_writer(directory: str | Path, communicator: Communicator = SOLO, *, insist: bool = True) -> Iterator[None]:
    """Hold a folder for one run; the system lets go of it when rank 0's process ends, however it ends.

    Does nothing on disks without locks.

    Args:
        insist: an error if another run holds it. Without, the folder is taken as it is: a run that is started again
            must not wait until a file server has noticed that the host of its former self is gone.

    Raises:
        CheckpointError: on every rank, with the host and the process that hold it.
    """
    handle, holder = None, None
    if communicator.rank == 0:
        handle, holder = _take(Path(directory) / LOCK_NAME)
    holder = communicator.broadcast(holder)
    try:
        if holder is not None and insist:
            raise CheckpointError(
                directory,
                f"another run writes here ({holder}): wait for its end, or give this one a run.dir of its own",
            )
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _take(path: Path) -> tuple[int | None, str | None]:
    """(the open lock, if it could be had; who has it, if somebody has)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None, None  # a folder that cannot be written to: the first save says so
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        text = os.pread(handle, 1000, 0).decode(errors="replace").strip()
        os.close(handle)
        return None, (text or "it does not say which") if held else None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk: it is held all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)
    return handle, None
