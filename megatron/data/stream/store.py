"""Shards as inputs of a tokenizing job. Their state is compared while they are read. A store that fails is retried."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from dataclasses import dataclass
from typing import Any, BinaryIO

from megatron.config.arithmetic.shards import Shard, is_url, state_of, without_secrets

from ..corpus.inputs import Input
from ..errors import DataError

WAITS = (1, 2, 4, 8, 16, 32, 60, 60, 60)  # seconds between two attempts to read from a store
OFTEN = 30.0  # seconds between two comparisons of the state of a shard in a store while it is read
BUFFER = 1 << 20


@dataclass(frozen=True)
class ShardInput(Input):
    """A shard of a stream.

    Attributes:
        shard: its state when the job began.
        checked: time when its state was last compared.
    """

    shard: Shard = Shard("", "", 0, "")
    checked: Any = None

    @classmethod
    def of(cls, shard: Shard) -> ShardInput:
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
