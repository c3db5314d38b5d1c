"""Input files of a recipe, grouped to shards. A shard is a task, and its documents keep their order."""

import os
import sysconfig
from dataclasses import asdict, dataclass
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from megatron.data.errors import DataError

from .recipe import RecipeSection, SourceSection

ENDINGS = {"jsonl": ".jsonl .ndjson", "parquet": ".parquet", "warc": ".warc .wet", "text": ".txt .md .rst .py"}
FORMATS = {ending: name for name, endings in ENDINGS.items() for ending in endings.split()}
STDLIB = "{stdlib}"  # in a path: the folder of Python's standard library
NO_FORMAT = "its ending stands for no format"
STATES = ("ETag", "etag", "blob_id", "mtime", "LastModified", "updated")  # what changes with a file, by store
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of a source."""

    source: str
    url: str  # what fsspec opens
    name: str  # path below the source's folder. It is a part of ids.
    format: str  # "jsonl", "parquet", "warc" or "text". Empty if the ending stands for none.
    size: int  # bytes
    state: str  # a time or tag of its last change
    problem: str = ""  # why it must not be read. Empty if it may be.

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def format_of(name: str) -> str | None:
    """The format that the ending of a name stands for."""
    base = name.lower()
    for ending in COMPRESSED:
        base = base.removesuffix(ending)
    return FORMATS.get(os.path.splitext(base)[1])


def find_files(source: SourceSection) -> list[InputFile]:
    """The files of a source, in the order of their names.

    Raises:
        DataError: there is none.
    """
    try:
        system, root = fsspec.core.url_to_fs(source.path.replace(STDLIB, sysconfig.get_paths()["stdlib"]))
        root = root.rstrip("/")
        globbed = any(each in root for each in "*?[")
        listed = system.glob(root, detail=True) if globbed else system.find(root, detail=True)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            source.path, f"it cannot be listed ({error})", "check the path and the store's package"
        ) from error
    base = root.partition("*")[0].partition("?")[0].partition("[")[0].rpartition("/")[0] if globbed else root
    if root in listed and not globbed:
        base = root.rpartition("/")[0]
    found = []
    for path in sorted(listed):
        entry, name = listed[path], path.removeprefix(base).lstrip("/")
        kind = source.format if source.format != "auto" else format_of(name)
        folders = name.split("/")[:-1]
        wanted = not source.endings or name.endswith(tuple(source.endings))
        if not wanted or set(folders) & set(source.skip) or entry["type"] == "directory":
            continue
        state = str(next((entry[each] for each in STATES if each in entry), ""))
        problem = _unsafe(system, base, path, entry) or ("" if kind else NO_FORMAT)
        url = _shown(system.unstrip_protocol(path))
        found.append(InputFile(source.name, url, _shown(name), kind or "", int(entry["size"] or 0), state, problem))
    if all(each.problem == NO_FORMAT for each in found):
        raise DataError(source.path, f"no file of source {source.name} can be read", "check path, format and endings")
    return found


def _unsafe(system: Any, base: str, path: str, entry: dict[str, Any]) -> str:
    """Why a local entry is not opened: a link that leads out of the folder, a pipe, a name that is no text."""
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if ".." in path.split("/"):
        return "its name leads out of the folder"
    if not isinstance(system, LocalFileSystem):
        return ""
    real = os.path.realpath(path)
    if os.path.commonpath([real, os.path.realpath(base or "/")]) != os.path.realpath(base or "/"):
        return "it is a link that leads out of the folder"
    return "" if os.path.isfile(real) else "it is no regular file"


def _shown(name: str) -> str:
    """A name that UTF-8 can express. A file whose name cannot be is not opened."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def shards_of(recipe: RecipeSection) -> list[list[InputFile]]:
    """The files of all sources in consecutive groups. A group has files of one source, and at most `shard_bytes` unless
    it is one file."""
    shards: list[list[InputFile]] = []
    for source in recipe.sources:
        size = None
        for file in find_files(source):
            if size is None or size + file.size > recipe.shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(file)
            size += file.size
    return shards
