"""Files of texts: their kinds by ending, and the shards of a stream with a description of their state.

Torch and the readers are not imported: a start lists the shards before any process exists."""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..problems import RuleError

LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".arrow", ".feather")
TEXTS = (".txt", ".text", ".md", ".rst", ".py")
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
KNOWN = (*LINES, ".json", *TABLES, *TEXTS, ".dat", ".tar")
SAMPLE = 1 << 14  # bytes at the beginning, in the middle and at the end that identify a local file, with its size
TAGS = "ETag etag blob_id md5Hash crc32c content_md5 Content-MD5 mtime LastModified Last-Modified updated".split()
SECRET = re.compile(
    r"://[^/?#@]*:[^/?#@]*@|[?&][^=&#/]*(sig|token|key|secret|passw|credential)[^=&#/]*=", re.IGNORECASE
)


def ending_of(name: str) -> tuple[str, str]:
    """The ending of the content, and that of a compression around it."""
    path = Path(name)
    outer = path.suffix.lower()
    if outer in COMPRESSED:
        return Path(path.stem).suffix.lower(), outer
    return outer, ""


def kind_of(name: str) -> str | None:
    """The kind of a file by its ending, or None."""
    ending, _ = ending_of(name)
    kinds = {LINES: "lines", TABLES: "table", TEXTS: "text", (".json",): "array", (".dat",): "dat"}
    return next((kind for endings, kind in kinds.items() if ending in endings), None)


class ShardError(RuleError):
    """The shards of a stream cannot be listed."""


@dataclass(frozen=True)
class Shard:
    """One file of a stream."""

    path: str  # local path or URL
    name: str  # its path below the stream
    size: int  # bytes
    tag: str  # hash of samples of a local file, or the store's tag of its content
    changed: int = 0  # time of a local file's last change, in ns. 0 in a store.

    @property
    def kind(self) -> str:
        return kind_of(self.name) or ""


def is_url(path: str) -> bool:
    return "://" in path


def has_secret(path: str) -> bool:
    """Whether a URL has a password before its host, or a key or signature in its query."""
    return is_url(path) and SECRET.search(path) is not None


def without_secrets(text: str) -> str:
    """An error of a store without the queries and passwords of its URLs. A store may answer with a signed URL."""
    return re.sub(r"://[^/\s@]*@", "://", re.sub(r"(://[^\s?'\"]+)\?[^\s'\"]+", r"\1?...", text))


def list_shards(stream: str) -> tuple[list[Shard], list[str]]:
    """The shards of a stream in the order of `deepy data tokenize`, and the names of files that are skipped.

    Raises:
        ShardError: it cannot be listed, or has no file of texts.
    """
    found = _in_store(stream) if is_url(stream) else _in_folder(stream)
    shards = [each for each in found if each.kind]
    skipped = [each.name for each in found if not each.kind]
    if not shards:
        there = f"there are only {', '.join(repr(each)[1:-1] for each in skipped[:8])}" if skipped else "it is empty"
        rule = f"must have files of texts, and {there}"
        raise ShardError(rule, f"give a folder with files that end in {', '.join(KNOWN[:-1])}")
    return shards, skipped


def describe_shards(shards: list[Shard]) -> str:
    """The state of a stream in a line: number of files, bytes, and a hash of all names, sizes and tags."""
    total = hashlib.blake2b(digest_size=8)
    for each in shards:
        total.update(repr((each.name, each.size, each.tag)).encode())
    return f"{len(shards)} files, {sum(each.size for each in shards)} bytes, {total.hexdigest()}"


def state_of(path: str) -> Shard:
    """The present state of one shard. Its name is its path.

    Raises:
        OSError: it does not exist.
    """
    if is_url(path):
        import fsspec

        system, inside = fsspec.core.url_to_fs(path)
        system.invalidate_cache()
        return Shard(path, path, *_tagged(system.info(inside)))
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is no plain file")
    return Shard(path, path, status.st_size, _sample(path, status.st_size, status.st_mtime_ns), status.st_mtime_ns)


def _in_folder(stream: str) -> list[Shard]:
    root = Path(stream)
    if not root.exists():
        raise ShardError(f"must exist: there is no {stream}", f"check the path (it is seen from {Path.cwd()})")
    try:
        files = files_below(root) if root.is_dir() else [stream]
        states = [state_of(file) for file in files]
    except OSError as error:
        raise ShardError(f"must be readable: {error}", "check its files and their permissions") from error
    base = root if root.is_dir() else root.parent
    names = (os.path.relpath(file, base) for file in files)
    return [Shard(each.path, name, each.size, each.tag, each.changed) for name, each in zip(names, states)]


def files_below(root: Path) -> list[str]:
    """The files below a folder, sorted, without those whose name, or whose folder's, begins with a dot.

    Raises:
        OSError: a folder cannot be read, which Path.rglob skips.
    """

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [each for each in folders if not each.startswith(".")]
        paths = (Path(folder, each) for each in names if not each.startswith("."))
        found += [str(path) for path in paths if path.is_file()]
    return sorted(found)


def _in_store(stream: str) -> list[Shard]:
    import fsspec

    try:
        system, root = fsspec.core.url_to_fs(stream)
        root = root.rstrip("/")
        listed: dict[str, dict[str, Any]] = system.find(root, detail=True)
        return list(_entries(system, root, listed))
    except Exception as error:  # each store has its own
        fix = "check the URL, its credentials, and the package of its protocol (s3:// s3fs, gs:// gcsfs)"
        raise ShardError(f"must be listed: {type(error).__name__}: {without_secrets(str(error))}", fix) from error


def _entries(system: Any, root: str, listed: dict[str, dict[str, Any]]) -> Iterator[Shard]:
    for path in sorted(listed):
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        hidden = any(part.startswith(".") for part in name.split("/"))
        if listed[path].get("type") != "directory" and not hidden:
            entry = listed[path]
            if entry.get("size") is None:
                entry = system.info(path)
            yield Shard(system.unstrip_protocol(path), name, *_tagged(entry))


def _tagged(entry: dict[str, Any]) -> tuple[int, str]:
    return int(entry["size"] or 0), str(next((entry[tag] for tag in TAGS if entry.get(tag)), ""))


@lru_cache(1 << 16)
def _sample(path: str, size: int, changed: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        for start in sorted({0, max(size // 2 - SAMPLE // 2, 0), max(size - SAMPLE, 0)}):
            file.seek(start)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()
