"""The launcher's output: the ranks' output as it comes, and at the end the first failure, once, last."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from typing import TextIO

from megatron.report.terminal import ERASE, StatusLine, columns_of, wrapped

from .known_causes import hint_for
from .status import Failure, describe_status, exit_status

_START = "Traceback (most recent call last)"
_CHAINED = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")
_TORCH = re.compile(r"^\[rank\d+\]: ")  # torch says what we say
YELLOW, PLAIN = "\x1b[33m", "\x1b[0m"
LINES = 80
LONGEST = 2000  # characters of a line that may be a status line
STATUS = StatusLine()  # that rank 0 has drawn on this terminal
PATIENCE = 0.5  # seconds


def log(text: str, stream: TextIO | None = None, *, colour: str = "") -> None:
    """Lines of the launcher's own, on standard error: standard output is the script's. Colours are for terminals
    without NO_COLOR."""
    stream = stream or sys.stderr
    terminal = stream.isatty()
    coloured = colour and terminal and not os.environ.get("NO_COLOR")
    lines = [f"deepy: {line}" for line in text.splitlines() or [""]]
    if terminal:
        lines = [wrapped(line, columns_of(stream), indent="deepy:   ") for line in lines]
    shown = "".join(f"{colour}{line}{PLAIN}\n" if coloured else f"{line}\n" for line in lines)
    stream.write(STATUS.above(shown, columns_of(stream)) if terminal else shown)
    stream.flush()


class RankConsole:
    """Writes ranks' output: whole lines with `[host:rank]` in front, or rank 0's text as it is.

    Rank 0's own text may stop in the middle of a line (`print` without buffering writes the line's end by itself). The
    others' lines wait for that end, but not longer than `PATIENCE`. A status line has no end: they go above it.
    """

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self._rests: dict[tuple[int, int], str] = {}
        self._unfinished: set[int] = set()  # streams where rank 0 is in the middle of a line
        self._waiting: dict[int, tuple[float, str]] = {}  # since when, and what
        self._last = ""  # rank 0's last line on standard output, as far as it has come

    def show(self, host: str, rank: int, stream: int, text: str) -> None:
        """Write a piece of output. Without a terminal of its own only whole lines are prefixed and shown."""
        if self.plain and rank == 0:
            head, end, tail = text.rpartition("\n")
            if end:
                self._write(stream, head + end)
                self._unfinished.discard(stream)
                self._release(stream)
            if tail:
                self._write(stream, tail)
            if not self._draws(stream, text) and tail:
                self._unfinished.add(stream)
            return
        text = self._rests.pop((rank, stream), "") + text
        *lines, rest = text.split("\n")
        if rest:
            self._rests[rank, stream] = rest
        shown = "".join(f"[{host}:{rank}] {line}\n" for line in lines)
        if stream in self._unfinished and shown:
            since, before = self._waiting.get(stream, (time.monotonic(), ""))
            self._waiting[stream] = since, before + shown
        else:
            self._write(stream, shown)

    def _draws(self, stream: int, text: str) -> bool:
        """Whether this text of rank 0 ends in a status line, which is then kept below other lines."""
        if stream != 1 or not sys.stdout.isatty():
            return False
        last = (self._last + text)[-LONGEST:]
        self._last = last.rpartition("\n")[2]
        if ERASE in last:
            STATUS.text = self._last.rpartition(ERASE)[2] if ERASE in self._last else ""
        return ERASE in self._last

    def close(self) -> None:
        """Write what waits, and remove a status line that rank 0 did not live to remove."""
        self.settle(0.0)
        self._write(1, STATUS.above("", columns_of(sys.stdout)))

    def settle(self, patience: float = PATIENCE) -> None:
        """Write what has waited longer than `patience` seconds, on a line of its own."""
        for stream, (since, _) in list(self._waiting.items()):
            if time.monotonic() - since >= patience:
                self._release(stream)

    def _release(self, stream: int) -> None:
        _, text = self._waiting.pop(stream, (0.0, ""))
        if text and stream in self._unfinished:
            self._unfinished.discard(stream)
            text = "\n" + text
        self._write(stream, text)

    @staticmethod
    def _write(stream: int, text: str) -> None:
        target = sys.stdout if stream == 1 else sys.stderr
        if text and not text.startswith(ERASE) and target.isatty():  # rank 0's console begins with the code itself
            text = STATUS.above(text, columns_of(target))
        target.buffer.write(text.encode("utf-8", "surrogateescape"))
        target.flush()


def last_traceback(text: str) -> str:
    """The last traceback of a text with the ones it is chained to, or the last lines without one."""
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
    if first.text.strip() and (not first.shown or _START in first.text):
        where = f"[{first.host}:{first.rank}] " if first.rank is not None else f"[{first.host}] "
        lines += [where + line for line in last_traceback(first.text).splitlines()]
    if first.rank is None:
        lines.append(f"deepy: the run failed: host {first.host} was lost after {seconds:.0f} s: {first.reason}")
    else:
        lines.append(
            f"deepy: the run failed: first failure: rank {first.rank} on {first.host}, "
            f"{describe_status(first.status)}, after {seconds:.0f} s" + (f": {first.reason}" if first.reason else "")
        )
    cause = (
        None if first.rank is not None and first.reason else hint_for(first.text + "\n" + first.reason, first.status)
    )
    if first.disagreement:
        lines.append(f"deepy: cause: {first.disagreement}")
    elif cause:
        lines.append(f"deepy: likely cause: {cause}")
    if others:
        counts = Counter(
            "host lost" if each.rank is None else each.reason or describe_status(each.status) for each in others
        )
        lines.append("deepy: then ended: " + ", ".join(f"{number} x {what}" for what, number in counts.most_common()))
    if logs and first.rank is not None:
        lines.append(f"deepy: log of that rank: {logs}/rank_{first.rank:04d}.log")
    lines.append(f"deepy: exit status {exit_status(first.status) if first.rank is not None else 255}")
    return "\n".join(lines)
