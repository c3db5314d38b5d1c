"""Read checkpoints of format 1, which version 0.1.0 wrote.

The manifest lists the file of every rank. The index has no groups and no checksums of its parts.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from ...config.file_access import check_name
from .container import read_header
from .errors import CheckpointError, understanding
from .index import Index, refuse_strange
from .rankfile import FileRecord, file_name
from .table import ROW, Vocabulary

_NAME = re.compile(r"data/\d{4,}/rank_(\d{5,})\.safetensors", re.ASCII)


def rank_of(name: object) -> int:
    """The rank whose file has this path.

    Raises:
        ValueError: it is no rank's.
    """
    digits = _NAME.fullmatch(check_name(name))
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


def open_index(path: Path) -> Index:
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
