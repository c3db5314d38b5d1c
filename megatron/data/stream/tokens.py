"""The token file that a stream becomes: readable while it grows, by any process, and its place in a blend."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.config import Config
from megatron.config.sections.data import SourceSection

from ..corpus.job import job_key
from ..corpus.progress import Progress
from ..errors import DataError
from ..manifest import Manifest, read_manifest
from ..order.order import TokenRange
from ..source import SourceFile
from ..token_file import TokenFile, prefix_of, token_dtype, with_ending
from ..tokenizer import Tokenizer, tokenizer_for
from .work import job_of

STRIDE = 256  # documents between two known starts
CHUNK = 1 << 20  # sizes that are read together
POLL = 0.05  # seconds between two reads of the progress
OF_ALL = ("sizes", "offsets", "document_index", "tokens", "_data")  # what an index has and a growing file has not
OTHERS = "give another path, or remove the files of this one"
QUIET = 10.0  # seconds of waiting before a line says so


class Work:
    """The process that tokenises, which the first waiting process of all starts.

    Args:
        settings: of `work.tokenise`.
    """

    def __init__(self, settings: dict[str, Any]):
        self._process: subprocess.Popen[str] | None = None
        self.settings = settings

    def tend(self) -> None:
        """Start the process if no process of any rank has it.

        Raises:
            DataError: it ended with an error, or the folder cannot be written.
        """
        if self._process is not None:
            if (status := self._process.poll()) is not None:
                self._end(status)
            return
        path = with_ending(self.settings["prefix"], ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return  # another rank's process, which keeps it while it lives
                self._process = self._start(lock.fileno())
        except OSError as error:
            rule = f"it cannot be locked, or the process that tokenises cannot be started ({error})"
            raise DataError(path, rule, "give path on another disk, or free memory and processes") from error

    def _start(self, lock: int) -> subprocess.Popen[str]:
        top = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (top, os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron.data.stream.work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=(lock,),
            start_new_session=True,  # signals to the rank's group are for the rank
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(self.settings) + "\n")
        process.stdin.flush()  # and left open: it ends with this process
        return process

    def stop(self, wait: float = 0.0) -> str:
        """End the process after it had `wait` seconds to end by itself, and return its output."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
            process.kill()
            with contextlib.suppress(ValueError):  # at the end of the program the pipes may be closed already
                return process.communicate()[0]
        return ""

    __del__ = stop

    def _end(self, status: int) -> None:
        output = self.stop()
        if status:
            rule = f"the process that tokenises it ended with status {status}"
            error = [self.settings["stream"], rule, "see its output above. The next start continues from there"]
            with contextlib.suppress(ValueError):  # it has ended without an error of its own
                error = json.loads(output)
            raise DataError(*error)


class StreamedFile(TokenFile):
    """A token file that grows. Everything that needs all of its tokens waits for its end.

    Attributes:
        whole: the pair, once it is complete.
    """

    def __init__(self, settings: dict[str, Any], tokenizer: Tokenizer, patience: float):
        """Args:
        settings: of `work.tokenise`.
        tokenizer: of its section.
        patience: seconds without new tokens until a wait is an error.

        Raises:
            DataError: tokens of other texts are there.
        """
        self.prefix, self.dtype = prefix_of(settings["prefix"]), token_dtype(tokenizer.size).newbyteorder("<")
        self.bin_path, self.idx_path = with_ending(self.prefix, ".bin"), with_ending(self.prefix, ".idx")
        self.key, self.stream, self.patience = job_key(job_of(settings, []), tokenizer), settings["stream"], patience
        self.whole: TokenFile | None = None
        self._work, self._lock = Work(settings), threading.RLock()
        self._tokens = self._documents = 0
        self._starts: list[int] = []
        self._parts: dict[str, BinaryIO] = {}
        self._refresh()

    def _refresh(self) -> int:
        """Read the progress, and return the number of tokens that exist."""
        path = with_ending(self.prefix, ".progress")
        try:
            progress = Progress.load(path, self.key)
        except FileNotFoundError:  # it ends at this moment
            progress = None
        except DataError as error:
            raise DataError(path, error.rule, OTHERS) from error
        if progress is None:
            if self.idx_path.exists():
                manifest = read_manifest(self.prefix)
                if manifest is None or manifest.job != self.key:
                    rule = f"it has not the tokens of {self.stream} as the configuration has it"
                    raise DataError(self.idx_path, rule, OTHERS)
                whole = TokenFile(self.prefix)
                self._tokens = whole.tokens
                self.__dict__.update({name: value for name, value in vars(whole).items() if name in OF_ALL})
                self.whole = whole
                self._work.stop(QUIET)
        elif progress.tokens > self._tokens:
            with contextlib.suppress(FileNotFoundError):  # between two of the job's renames
                self._extend(progress.documents)
                self._tokens = progress.tokens
        return self._tokens

    def _extend(self, documents: int) -> None:
        """Remember the starts of further documents, one in `STRIDE`."""
        last = self._starts[-1] if self._starts else 0
        done = (len(self._starts) - 1) * STRIDE if self._starts else 0
        self._part(".bin")
        while done < documents:
            sizes = self._sizes(done, min(documents, done + CHUNK))
            ends = last + np.cumsum(sizes, dtype=np.int64)
            begins = np.concatenate([[last], ends])[: len(sizes) : STRIDE].tolist()
            self._starts[done // STRIDE :] = begins
            done, last = done + len(sizes), int(ends[-1])
        self._documents = documents

    def _part(self, ending: str) -> int:
        """The descriptor of a growing file, which stays valid when the file gets its name."""
        if ending not in self._parts:
            try:
                self._parts[ending] = open(with_ending(self.prefix, f"{ending}.part"), "rb")
            except FileNotFoundError:
                self._parts[ending] = open(with_ending(self.prefix, ending), "rb")
        return self._parts[ending].fileno()

    def _bytes(self, ending: str, start: int, length: int) -> bytes:
        """Bytes of a growing file. Another host's may be seen a little later than its progress."""
        end, found = time.monotonic() + self.patience, b""
        while len(found) < length:
            found += os.pread(self._part(ending), length - len(found), start + len(found))
            if len(found) < length:
                if time.monotonic() > end:
                    raise DataError(
                        self.bin_path, "it has fewer bytes than its progress says", "give path on another disk"
                    )
                time.sleep(POLL)
        return found

    def _sizes(self, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self._bytes(".sizes", 4 * first, 4 * (last - first)), "<i4")

    def _await(self, wanted: int | None) -> int:
        """Wait until `wanted` tokens exist, or for the end, and return the number of tokens."""
        if self.whole is not None or (wanted is not None and self._tokens >= wanted):
            return self._tokens
        with self._lock:
            begin = last = time.monotonic()
            before, quiet = self._refresh(), True
            while self.whole is None and (wanted is None or self._tokens < wanted):
                self._work.tend()
                time.sleep(POLL)
                now = time.monotonic()
                if self._refresh() > before or self.whole is not None:
                    before, last = self._tokens, now
                elif now - last > self.patience:
                    missing = "all" if wanted is None else f"{wanted:,}"
                    rule = f"no token was added for {self.patience:g} seconds: {self._tokens:,} of {missing} exist"
                    fix = "check the store and the process that tokenises, or give data.streaming.patience"
                    raise DataError(self.stream, rule, fix)
                if quiet and now - begin > QUIET:
                    quiet = False
                    what = "its end" if wanted is None else f"{wanted:,} tokens"
                    print(f"{self.stream}: waiting for {what}, {self._tokens:,} exist", file=sys.stderr, flush=True)
            return self._tokens

    def finish(self) -> TokenFile:
        """The pair, after its last token."""
        self._await(None)
        assert self.whole is not None
        return self.whole

    def __getattr__(self, name: str) -> Any:
        if name not in OF_ALL:
            raise AttributeError(name)
        return getattr(self.finish(), name)

    def tokens_of(self, first: int, last: int, wanted: int | None = None) -> int:
        return self._await(wanted)

    def all_have(self, size: int, first: int, last: int) -> bool:
        """The first document of another size decides, or the end."""
        while self.whole is None:
            sizes = self._sizes(0, min(self._documents, CHUNK))
            if (sizes != size).any():
                return False
            self._await(self._tokens + 1 if self._documents < CHUNK else None)
        return self.whole.all_have(size, 0, len(self.whole))

    def documents_from(self, position: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        if self.whole is not None:
            yield from self.whole.documents_from(position, 0, len(self.whole))
            return
        block = bisect_right(self._starts, position) - 1
        for number in range(block, len(self._starts)):
            sizes = self._block(number)
            ends = self._starts[number] + np.cumsum(sizes, dtype=np.int64)
            for inside in range(int(np.searchsorted(ends, position, side="right")), len(sizes)):
                yield number * STRIDE + inside, int(ends[inside] - sizes[inside]), int(sizes[inside])

    def _block(self, number: int) -> np.ndarray:
        return self._sizes(number * STRIDE, min((number + 1) * STRIDE, self._documents))

    def read(self, document: int, start: int = 0, length: int | None = None) -> np.ndarray:
        if self.whole is not None:
            return self.whole.read(document, start, length)
        number, inside = divmod(document, STRIDE)
        sizes, width = self._block(number), self.dtype.itemsize
        begin = self._starts[number] + int(sizes[:inside].sum(dtype=np.int64)) + start
        count = int(sizes[inside]) - start if length is None else length
        return np.frombuffer(self._bytes(".bin", begin * width, count * width), self.dtype)

    @property
    def note(self) -> str | None:
        return None


def open_source(section: SourceSection, config: Config) -> SourceFile:
    """The source of a stream: a plain token file where it has been tokenised to its end.

    Raises:
        DataError: tokens of other texts are there.
    """
    found = StreamedSource(section, config)
    return found if found.file.whole is None else SourceFile(section, config.data.cache)


class StreamedSource(SourceFile):
    """A stream that may still be tokenised."""

    file: StreamedFile

    def __init__(self, section: SourceSection, config: Config):
        chosen = config.tokenizer
        if section.tokenizer is not None:
            chosen = chosen.model_copy(update={"path": section.tokenizer})
        options, tokenizer = config.data.streaming, tokenizer_for(chosen, True)
        settings = {
            "stream": section.stream,
            "shards": section.shards,
            "prefix": os.path.abspath(section.path),
            "tokenizer": chosen.model_dump(mode="json"),
            "key": options.text,
            "workers": options.workers,
        }
        self.file = StreamedFile(settings, tokenizer, options.patience)
        self.name, self.path = section.name, section.path
        self.counts = section.loss_weight if section.loss else 0.0
        self.loss, self.weight = section.loss, section.weight
        self.facts = {"largest": None, "smallest": None, "fingerprint": self.file.key}
        self.manifest = Manifest(tokenizer.facts, 0, 0, 0, self.file.dtype.name, "", "")
        self.first, self.last = 0, sys.maxsize
        self.document_weights = self.labels = self.checksums = self.label_checksums = None

    @property
    def grows(self) -> bool:
        return self.file.whole is None

    def check(self, spans: tuple[TokenRange, ...]) -> None:
        """Growing files have no checksums yet."""
