"""Names that come out of files, joined to folders.

A checkpoint, an index or an archive may be anybody's. A name in it is joined to a folder only by `path_inside`, which
refuses every name that would lead out of it.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from pathlib import Path, PurePosixPath

LONGEST = 255  # bytes of one part of a path, on every file system in use
_DEVICES = {"con", "prn", "aux", "nul", *(f"{name}{digit}" for name in ("com", "lpt") for digit in "123456789")}
_CONTROL = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: control characters, surrogates, line separators


class UnsafeName(ValueError):
    """A name in a file that must not become a path."""


def check_name(name: object) -> str:
    """A relative name of plain parts, unchanged. The disk is not read.

    Raises:
        UnsafeName: it is no text, empty, absolute, has `.` or `..` in it, control characters, or names a device.
    """
    if not isinstance(name, str) or not name:
        raise UnsafeName(f"{name!r} is not a file name")
    if any(unicodedata.category(letter) in _CONTROL for letter in name):
        raise UnsafeName(f"the file name {name!r} has control characters")
    if name.startswith("/") or "\\" in name or PurePosixPath(name).is_absolute():
        raise UnsafeName(f"the file name {name!r} must be relative, with / between its parts")
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise UnsafeName(f"the file name {name!r} leads out of its folder, or has an empty part")
        if part.partition(".")[0].rstrip().casefold() in _DEVICES:
            raise UnsafeName(f"the file name {name!r} is that of a device")
        if len(part.encode()) > LONGEST:
            raise UnsafeName(f"the file name {name[:40]!r}... is too long")
    return name


def path_inside(folder: str | os.PathLike, name: object, *, root: str | os.PathLike | None = None) -> Path:
    """`folder / name` for a name that was read from a file.

    Args:
        folder: where the name belongs.
        name: as it was read.
        root: a wider folder that links in `folder` may lead to. None is `folder` itself.

    Raises:
        UnsafeName: as of `check_name`, or links lead out of `root`, or it is a device, a socket or a pipe.
    """
    path = Path(folder, check_name(name))
    real, limit = os.path.realpath(path), os.path.realpath(folder if root is None else root)
    if os.path.commonpath([real, limit]) != limit:
        raise UnsafeName(f"{name!r} is a link that leads out of {limit}")
    try:
        mode = os.stat(real).st_mode
    except OSError:  # whoever opens it says what is wrong
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UnsafeName(f"{name!r} is neither a file nor a folder")
    return path
