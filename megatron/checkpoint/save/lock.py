"""The lock of a folder of checkpoints: one run writes to it at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.worker.writer_lock import LOCK_NAME, take

from ..format.communicator import SOLO, Communicator
from ..format.errors import CheckpointError


@contextmanager
def sole_writer(directory: str | Path, communicator: Communicator = SOLO, *, insist: bool = True) -> Iterator[None]:
    """Hold a folder for one run, until rank 0's process ends in any way. Does nothing on disks without locks.

    Args:
        insist: raise if another run holds it. A restarted run passes False: it must not wait until a file server
            notices that its former host is gone.

    Raises:
        CheckpointError: on every rank, with the host and the process that hold it.
    """
    handle, holder = None, None
    if communicator.rank == 0:
        handle, holder = take(Path(directory) / LOCK_NAME)
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
