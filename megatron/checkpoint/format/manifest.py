"""The manifest: what a checkpoint consists of, and how it is known again.

It has the checksums of the meta data and of the index, which has those of the ranks' files in turn; so it has the same
size for one rank and for ten thousand. Until format 1 it listed the files itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ...config.paths import UnsafeName, path_inside
from . import format_1 as former
from .durable import new_file
from .errors import CheckpointError, reading, understanding
from .index import INDEX_NAME, Index, checksum
from .index_file import IndexSeal, read_index, write_index
from .merging import Merged
from .names import MANIFEST_NAME, META_NAME
from .rankfile import FileRecord
from .table import coverage_problems

FORMAT = 2


@dataclass(frozen=True)
class Part:
    """A file that is read whole, as it was written."""

    size: int
    checksum: str

    @classmethod
    def from_dict(cls, values: dict) -> Part:
        part = cls(**values)
        if type(part.size) is not int or type(part.checksum) is not str:
            raise ValueError(f"no part of a checkpoint: {values!r}")
        return part


@dataclass(frozen=True)
class Manifest:
    """What was read.

    Attributes:
        meta: of the meta data.
        index: of the index; of format 1 it is a part like any other ...
        records: ... and the ranks' files are listed here.
    """

    meta: Part
    index: IndexSeal | Part
    records: list[FileRecord] | None = None


def write_merged(
    root: Path, tables: Iterable[tuple[str, np.ndarray]], records: Sequence[FileRecord], *, whole: bool
) -> IndexSeal:
    """Write the index of the ranks' files under `root`.

    Args:
        tables: (vocabulary as JSON, rows) of each file, which are taken one after the other.
        records: of the same files; they may become known as the tables are taken.
        whole: these are all files, so that they must cover each tensor exactly once; and the disk is waited for.

    Raises:
        CheckpointError: they do not; or about one of the files, by its path in the checkpoint.
        OSError, ValueError: as they come.
    """
    problems: list[str] = []

    def name(number: int) -> str:
        return records[number].path if number < len(records) else f"file {number}"

    with Merged(tables, root, name) as merged, new_file(root / INDEX_NAME, wait=whole) as write:
        parts = _covering(merged, problems) if whole else merged.parts()
        seal = write_index(write, merged, parts, records)
    if problems:
        raise CheckpointError(root, problems)
    return seal


def _covering(merged: Merged, problems: list[str]) -> Iterator[np.ndarray]:
    """The parts of the rows; `problems` takes what they leave out, or have twice."""
    for rows in merged.parts():
        problems += coverage_problems(rows, merged.vocabulary)
        yield rows


def manifest_of(index: IndexSeal, meta: bytes) -> bytes:
    """The content of the manifest of a checkpoint with this index and these meta data."""
    parts = {INDEX_NAME: index.to_dict(), META_NAME: asdict(Part(len(meta), checksum(meta)))}
    content = json.dumps({"format": FORMAT, "parts": parts})
    return json.dumps({"checksum": checksum(content.encode()), "content": content}).encode()


def part_of(root: Path, name: str) -> Path:
    """A file of a checkpoint.

    Raises:
        CheckpointError: the name leads out of the checkpoint, or a link does.
    """
    try:
        return path_inside(root, name)
    except UnsafeName as error:
        raise CheckpointError(root, str(error)) from error


def read_manifest(root: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is lost or damaged, or names what no checkpoint has.
    """
    path = part_of(root, MANIFEST_NAME)
    try:
        with understanding(path):
            outer = json.loads(path.read_bytes())
            content = outer["content"]
            if checksum(content.encode()) != outer["checksum"]:
                raise CheckpointError(path, "it does not have the checksum it was written with")
            inner = json.loads(content)
            if inner["format"] not in (1, FORMAT):
                raise CheckpointError(path, f"format {inner['format']}; this version reads formats 1 to {FORMAT}")
            parts = inner["parts"]
            if lost := {INDEX_NAME, META_NAME} - set(parts):
                raise ValueError(f"it does not name {' and '.join(sorted(lost))}")
            if strange := set(parts) - {INDEX_NAME, META_NAME}:
                raise ValueError(f"no part of a checkpoint: {', '.join(map(repr, sorted(strange)))}")
            meta = Part.from_dict(parts[META_NAME])
            if inner["format"] == 1:
                return Manifest(
                    meta, Part.from_dict(parts[INDEX_NAME]), [former.listed_file(each) for each in inner["files"]]
                )
            return Manifest(meta, IndexSeal.from_dict(parts[INDEX_NAME]))
    except FileNotFoundError as error:
        raise CheckpointError(path, "it is missing, so this is not a complete checkpoint") from error
    except OSError as error:
        raise CheckpointError(path, f"it cannot be read: {error}") from error


def read_part(root: Path, name: str, part: Part) -> bytes:
    """The content of a file of the checkpoint.

    Raises:
        CheckpointError: it is lost or damaged.
    """
    path = part_of(root, name)
    with reading(path):
        _refuse_size(path, part.size)
        content = path.read_bytes()
    if checksum(content) != part.checksum:
        raise CheckpointError(path, "it does not have the checksum it was written with")
    return content


def open_index(
    root: Path, manifest: Manifest, share: tuple[int, int] | None = (0, 1)
) -> tuple[Index, Sequence[FileRecord]]:
    """The index of a checkpoint, and the records of the ranks' files; see `read_index`.

    Of format 1 the first of those who share it reads it whole, the others do not look at its checksum.
    """
    if isinstance(manifest.index, IndexSeal):
        return read_index(part_of(root, INDEX_NAME), manifest.index, share)
    path = part_of(root, INDEX_NAME)
    if share is not None and share[0] == 0:
        read_part(root, INDEX_NAME, manifest.index)
    with reading(path):
        _refuse_size(path, manifest.index.size)
        return former.open_index(path), manifest.records or []


def _refuse_size(path: Path, size: int) -> None:
    found = os.stat(path).st_size
    if found != size:
        raise CheckpointError(path, f"it has {found} bytes instead of {size}")
