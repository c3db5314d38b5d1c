"""A cache of arrays by key, safe with any number of processes, nodes and disks.

A set of arrays is a folder named after its key. It is built next to its final place and renamed, so it is complete or
absent. Processes on one disk wait for the first of them (a file lock, which the system releases when its owner dies).
Where locks do not work each process builds for itself, and the first rename wins."""

import contextlib
import errno
import json
import os
import shutil
import socket
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ...config.file_access import path_inside, read_json, replace_file
from ..errors import DataError
from ..hashing import content_hash
from ..token_file import TokenFile

BLOCK, CHECKED = 1 << 24, 1 << 30  # bytes
PIECE = 1 << 18  # bytes of a block that are read at once, in the cache of a core
VERSION = 1  # of the arrays' meaning, part of the key
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

Arrays = dict[str, np.ndarray]


class _Damaged(Exception):
    """A cache entry cannot be read."""


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock of a path. Does nothing on disks without locks."""
    import fcntl

    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def cached(folder: str | os.PathLike | None, kind: str, key: tuple, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` makes, memory-mapped from the cache.

    Args:
        folder: the cache. None builds in memory.
        kind: first part of the folder's name.
        key: everything that determines the arrays.

    Raises:
        DataError: the cache cannot be written, or its entry is damaged after it was built again.
    """
    if folder is None:
        return build()
    place = Path(folder) / f"{kind}-{content_hash(repr((VERSION, *key)))}"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        built = False
        if not place.is_dir():
            with lock(place.with_suffix(".lock")):
                if not place.is_dir():
                    built = _write(place, build())
        try:
            return _read(place, checked=built)
        except _Damaged as error:
            with lock(place.with_suffix(".lock")):
                with contextlib.suppress(_Damaged):  # another process has built it again meanwhile
                    return _read(place)
                warnings.warn(f"{place}: this cache entry is damaged ({error}). It is built again", stacklevel=2)
                old = _beside(place)
                os.rename(place, old)
                shutil.rmtree(old, ignore_errors=True)
                _write(place, build())
        return _read(place)
    except _Damaged as error:
        raise DataError(place, f"this cache entry is damaged ({error})", "set data.cache to another disk") from error
    except OSError as error:
        raise DataError(place, f"it cannot be written ({error})", "set data.cache to a folder with room") from error


def _write(place: Path, arrays: Arrays) -> bool:
    """Write arrays next to `place` and rename the folder. If another process was first, its result stays.

    Returns:
        Whether it is ours.
    """
    temporary = _beside(place)
    temporary.mkdir()
    try:
        about = {}
        for name, array in arrays.items():
            with open(temporary / f"{name}.npy", "wb") as file:
                np.save(file, array)
                if file.tell() > CHECKED:  # of smaller ones a reader checks every byte
                    file.flush()
                    os.fsync(file.fileno())
            path = temporary / f"{name}.npy"
            about[name] = {"bytes": path.stat().st_size, "sums": _sums(path)}
        (temporary / "arrays.json").write_text(json.dumps(about))
        os.rename(temporary, place)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sums(path: Path) -> list[int]:
    """Sum of the 8-byte words of each block of a file, modulo 2**64. Of more than `CHECKED` bytes only evenly spaced
    blocks are read, which takes under a second. The others count as 0."""
    size = path.stat().st_size
    every = -(-size // CHECKED) or 1
    sums, words = [0] * -(-size // BLOCK), np.zeros(min(PIECE, size + -size % 8) // 8, "<u8")
    with open(path, "rb") as file:
        for number in range(0, len(sums), every):
            file.seek(number * BLOCK)
            for _ in range(0, min(BLOCK, size - number * BLOCK), PIECE):
                words.view(np.uint8)[file.readinto(words.data.cast("B")) :] = 0
                sums[number] = (sums[number] + int(words.sum(dtype=np.uint64))) % 2**64
    return sums


def _read(place: Path, checked: bool = False) -> Arrays:
    """The arrays of an entry. `checked`: this process has just written it."""
    try:
        about = read_json(place / "arrays.json")
        if not about:
            raise ValueError("arrays.json names no arrays")
        files = {name: path_inside(place, f"{name}.npy") for name in about}
        for name, facts in about.items():
            if files[name].stat().st_size != facts["bytes"]:
                raise ValueError(f"{name}.npy is truncated")
            if not checked and "sums" in facts and _sums(files[name]) != facts["sums"]:
                raise ValueError(f"{name}.npy does not have its checksum")
        return {name: np.load(file, mmap_mode="r").view(np.ndarray) for name, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Damaged(str(error)) from error


def examine_once(file: TokenFile, folder: str | os.PathLike | None, scan_below: int = 1 << 27) -> dict:
    """Facts that need a read of a whole token file, cached while both files keep size, time and inode.

    Args:
        folder: the cache. None caches nothing.
        scan_below: search files with fewer tokens for their largest id, too.

    Returns:
        `fingerprint` (of the sizes), `smallest` and `largest` id (None if not searched).

    Raises:
        DataError: the index is damaged, or the cache cannot be written.
    """
    if folder is None:
        return _facts(file, scan_below)
    state = [
        [os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ino]
        for path in (file.bin_path, file.idx_path)
        for status in (path.stat(),)
    ]
    memory = Path(folder) / "examined" / f"{content_hash(os.path.abspath(file.bin_path))}.json"
    known = _remembered(memory, state)
    if known is not None:
        return known
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with lock(memory.with_suffix(".lock")):
            known = _remembered(memory, state)
            if known is None:
                known = _facts(file, scan_below)
                replace_file(memory, json.dumps({"state": state, "facts": known}))
    except OSError as error:
        raise DataError(memory, f"it cannot be written ({error})", "set data.cache to a folder with room") from error
    return known


def _facts(file: TokenFile, scan_below: int) -> dict:
    file.verify()
    smallest, largest = file.extent() if file.tokens < scan_below else (None, None)
    return {"fingerprint": file.fingerprint(), "smallest": smallest, "largest": largest}


def _remembered(memory: Path, state: list) -> dict | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = read_json(memory)
        if known["state"] == state:
            return known["facts"]
    return None


def _beside(path: Path) -> Path:
    """A name next to `path` that no other process of any node uses."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
