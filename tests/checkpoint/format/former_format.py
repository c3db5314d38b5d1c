"""Checkpoints as format 1 had them: a list of all files in the manifest, an index without checksums of its parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from megatron.checkpoint import open_checkpoint
from megatron.checkpoint.format.container import header
from megatron.checkpoint.format.durable import MANIFEST, META
from megatron.checkpoint.format.index import INDEX_NAME, checksum


def to_format_1(path: Path) -> Path:
    """Rewrite index and manifest of a checkpoint in the former format."""
    checkpoint = open_checkpoint(path)
    rows, vocabulary = checkpoint.index.rows.copy(), checkpoint.index.vocabulary  # of a file that is about to change
    records = list(checkpoint.records)
    first = np.searchsorted(rows["tensor"], np.arange(len(vocabulary.tensors) + 1)).astype("<i8")
    start, _ = header(
        {"first": (torch.int64, (len(first),)), "rows": (torch.uint8, (rows.nbytes,))},
        {"vocabulary": vocabulary.to_json()},
    )
    (path / INDEX_NAME).write_bytes(start + first.tobytes() + rows.tobytes())
    parts = {name: (path / name).read_bytes() for name in (INDEX_NAME, META)}
    files = [
        {name: getattr(record, name) for name in ("path", "size", "header", "table", "begin", "end")}
        for record in records
    ]
    parts = {name: {"size": len(data), "checksum": checksum(data)} for name, data in parts.items()}
    content = json.dumps({"format": 1, "files": files, "parts": parts})
    manifest = json.dumps({"checksum": checksum(content.encode()), "content": content})
    (path / MANIFEST).write_text(manifest)
    return path
