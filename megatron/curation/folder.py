"""A folder of the output, local or behind an fsspec URL, in which files appear whole or not at all."""

import contextlib
import io
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import fsspec
import zstandard
from fsspec.implementations.local import LocalFileSystem

LEVEL = 3  # of zstandard: the same bytes from the same library


@dataclass(frozen=True)
class Folder:
    """A folder by its path or URL."""

    url: str

    @cached_property
    def _place(self) -> tuple[Any, str]:
        system, root = fsspec.core.url_to_fs(self.url)
        return system, root.rstrip("/")

    def __getstate__(self) -> dict[str, str]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, str]) -> None:
        object.__setattr__(self, "url", state["url"])

    def exists(self, name: str) -> bool:
        system, root = self._place
        system.invalidate_cache()
        return bool(system.exists(f"{root}/{name}"))

    def read(self, name: str) -> bytes:
        system, root = self._place
        return bytes(system.cat_file(f"{root}/{name}"))

    def open(self, name: str) -> IO[bytes]:
        system, root = self._place
        return system.open(f"{root}/{name}", "rb")

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file: under another name first on a local disk, in one request in a store."""
        system, root = self._place
        target = f"{root}/{name}"
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
        if not isinstance(system, LocalFileSystem):
            system.pipe_file(target, content)
            return
        draft = f"{target}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            with open(draft, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, target)
        except OSError:  # a full disk must not be kept full by drafts
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise

    def lines(self, name: str) -> "Lines":
        """A new file of JSON lines, compressed if its name ends in .zst."""
        return Lines(self, name)

    def read_lines(self, name: str) -> Iterator[Any]:
        """The values of a file of JSON lines that this module has written."""
        with self.open(name) as raw:
            stream: Any = zstandard.ZstdDecompressor().stream_reader(raw) if name.endswith(".zst") else raw
            for line in io.TextIOWrapper(stream, encoding="utf-8", newline="\n"):
                yield json.loads(line)

    def clean(self) -> None:
        """Remove drafts of killed tasks."""
        system, root = self._place
        if isinstance(system, LocalFileSystem) and system.isdir(root):
            for path in system.find(root):
                if path.endswith(".tmp"):
                    system.rm_file(path)


class Lines:
    """A file of JSON lines that takes its name when it is closed without an error.

    It is made in a local temporary file for a store, and next to its target on a local disk."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._system, root = folder._place
        self._target = f"{root}/{name}"
        self._local = isinstance(self._system, LocalFileSystem)
        if self._local:
            self._system.makedirs(self._target.rpartition("/")[0], exist_ok=True)
            self._draft = f"{self._target}.{uuid.uuid4().hex[:8]}.tmp"
        else:
            import tempfile

            self._draft = tempfile.NamedTemporaryFile(delete=False, suffix=".tmp").name
        self._raw = open(self._draft, "wb")
        packed = name.endswith(".zst")
        self._file: Any = (
            zstandard.ZstdCompressor(LEVEL).stream_writer(self._raw, closefd=False) if packed else self._raw
        )
        self.count = self.bytes = 0

    def add(self, record: Any) -> None:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
        self._file.write(line)
        self.count, self.bytes = self.count + 1, self.bytes + len(line)

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not self._raw:
            self._file.close()
        self._raw.flush()
        os.fsync(self._raw.fileno())
        self._raw.close()
        if kind is not None:
            os.unlink(self._draft)
        elif self._local:
            os.replace(self._draft, self._target)
        else:
            self._system.put_file(self._draft, self._target)
            os.unlink(self._draft)


def to_json(value: Any) -> bytes:
    """A document of JSON whose bytes depend on the value only."""
    return (json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode("utf-8")
