"""The manifest: the checksums of a checkpoint's meta data and index.

The index has the checksums of the ranks' files. The manifest therefore has the same size for any number of ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ...config.file_access import UnsafeName, path_inside
from . import format_1
from .durable import new_file
from .errors import CheckpointError, reading, refuse_checksum, refuse_size, understanding
from .index import INDEX_NAME, Index, checksum
from .index_file import IndexSeal, read_index, write_index
from .merging import Merged
from .meta import Meta
from .names import MANIFEST_NAME, META_NAME
from .rankfile import FileRecord
from .table import coverage_problems

FORMAT = 2


@dataclass(frozen=True)
class Part:
    """Size and checksum of a file that is read whole."""

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
    """Checksums of the meta data and of the index. In format 1 it also has the records of the ranks' files."""

    meta: Part
    index: IndexSeal | Part
    records: list[FileRecord] | None = None


def write_merged(
    root: Path, tables: Iterable[tuple[str, np.ndarray]], records: Sequence[FileRecord], *, whole: bool
) -> IndexSeal:
    """Write the index of the ranks' files under `root`.

    Args:
        tables: (vocabulary as JSON, rows) of each file, read one at a time.
        records: records of the same files. The list may grow while the tables are read.
        whole: the files are all of the checkpoint. They must cover each tensor exactly once, and fsync is called.

    Raises:
        CheckpointError: elements are missing or written twice, or a file is damaged.
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
    """Yield the parts of the rows. Elements that are missing or written twice are added to `problems`."""
    for rows in merged.parts():
        problems += coverage_problems(rows, merged.vocabulary)
        yield rows


def manifest_of(index: IndexSeal, meta: bytes) -> bytes:
    """Content of the manifest for this index and these meta data."""
    parts = {INDEX_NAME: asdict(index), META_NAME: asdict(Part(len(meta), checksum(meta)))}
    content = json.dumps({"format": FORMAT, "parts": parts})
    return json.dumps({"checksum": checksum(content.encode()), "content": content}).encode()


def part_of(root: Path, name: str) -> Path:
    """Path of a file of a checkpoint.

    Raises:
        CheckpointError: the name or a link leads out of the checkpoint.
    """
    try:
        return path_inside(root, name)
    except UnsafeName as error:
        raise CheckpointError(root, str(error)) from error


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged, or names an unknown part.
    """
    path = part_of(root, MANIFEST_NAME)
    try:
        with understanding(path):
            outer = json.loads(path.read_bytes())
            content = outer["content"]
            refuse_checksum(path, checksum(content.encode()), outer["checksum"])
            inner = json.loads(content)
            if inner["format"] not in (1, FORMAT):
                raise CheckpointError(
                    path, f"its format is {inner['format']}. This version reads formats 1 to {FORMAT}"
                )
            parts = inner["parts"]
            if lost := {INDEX_NAME, META_NAME} - set(parts):
                raise ValueError(f"it does not name {' and '.join(sorted(lost))}")
            if strange := set(parts) - {INDEX_NAME, META_NAME}:
                raise ValueError(f"no part of a checkpoint: {', '.join(map(repr, sorted(strange)))}")
            meta = Part.from_dict(parts[META_NAME])
            if inner["format"] == 1:
                records = [format_1.listed_file(each) for each in inner["files"]]
                return Manifest(meta, Part.from_dict(parts[INDEX_NAME]), records)
            return Manifest(meta, IndexSeal.from_dict(parts[INDEX_NAME]))
    except FileNotFoundError as error:
        raise CheckpointError(path, "it is missing, so this is not a complete checkpoint") from error
    except OSError as error:
        raise CheckpointError(path, f"it cannot be read: {error}") from error


def read_meta(root: Path, part: Part) -> Meta:
    """Read the meta data of a checkpoint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return Meta.from_bytes(_read_part(root, META_NAME, part), part_of(root, META_NAME))


def _read_part(root: Path, name: str, part: Part) -> bytes:
    path = part_of(root, name)
    with reading(path):
        refuse_size(path, os.stat(path).st_size, part.size)
        content = path.read_bytes()
    refuse_checksum(path, checksum(content), part.checksum)
    return content


def open_index(
    root: Path, manifest: Manifest, share: tuple[int, int] | None = (0, 1)
) -> tuple[Index, Sequence[FileRecord]]:
    """Map the index of a checkpoint and the records of the ranks' files. See `read_index`.

    In format 1, the first of the ranks that share the index compares its checksum, and the others do not.
    """
    path = part_of(root, INDEX_NAME)
    if isinstance(manifest.index, IndexSeal):
        return read_index(path, manifest.index, share)
    if share is not None and share[0] == 0:
        _read_part(root, INDEX_NAME, manifest.index)
    with reading(path):
        refuse_size(path, os.stat(path).st_size, manifest.index.size)
        return format_1.open_index(path), manifest.records or []
