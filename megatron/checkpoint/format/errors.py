"""`CheckpointError` carries all problems found, not only the first."""

import errno
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.config.file_access import UnsafeName, path_inside

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_REFUSALS = {
    getattr(errno, name)
    for name in (
        "ENOSPC", "EDQUOT", "EROFS", "EIO", "EACCES", "EPERM", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EREMOTEIO",
        "EHOSTDOWN", "EHOSTUNREACH", "ENODEV", "ENXIO",
    )
    if hasattr(errno, name)
}  # fmt: skip
LISTED = 100  # problems that a message lists
SHOWN = 3  # problems that a line lists for one of several checkpoints


class CheckpointError(Exception):
    """A checkpoint cannot be written, trusted or used.

    Attributes:
        subject: the checkpoint or directory it is about.
        problems: every problem found, one sentence each.
    """

    def __init__(self, subject: object, problems: Iterable[str] | str) -> None:
        self.subject = str(subject)
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self.subject, self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"{self.subject}: {self.problems[0]}"
        more = [f"and {len(self.problems) - LISTED} more"] if len(self.problems) > LISTED else []
        return "\n  - ".join([f"{self.subject}: {len(self.problems)} problems", *self.problems[:LISTED], *more])


class StoreRefuses(CheckpointError):
    """A checkpoint was not written because the disk is full or refuses to write. Raised on every rank."""


class Unreachable(CheckpointError):
    """A store gave no answer, or does not send a file. It may do so later."""


def disk_refuses(error: BaseException | None) -> bool:
    """Whether an error says that a disk cannot be written now but may be later: full, over quota, read-only, server
    gone."""
    return isinstance(error, OSError) and error.errno in _REFUSALS


@contextmanager
def understanding(subject: object) -> Iterator[None]:
    """Context for parsing a file's content. Malformed content is reported as damage, in words.

    Raises:
        CheckpointError: about `subject`, in place of Python's own error.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(subject, f"damaged: {_in_words(error)}") from error


@contextmanager
def reading(subject: object) -> Iterator[None]:
    """Context for reading a file that must exist.

    Raises:
        CheckpointError: about `subject`: the file is missing or cannot be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(subject, "it is lost") from error
    except OSError as error:
        raise CheckpointError(subject, f"it cannot be read: {error}") from error


def part_of(root: Path, name: str) -> Path:
    """Path of a file of a checkpoint.

    Raises:
        CheckpointError: the name or a link leads out of the checkpoint.
    """
    try:
        return path_inside(root, name)
    except UnsafeName as error:
        raise CheckpointError(root, str(error)) from error


def refuse_size(subject: object, found: int, size: int) -> None:
    """Raise CheckpointError for a file of another size than the recorded one."""
    if found != size:
        raise CheckpointError(subject, f"it has {found} bytes instead of {size}")


def refuse_checksum(subject: object, found: str | bytes, written: str | bytes) -> None:
    """Raise CheckpointError for content with another checksum than the recorded one."""
    if found != written:
        raise CheckpointError(subject, "it does not have the checksum it was written with")


def _in_words(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"this is not JSON (line {error.lineno}, column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"this is not UTF-8 text (byte {error.start})"
    if isinstance(error, KeyError):
        return f"the entry {error.args[0]!r} is missing or has a value that is not known"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if type(error) in (ValueError, UnsafeName):  # raised by the readers themselves, with a sentence
        return str(error)
    return "an entry does not have the form that it is written in"


def by_layer(problems: Iterable[str]) -> list[str]:
    """Join problems that differ only in the layer: `missing: layers.0-31.mlp.up.weight ...`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for problem in dict.fromkeys(problems):
        layer = _LAYER.search(problem)
        key = (problem, "") if layer is None else (problem[: layer.start(1)], problem[layer.end(1) :])
        groups.setdefault(key, []).extend([] if layer is None else [int(layer[1])])
    return [before + _ranges(layers) + after for (before, after), layers in groups.items()]


def brief(problems: list[str]) -> str:
    """The first problems in one line, and the number of the others."""
    rest = len(problems) - SHOWN
    return "; ".join(problems[:SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _ranges(numbers: list[int]) -> str:
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def describe_error(error: Exception) -> str:
    """An error in one line, with its type."""
    return f"{type(error).__name__}: {error}" if not isinstance(error, (OSError, CheckpointError)) else str(error)
