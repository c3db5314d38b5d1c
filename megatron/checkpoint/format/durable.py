"""Crash-safe file operations: a file is on the disk when a call returns, or absent."""

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
    """Add the path to errors of a file handle. The system's own errors (a full disk, a quota) have none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A handle for reading."""
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def write_fully(handle: int, data: memoryview) -> None:
    """Write all of `data`. One system call may write less."""
    while data:
        data = data[os.write(handle, data) :]


def read_fully(handle: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` of a file. Returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.preadv(handle, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


@contextmanager
def new_file(path: Path, *, wait: bool = True) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Create a file and yield a function that appends to it. With `wait`, fsync is called at the end."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        with name_errors(path):
            yield lambda data: write_fully(handle, memoryview(data))
            if wait:
                os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes, *, wait: bool = True) -> None:
    """Create a file with this content. With `wait`, fsync it."""
    with new_file(path, wait=wait) as write:
        write(data)


def sync_directory(path: Path) -> None:
    """Fsync a directory's names. A file can be safe while its name is not."""
    with opened(path) as handle:
        os.fsync(handle)


def move(source: Path, target: Path) -> None:
    """Rename within a directory, and fsync the directory."""
    os.rename(source, target)
    sync_directory(target.parent)


def remove(path: Path, token: str) -> None:
    """Delete a directory. Its name goes first, so that a half-deleted one is never taken for a whole one."""
    doomed = leftover_name(path, "trash", token)
    move(path, doomed)
    shutil.rmtree(doomed)
