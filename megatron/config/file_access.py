"""Files: whether they can be read, where a tool may write (never over its inputs), JSON and names of others."""

import errno
import json
import os
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from .problems import UserError

MISSING = "there is no such file"
NOT_PLAIN = "it is a FIFO, a device or a link that is not followed, and a plain file is needed"
AnyPath = str | os.PathLike


class NotPlainFile(UserError, OSError):
    """In the place of a file there is something that may wait for ever, or that leads elsewhere."""


def open_plain(path: AnyPath, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a plain file. A FIFO would wait for its other end, and a device may never end.

    Raises:
        NotPlainFile: it is no plain file, or a link where `flags` follow none.
        OSError: it cannot be opened.
    """
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise NotPlainFile(f"{os.fspath(path)}: {NOT_PLAIN}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotPlainFile(f"{os.fspath(path)}: {NOT_PLAIN}")
    os.set_blocking(handle, True)
    return handle


def read_plain(path: AnyPath, limit: int = 1 << 40) -> bytes:
    """The content of a plain file.

    Raises:
        OSError: it cannot be read, or is no plain file (`NotPlainFile`).
        ValueError: it has more than `limit` bytes.
    """
    with open(open_plain(path), "rb") as file:
        content = file.read() if os.fstat(file.fileno()).st_size <= limit else file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is too large, and must have at most {limit >> 20} MiB")
    return content


def unreadable(path: AnyPath) -> str | None:
    """Why a plain file cannot be read, as the end of a sentence, or None if it can be."""
    try:
        if os.path.isdir(path):
            raise IsADirectoryError
        os.close(open_plain(path))
        return None
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except IsADirectoryError:
        return "it is a directory, and a file is needed"
    except PermissionError:
        return "there is no permission to read it"
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        return f"it cannot be read ({getattr(error, 'strerror', None) or error})"


@contextmanager
def replacing(path: AnyPath, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which then stands at `path`, whole or not at all.

    A link at this name is replaced. One at the temporary name is removed: whoever can write in the folder could
    otherwise have a user write into any file of the user's.

    Args:
        durable: whether the content is on the disk before the file appears.
    """
    file = Path(path)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as opened:
            yield opened
            if durable:
                opened.flush()
                os.fsync(opened.fileno())
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def replace_file(path: AnyPath, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file, whole or not at all. Arguments as of `replacing`."""
    with replacing(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


class OutputError(ValueError):
    """A tool was asked to write where it must not."""

    def __init__(self, output: AnyPath, rule: str, fix: str):
        """
        Args:
            output: the file that would be written.
            rule: why it must not be.
            fix: what the user can do.
        """
        self.output = str(output)
        super().__init__(f"{output}: {rule}\n    fix: {fix}")


def same_file(one: AnyPath, other: AnyPath) -> bool:
    """Whether two paths lead to one file: through links, by another spelling, or as hard links."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist
        return False


def keep_inputs(outputs: Iterable[AnyPath], inputs: Iterable[AnyPath], option: str = "--output") -> None:
    """Refuse to write over an input. Every tool that writes calls it before it opens a file.

    Args:
        outputs: all files that the tool may write or remove, existing or not.
        inputs: all files that it reads.
        option: the option that names the output, for the message.

    Raises:
        OutputError: an output and an input are one file.
    """
    known = [Path(each) for each in inputs]
    for output in outputs:
        for each in known:
            if same_file(output, each):
                also = "" if os.fspath(output) == os.fspath(each) else f", which is the input {each} under another name"
                rule = f"it would be written over{also or ', and it is one of the inputs'}"
                raise OutputError(output, rule, f"use another {option}")


@contextmanager
def writing(output: AnyPath, option: str = "--output", *, folders: bool = False) -> Iterator[None]:
    """Around the writing of a file that a user has named.

    Args:
        option: that names it, for the message.
        folders: whether it may be a folder, in which files are made.

    Raises:
        OutputError: it is no file's name, or the system refuses.
    """
    there = os.path.isdir(output)
    if (there and not folders) or not (there or Path(output).name):
        raise OutputError(output, "it must be a file", f"use another {option}")
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(output, f"it cannot be written ({reason})", f"use another {option}") from error


LARGEST = 2**28  # bytes of a file (the largest tokenizers have some 50 MiB)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or its lists and objects are nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply, and JSON must be a few levels deep") from error


def read_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8.

    Raises:
        ValueError: as `parse_json`, or it is larger than `LARGEST`.
        OSError: it cannot be read.
    """
    return parse_json(read_plain(path, LARGEST).decode("utf-8"))


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
    """`folder / name` for a name that was read from a file, which may be anybody's. No name leads out of the folder.

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
