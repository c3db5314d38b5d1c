"""The meta data of a checkpoint, and the manifest: the checksums of its meta data and index.

The index has the checksums of the ranks' files. The manifest therefore has the same size for any number of ranks.
In format 1, which version 0.1.0 wrote, the manifest lists the file of every rank. The index has no groups and no
checksums of its parts."""

import hashlib
import json
import mmap
import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.file_access import check_name

from .container import read_header
from .durable import MANIFEST, META, new_file
from .errors import CheckpointError, part_of, reading, refuse_checksum, refuse_size, understanding
from .index import INDEX_NAME, Index, Merged, checksum, refuse_strange
from .index_file import IndexSeal, read_index, write_index
from .rankfile import FileRecord, file_name
from .table import ROW, Vocabulary, coverage_problems


def versions() -> dict[str, str]:
    """Versions of the programs that make a checkpoint. Packages that are not installed are omitted."""
    found = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "transformers", "safetensors", "numpy"):
        if (version := _installed(package)) is not None:
            found[package] = version
    from ... import __version__

    return {"megatron": __version__, **found}


@cache  # a look-up parses the package's metadata
def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


IMPORTED = "hugging_face"  # key of `extra`: an imported model's further facts. Runs that start from it keep them


@dataclass(frozen=True)
class Meta:
    """A run's state except for tensors, as plain JSON values.

    There is no state of a random generator: every draw is a function of (seed, step, place)."""

    step: int  # optimizer steps done
    config: str = ""  # the resolved configuration's text
    layout: dict[str, Any] = field(default_factory=dict)  # the layout that wrote it, for display only.
    # The optimizer's state besides tensors (name, steps per group)
    optimizer: dict[str, Any] = field(default_factory=dict)
    # State of the learning-rate schedule, if it has any beyond the step
    schedule: dict[str, Any] = field(default_factory=dict)
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    # Position in the data (samples and tokens consumed, hash of the last sample)
    data: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)  # position in the run's ledger
    versions: dict[str, str] = field(default_factory=versions)  # of the programs that wrote it
    resumable: bool = True  # False for a checkpoint with only weights
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def config_hash(self) -> str:
        return hashlib.sha256(self.config.encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """JSON with all digits of floats."""
        return json.dumps({**asdict(self), "config_hash": self.config_hash}, indent=1).encode()

    @classmethod
    def from_bytes(cls, text: bytes, subject: object) -> "Meta":
        """Read the output of `to_bytes`.

        Raises:
            CheckpointError: it is damaged, or the configuration does not have the recorded hash.
        """
        with understanding(subject):
            values = json.loads(text)
            recorded = values.pop("config_hash")
            unknown = sorted(set(values) - {item.name for item in fields(cls)})
            meta = cls(**{name: value for name, value in values.items() if name not in unknown})
        if unknown:
            raise CheckpointError(subject, f"written by a newer version: unknown entries {', '.join(unknown)}")
        if meta.config_hash != recorded:
            raise CheckpointError(subject, "the configuration text does not have the hash written with it")
        return meta


_NAME_1 = re.compile(r"data/\d{4,}/rank_(\d{5,})\.safetensors", re.ASCII)


def rank_of(name: object) -> int:
    """The rank whose file has this path.

    Raises:
        ValueError: it is no rank's.
    """
    digits = _NAME_1.fullmatch(check_name(name))
    if digits is None or file_name(int(digits[1])) != name:
        raise ValueError(f"{name!r} is not the name of a rank's file")
    return int(digits[1])


def listed_file(values: dict[str, Any]) -> FileRecord:
    """Record of a file from its entry in the manifest.

    Raises:
        ValueError, TypeError, LookupError: the entry is malformed.
    """
    rest = {name: value for name, value in values.items() if name != "path"}
    return FileRecord.from_dict({**rest, "rank": rank_of(values["path"])})


def _open_index_1(path: Path) -> Index:
    """Map an index. Its rows are read whole to find the groups.

    Raises:
        CheckpointError: it is damaged.
        OSError: it cannot be read.
    """
    entries, metadata = read_header(path)
    with understanding(path):
        vocabulary = Vocabulary.from_json(metadata["vocabulary"])
        first, rows = entries["first"], entries["rows"]
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        table = np.frombuffer(content, ROW, count=(rows.end - rows.begin) // ROW.itemsize, offset=rows.begin)
        starts = np.frombuffer(content, "<i8", count=(first.end - first.begin) // 8, offset=first.begin)
        if len(starts) != len(vocabulary.tensors) + 1 or starts[-1] != len(table):
            raise CheckpointError(path, "the index is damaged: its table and its list of tensors do not agree")
        index = Index(vocabulary, table)
        refuse_strange(index.groups, vocabulary, len(table))
        return index


FORMAT = 2


@dataclass(frozen=True)
class Part:
    """Size and checksum of a file that is read whole."""

    size: int
    checksum: str

    @classmethod
    def from_dict(cls, values: dict) -> "Part":
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
    parts = {INDEX_NAME: asdict(index), META: asdict(Part(len(meta), checksum(meta)))}
    content = json.dumps({"format": FORMAT, "parts": parts})
    return json.dumps({"checksum": checksum(content.encode()), "content": content}).encode()


def read_manifest(root: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged, or names an unknown part.
    """
    path = part_of(root, MANIFEST)
    try:
        with understanding(path):
            outer = json.loads(path.read_bytes())
            content = outer["content"]
            refuse_checksum(path, checksum(content.encode()), outer["checksum"])
            inner = json.loads(content)
            if inner["format"] not in (1, FORMAT):
                raise CheckpointError(path, f"its format is {inner['format']}. This version reads 1 to {FORMAT}")
            parts = inner["parts"]
            if lost := {INDEX_NAME, META} - set(parts):
                raise ValueError(f"it does not name {' and '.join(sorted(lost))}")
            if strange := set(parts) - {INDEX_NAME, META}:
                raise ValueError(f"no part of a checkpoint: {', '.join(map(repr, sorted(strange)))}")
            meta = Part.from_dict(parts[META])
            if inner["format"] == 1:
                records = [listed_file(each) for each in inner["files"]]
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
    return Meta.from_bytes(_read_part(root, META, part), part_of(root, META))


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

    In format 1, the first of the ranks that share the index compares its checksum, and the others do not."""
    path = part_of(root, INDEX_NAME)
    if isinstance(manifest.index, IndexSeal):
        return read_index(path, manifest.index, share)
    if share is not None and share[0] == 0:
        _read_part(root, INDEX_NAME, manifest.index)
    with reading(path):
        refuse_size(path, os.stat(path).st_size, manifest.index.size)
        return _open_index_1(path), manifest.records or []
