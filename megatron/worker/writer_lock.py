"""The lock that one run holds on a folder of checkpoints: torch-free, since the launcher reads it too."""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

LOCK_NAME = ".writer"


def holder(directory: Path) -> str | None:
    """The process that holds a folder of checkpoints now, or None where none is known."""
    try:
        handle = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _named(handle) if _held(error) else None
    finally:
        os.close(handle)
    return None


def take(path: Path) -> tuple[int | None, str | None]:
    """(the open lock if it is free, the process that has it otherwise)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return None, None  # a folder that cannot be written to: the first save says so
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held = _named(handle) if _held(error) else None
        os.close(handle)
        return None, held
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # a full disk: it is held all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)
    return handle, None


def _held(error: OSError) -> bool:
    return error.errno in (errno.EWOULDBLOCK, errno.EACCES)


def _named(handle: int) -> str:
    text = os.pread(handle, 1000, 0).decode(errors="replace").strip()
    return "".join(each if each.isprintable() else "?" for each in text) or "it does not say which"
