"""The process that tokenises a stream: `python -m megatron.data.stream.work`, started by a rank.

Shards are inputs of a tokenizing job. Their state is compared while they are read. A store that fails is retried.

It gets its settings as a line of JSON on standard input, and ends when that is closed, which is when the rank ends. Its
only output is the error of a user, as JSON."""

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron import __version__
from megatron.config.arithmetic.shards import (
    Shard,
    ShardError,
    describe_shards,
    is_url,
    list_shards,
    state_of,
    without_secrets,
)
from megatron.config.sections.data import TokenizerSection

from ..corpus.encode import Treatment
from ..corpus.inputs import Input
from ..corpus.job import TokenizeJob, run
from ..errors import DataError

WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60)  # seconds between two attempts to read from a store
OFTEN = 30.0  # seconds between two comparisons of the state of a shard in a store while it is read
BUFFER = 1 << 20


@dataclass(frozen=True)
class ShardInput(Input):
    """A shard of a stream."""

    shard: Shard = Shard("", "", 0, "")  # its state when the job began
    checked: Any = None  # time when its state was last compared

    @classmethod
    def of(cls, shard: Shard) -> "ShardInput":
        return cls(shard.path, shard.kind, shard=shard, checked=[0.0])

    def check(self, inside: bool = False) -> None:
        """Refuse a shard that has changed. `inside`: between two reads of it.

        Raises:
            DataError: it has changed, or is missing.
        """
        remote = is_url(self.name)
        if remote and inside and time.monotonic() - self.checked[0] < OFTEN:
            return
        self.checked[0] = time.monotonic()
        try:
            now = patiently(lambda: state_of(self.name), self.name) if remote else state_of(self.name)
        except FileNotFoundError as error:
            raise changed(self.name, "it is no longer there") from error
        if (now.size, now.tag, now.changed) != (self.shard.size, self.shard.tag, self.shard.changed):
            what = f"it had {self.shard.size} bytes, now {now.size} with another content or time"
            raise changed(self.name, what)

    def open(self) -> BinaryIO | None:
        if not is_url(self.name):
            return None
        return io.BufferedReader(PatientFile(self.name, self.shard.size), BUFFER)  # type: ignore[return-value]


def changed(name: str, what: str) -> DataError:
    fix = "restore this file, and start again: the order of a stream is fixed by its files"
    return DataError(name, f"this shard has changed while its stream was read: {what}", fix)


def patiently(work: Any, url: str) -> Any:
    """The result of `work`, which is tried again while the store fails.

    Raises:
        DataError: it failed each time.
        FileNotFoundError: the store has no such file.
    """
    for wait in (*WAITS, None):
        try:
            return work()
        except FileNotFoundError:
            raise
        except Exception as error:  # each store has its own
            what = f"{type(error).__name__}: {without_secrets(str(error))}"
            if wait is None:
                rule = f"the store has failed {len(WAITS) + 1} times in a row: {what}"
                cause = error if isinstance(error, OSError) else OSError(what)  # what is tokenised stays
                raise DataError(url, rule, "start again when the store answers: the run continues") from cause
            print(f"{url}: {what}. Next attempt in {wait} s", file=sys.stderr, flush=True)
            time.sleep(wait)


class PatientFile(io.RawIOBase):
    """A file in a store. A read that fails is repeated from its position with a new connection."""

    def __init__(self, url: str, size: int):
        self.url, self.size, self._at = url, size, 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence], 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self.size - self._at)
        if wanted <= 0:
            return 0
        try:
            data = patiently(lambda: self._read(wanted), self.url)
        except FileNotFoundError as error:
            raise changed(self.url, "it is no longer there") from error
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        import fsspec

        try:
            if self._file is None:
                self._file = fsspec.open(self.url, "rb").open()
            self._file.seek(self._at)
            data = bytes(self._file.read(wanted))
        except BaseException:
            self._forget()
            raise
        if not data:
            self._forget()
            raise OSError(f"it ends at byte {self._at} of {self.size}")
        return data

    def _forget(self) -> None:
        with contextlib.suppress(Exception):
            if self._file is not None:
                self._file.close()
        self._file = None

    def close(self) -> None:
        self._forget()
        super().close()


SAVE_EVERY = 0.5  # seconds until new tokens can be read
NICE = 5  # ranks have precedence


def job_of(settings: dict[str, Any], inputs: list[ShardInput]) -> TokenizeJob:
    """The tokenizing job of a stream."""
    return TokenizeJob(
        list(inputs),
        settings["prefix"],
        TokenizerSection(**settings["tokenizer"]),
        Treatment(key=settings["key"]),
        workers=settings["workers"] or max(1, len(os.sched_getaffinity(0)) // 2),
        save_every=SAVE_EVERY,
        version=__version__,
        identity=settings["shards"],
        at_once=True,
    )


def tokenise(settings: dict[str, Any]) -> None:
    """Tokenise a stream to its end, or the rest of it.

    Raises:
        DataError: its files have another state than in the configuration, or cannot be read.
    """
    stream = settings["stream"]
    try:
        shards, _ = list_shards(stream)
    except ShardError as error:
        raise DataError(stream, error.rule, error.fix) from OSError(error.rule)
    if (now := describe_shards(shards)) != settings["shards"]:
        rule = f"its files have changed since the start: they were {settings['shards']}, and are {now}"
        raise DataError(stream, rule, "restore them: the order of a stream is fixed by its files") from OSError(rule)
    found = run(job_of(settings, [ShardInput.of(shard) for shard in shards])).progress
    bad = "".join(f"\n    {name}:{line}: {reason}" for name, line, reason in found.examples)
    made = f"{found.documents:,} documents, {found.tokens:,} tokens, {found.bad:,} bad records"
    print(f"{stream}: tokenised, {made}{bad}", file=sys.stderr, flush=True)


def main() -> int:
    settings = json.loads(sys.stdin.readline())

    def follow() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):  # a scheduler sends them to all, and the rank may need a last batch
        signal.signal(number, lambda *_: None)
    os.nice(NICE)
    with contextlib.suppress(OSError):  # a rank may be bound to some of the host's processors
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        tokenise(settings)
    except DataError as error:
        print(json.dumps([error.subject, error.rule, error.fix]), flush=True)
        return 2
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the thread that follows the rank still reads
