"""Files that are on the disk when a call returns, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .names import leftover_name

CHUNK = 16 << 20  # bytes moved at a time


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Errors of a handle say which file it is of: the system's own (a full disk, a quota) do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_fully(handle: int, data: memoryview) -> None:
    """Write all of `data`; one call of the system may take less than it was given."""
    while data:
        data = data[os.write(handle, data) :]


def read_fully(handle: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` of a file; returns the bytes read, fewer than asked only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(handle, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


@contextmanager
def new_file(path: Path, *, wait: bool = True) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Create a file; gives what takes its content, part by part. Unless told otherwise the disk has it in the end."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        with name_errors(path):
            yield lambda data: write_fully(handle, memoryview(data))
            if wait:
                os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes, *, wait: bool = True) -> None:
    """Create a file with this content, and unless told otherwise wait until the disk has it."""
    with new_file(path, wait=wait) as write:
        write(data)


def sync_directory(path: Path) -> None:
    """Wait until the disk has the names in a directory; a file can be safe while its name is not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(source: Path, target: Path) -> None:
    """Rename within a directory, for good."""
    os.rename(source, target)
    sync_directory(target.parent)


def remove(path: Path, token: str) -> None:
    """Delete a directory so that a half-deleted one is never taken for a whole one: its name goes first."""
    doomed = leftover_name(path, "trash", token)
    move(path, doomed)
    shutil.rmtree(doomed)
