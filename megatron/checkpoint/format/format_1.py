"""Checkpoints of format 1, which is only read: the manifest lists every rank's file, and the index has no groups and no
checksums of its parts."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from .container import read_header
from .errors import CheckpointError, understanding
from .index import Index, refuse_strange
from .rankfile import FileRecord, rank_of
from .table import ROW, Vocabulary


def listed_file(values: dict[str, Any]) -> FileRecord:
    """The record of a file, as the manifest has it.

    Raises:
        ValueError, TypeError, LookupError: it is not one.
    """
    rest = {name: value for name, value in values.items() if name != "path"}
    return FileRecord.from_dict({**rest, "rank": rank_of(values["path"])})


def open_index(path: Path) -> Index:
    """Map an index; its rows are read whole to find the groups.

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
