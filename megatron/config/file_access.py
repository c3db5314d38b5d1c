"""Whether a file can be read, and where a tool may write: never over something that it reads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

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
