"""Crash-safe file operations (a file is on the disk when a call returns, or absent), and names of checkpoints."""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

META = "meta.json"
MANIFEST = "manifest.json"

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"(.+)\.(tmp|old|trash)-([0-9a-f]+)")


def step_name(step: int) -> str:
    """`step_00001000`: sorts by step, up to a hundred million steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint directory's name. None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def number_of(path: Path) -> int:
    """The step in a checkpoint directory's name. ValueError for any other name."""
    step = step_of(path)
    if step is None:
        raise ValueError(f"{path} does not have the name of a checkpoint")
    return step


def wrong_name(path: Path, step: int) -> str | None:
    """Why a checkpoint of this step must not have this name, or None. A name without a step is always allowed."""
    named = step_of(path)
    if named is None or named == step:
        return None
    return f"its name says step {named}, and it holds step {step}: call it {step_name(step)}"


def leftover_name(target: Path, kind: str, token: str) -> Path:
    """A name next to the checkpoint: "tmp" while it is written, "old" while replaced, "trash" while deleted."""
    return target.with_name(f"{target.name}.{kind}-{token}")


def leftover_of(path: Path) -> tuple[str, str] | None:
    """(checkpoint name, kind) of a name made by `leftover_name`. None for any other."""
    match = _LEFTOVER.fullmatch(path.name)
    return (match[1], match[2]) if match and _STEP.fullmatch(match[1]) else None


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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that becomes `path` if nothing fails, and is removed otherwise."""
    draft = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


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
