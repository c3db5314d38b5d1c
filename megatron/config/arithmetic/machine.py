"""Parts of this machine that a run needs: a GPU, folders that can be written, programs. Torch is not asked: importing
it takes seconds."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

NAME_BYTES = 255  # of a file's or folder's name, on Linux's file systems


def has_gpu() -> bool:
    """Whether this machine has the device files of an NVIDIA or AMD GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def existing(path: str | os.PathLike) -> Path:
    """The path, or the nearest folder above it that exists. A part that is a file ends the search there."""
    found = Path(path).absolute()
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    return found


def why_not_writable(path: str | os.PathLike) -> str | None:
    """Why no files can be made in a folder, which may not exist yet, or None."""
    longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if longest > NAME_BYTES:
        return f"a name in it has {longest:,} bytes, and file systems take {NAME_BYTES}"
    found = existing(path)
    if not found.is_dir():
        return f"{found} is not a folder"
    if not os.access(found, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"{found} cannot be written by this user"
    try:  # permissions say yes to root in /proc, and on network disks that do not let root write
        with tempfile.TemporaryFile(dir=found):
            return None
    except OSError as error:
        return f"no file can be made in {found} ({error.strerror})"


def free_bytes(path: str | os.PathLike) -> int | None:
    """Free space where a folder is, or would be made, or None if the system does not say."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None


def program(name: str, folder: str | os.PathLike) -> bool:
    """Whether a name or path is a program that a process in `folder` can start."""
    return shutil.which(os.path.join(folder, name) if os.sep in name else name) is not None


def memory_bytes() -> int | None:
    """Memory of this machine, or None if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
