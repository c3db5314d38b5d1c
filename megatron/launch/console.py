"""What the launcher says: the ranks' output as it comes, and at the end the first failure, once, last."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import TextIO

from .hints import hint
from .status import Failure, describe, exit_status

_START = "Traceback (most recent call last)"
_CHAINED = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")
_TORCH = re.compile(r"^\[rank\d+\]: ")  # torch says what we say
LINES = 80


def say(text: str, stream: TextIO | None = None) -> None:
    """A line of the launcher's own, on standard error: standard output is the script's."""
    stream = stream or sys.stderr
    for line in text.splitlines() or [""]:
        stream.write(f"deepy: {line}\n")
    stream.flush()


class Console:
    """Writes ranks' output: whole lines with `[host:rank]` in front, or one rank's text as it is."""

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self._open: dict[tuple[int, int], str] = {}

    def show(self, host: str, rank: int, stream: int, text: str) -> None:
        """Write a piece of output. Without a terminal of its own only whole lines are prefixed and shown."""
        target = sys.stdout if stream == 1 else sys.stderr
        if self.plain and rank == 0:
            self._write(target, text)
            return
        text = self._open.pop((rank, stream), "") + text
        *lines, rest = text.split("\n")
        if rest:
            self._open[rank, stream] = rest
        self._write(target, "".join(f"[{host}:{rank}] {line}\n" for line in lines))

    @staticmethod
    def _write(target: TextIO, text: str) -> None:
        target.buffer.write(text.encode("utf-8", "surrogateescape"))
        target.flush()


def last_traceback(text: str) -> str:
    """The last traceback of a text with the ones it is chained to; without one, the last lines."""
    lines = [_TORCH.sub("", line) for line in text.splitlines()]
    starts = [index for index, line in enumerate(lines) if line.startswith(_START)]
    if not starts:
        return "\n".join(lines[-20:])
    first = len(starts) - 1
    while first > 0 and any(_CHAINED.search(line) for line in lines[starts[first - 1] : starts[first]]):
        first -= 1
    shown = lines[starts[first] :]
    return "\n".join(shown if len(shown) <= LINES else [*shown[: LINES // 2], "    ...", *shown[-LINES // 2 :]])


def report(first: Failure, others: list[Failure], seconds: float, logs: str | None) -> str:
    """The end of a failed run, for people: traceback, who, how, why, where to read more."""
    lines = []
    if first.text.strip():
        where = f"[{first.host}:{first.rank}] " if first.rank is not None else f"[{first.host}] "
        lines += [where + line for line in last_traceback(first.text).splitlines()]
    if first.rank is None:
        lines.append(f"deepy: the run failed: host {first.host} was lost after {seconds:.0f} s: {first.reason}")
    else:
        lines.append(
            f"deepy: the run failed: first failure: rank {first.rank} on {first.host}, {describe(first.status)}, "
            f"after {seconds:.0f} s" + (f": {first.reason}" if first.reason else "")
        )
    cause = (
        None if first.rank is not None and first.reason else hint(first.text + "\n" + first.reason, first.status)
    )
    if cause:
        lines.append(f"deepy: likely cause: {cause}")
    if others:
        counts = Counter(
            "host lost" if each.rank is None else each.reason or describe(each.status) for each in others
        )
        lines.append(
            "deepy: then ended: " + ", ".join(f"{number} x {what}" for what, number in counts.most_common())
        )
    if logs and first.rank is not None:
        lines.append(f"deepy: log of that rank: {logs}/rank_{first.rank:04d}.log")
    lines.append(f"deepy: exit status {exit_status(first.status) if first.rank is not None else 255}")
    return "\n".join(lines)
