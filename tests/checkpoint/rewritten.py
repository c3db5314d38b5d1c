"""Index, meta data and manifest of a checkpoint, made again of what a test has changed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.format.durable import MANIFEST, META
from megatron.checkpoint.format.index import INDEX_NAME, Index
from megatron.checkpoint.format.index_file import write_index
from megatron.checkpoint.format.manifest import manifest_of
from megatron.checkpoint.format.rankfile import FileRecord


def rewrite_head(path: Path, index: Index, records: Sequence[FileRecord]) -> None:
    """The checkpoint has this index from now on, and all checksums say so."""
    head = io.BytesIO()  # whole before the file changes, which the index may be mapped from
    seal = write_index(head.write, index, [index.rows], records)
    (path / INDEX_NAME).write_bytes(head.getvalue())
    (path / MANIFEST).write_bytes(manifest_of(seal, (path / META).read_bytes()))
