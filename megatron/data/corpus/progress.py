"""Progress of a tokenizing job: its counters, the file to resume from, and the line for the user."""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ...config.file_access import read_json, replace_file
from ..errors import DataError


@dataclass
class Progress:
    """The safely written part of a job."""

    key: str  # hash of the settings and inputs. Another job does not resume from here.
    input: int = 0  # input, position, line: where reading resumes
    position: int = 0
    line: int = 1
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    largest: int = 0
    bad: int = 0
    examples: list[list] = field(default_factory=list)  # the first bad records, as [input, line, reason]
    per_input: list[list[int]] = field(default_factory=list)  # documents and tokens of each input
    publishing: bool = False  # everything is written, and only renames are missing

    def save(self, path: Path) -> None:
        """Write and fsync it, completely or not at all."""
        replace_file(path, json.dumps(asdict(self)), durable=True)

    @classmethod
    def load(cls, path: Path, key: str) -> "Progress | None":
        """The progress of an earlier run of the same job, or None.

        Raises:
            DataError: it was another job.
        """
        if not path.is_file():
            return None
        try:
            found = cls(**read_json(path))
        except (ValueError, TypeError) as error:
            raise DataError(path, f"it is damaged ({error})", "start again with --overwrite") from error
        if found.key != key:
            rule = "an unfinished job with other inputs or options is there"
            raise DataError(path, rule, "finish it, or start again with --overwrite")
        return found


class Display:
    """A line on standard error: documents, MB/s, tokens/s, time left. On a terminal it is updated in place."""

    def __init__(self, total_bytes: int, quiet: bool = False, every: float = 0.5):
        self.total, self.quiet = total_bytes, quiet
        self.live = sys.stderr.isatty()
        self.every = every if self.live else 30.0
        self.begin = self.last = time.monotonic()
        self.first: Progress | None = None

    def show(self, progress: Progress, read_bytes: int, final: bool = False) -> None:
        """Print it if it is due.

        Args:
            read_bytes: bytes of the input files that are done, for the share and the time left.
        """
        now = time.monotonic()
        if self.first is None:
            self.first, self.read_first = Progress(**asdict(progress)), read_bytes
        if self.quiet or (now - self.last < self.every and not final):
            return
        self.last, passed = now, max(now - self.begin, 1e-9)
        rate = (progress.text_bytes - self.first.text_bytes) / passed
        tokens = (progress.tokens - self.first.tokens) / passed
        line = f"{progress.documents:,} documents  {progress.tokens:,} tokens"
        line += f"  {rate / 1e6:.1f} MB/s  {tokens:,.0f} tokens/s"
        if self.total:
            share = min(read_bytes / self.total, 1.0)
            speed = (read_bytes - self.read_first) / passed
            line += f"  {100 * share:.1f} %" + (
                f"  {_clock((self.total - read_bytes) / speed)} left" if speed > 0 and not final else ""
            )
        if progress.bad:
            line += f"  {progress.bad:,} bad"
        end = "\n" if final or not self.live else ""
        sys.stderr.write(("\r\x1b[2K" if self.live else "") + line + end)
        sys.stderr.flush()


class Meter:
    """Progress of a long piece of work on standard error, if it takes longer than a few seconds."""

    def __init__(self, what: str, unit: str):
        self.what, self.unit, self.live = what, unit, sys.stderr.isatty()
        self.begin = self.last = time.monotonic()
        self.shown = False

    def show(self, done: int, total: int) -> None:
        """Print it if it is due."""
        now = time.monotonic()
        final = done >= total and self.shown
        if now - self.last < (0.5 if self.live else 10.0) and not final:
            return
        self.last, self.shown = now, not final
        left = (total - done) * (now - self.begin) / max(done, 1)
        line = f"{self.what}: {done:,} of {total:,} {self.unit}" + (f", {_clock(left)} left" if not final else "")
        sys.stderr.write(("\r\x1b[2K" if self.live else "") + line + ("\n" if final or not self.live else ""))
        sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
