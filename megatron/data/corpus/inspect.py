"""Facts about a token file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..block_checksums import NO_CHECKSUMS, BlockChecksums
from ..errors import DataError
from ..hashing import file_hash
from ..manifest import Manifest, read_manifest
from ..token_file import TokenFile
from ..tokenizer import Tokenizer
from .files import read_origin

SHOWN = 400  # characters of a sample


def examine_file(
    path: str | os.PathLike, tokenizer: Tokenizer | None = None, samples: int = 0, verify: bool = False
) -> dict[str, Any]:
    """Counts, lengths, samples, tokenizer and problems of a token file, as plain values."""
    file = TokenFile(path)
    problems: list[str] = []
    try:
        file.verify()
    except DataError as error:
        problems.append(str(error))
    manifest = read_manifest(file.prefix)
    if manifest is None:
        problems.append("it has no manifest: its tokenizer and inputs are not known")
    else:
        problems += _against_manifest(file, manifest, verify)
    size = manifest.tokenizer["size"] if manifest else tokenizer.size if tokenizer else None
    if verify and size is not None and (largest := file.extent()[1]) >= size:
        problems.append(f"it has the id {largest}, but its tokenizer has {size} ids")
    if tokenizer and manifest and tokenizer.hash != manifest.tokenizer["hash"]:
        problems.append(f"it was not made with the tokenizer {tokenizer.name}")
    sizes = np.asarray(file.sizes)
    if empty := int((sizes == 0).sum()):
        problems.append(f"{empty:,} documents are empty")
    eod = manifest.tokenizer.get("eod_id") if manifest else tokenizer.eod_id if tokenizer else None
    if eod is not None and (missing := _without_end(file, eod)):
        problems.append(
            f"{missing:,} of {min(len(file), 10_000):,} checked documents do not end with the end-of-document token"
        )
    notes = [file.note] if file.note else []
    if manifest is not None and manifest.blocks is None:
        notes.append(f"it {NO_CHECKSUMS.format(file.prefix)}")
    return {
        "file": str(file.prefix),
        "documents": len(file),
        "tokens": file.tokens,
        "dtype": file.dtype.name,
        "bytes": file.bin_path.stat().st_size,
        "lengths": _lengths(sizes),
        "histogram": _histogram(sizes),
        "tokenizer": manifest.tokenizer if manifest else None,
        "inputs": manifest.inputs if manifest else [],
        "samples": _samples(file, tokenizer, samples),
        "notes": notes,
        "problems": problems,
    }


def _against_manifest(file: TokenFile, manifest: Manifest, verify: bool) -> list[str]:
    problems = []
    if (manifest.documents, manifest.tokens) != (len(file), file.tokens):
        problems.append(f"its manifest has {manifest.documents:,} documents and {manifest.tokens:,} tokens")
    if manifest.origin is not None:
        origin = read_origin(file.prefix)
        if origin is None or len(origin) != len(file):
            problems.append("its table of origins is missing or belongs to another file")
    if verify and manifest.blocks is not None:
        problems += [f"{file.bin_path}: {each}" for each in BlockChecksums(file, manifest.blocks).damaged()]
    if verify:
        problems += [
            f"the content of {path} is not what was written (SHA-256 differs)"
            for path, known in ((file.bin_path, manifest.bin_hash), (file.idx_path, manifest.idx_hash))
            if file_hash(path) != known
        ]
    return problems


def _without_end(file: TokenFile, eod: int) -> int:
    """Number of up to 10 000 evenly chosen documents that do not end with the end-of-document token."""
    chosen = np.unique(np.linspace(0, max(len(file) - 1, 0), min(len(file), 10_000)).astype(np.int64))
    return sum(1 for document in chosen if file.sizes[document] == 0 or file[int(document)][-1] != eod)


def _lengths(sizes: np.ndarray) -> dict[str, float]:
    names = ("smallest", "p10", "median", "mean", "p90", "p99", "largest")
    if not len(sizes):
        return dict.fromkeys(names, 0.0)
    p10, median, p90, p99 = np.percentile(sizes, [10, 50, 90, 99]).tolist()
    return dict(zip(names, (float(sizes.min()), p10, median, float(sizes.mean()), p90, p99, float(sizes.max()))))


def _histogram(sizes: np.ndarray) -> list[dict[str, int]]:
    if not len(sizes):
        return []
    powers = np.bincount(np.ceil(np.log2(np.maximum(sizes, 0) + 1.0)).astype(np.int64))
    return [
        {"from": 2 ** (power - 1) if power else 0, "to": 2**power - 1, "documents": int(count)}
        for power, count in enumerate(powers)
        if power >= np.flatnonzero(powers)[0]
    ]


def _samples(file: TokenFile, tokenizer: Tokenizer | None, count: int) -> list[dict[str, Any]]:
    found = []
    for document in (
        np.unique(np.linspace(0, len(file) - 1, count).astype(np.int64)).tolist() if count and len(file) else []
    ):
        ids = file[document][:SHOWN].tolist()
        text = tokenizer.decode(ids)[:SHOWN] if tokenizer else None
        found.append({"document": document, "tokens": int(file.sizes[document]), "ids": ids[:32], "text": text})
    return found


def draw_lengths(found: dict[str, Any], path: str | os.PathLike) -> None:
    """Draw the histogram of `examine_file`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.bar(
        [f"{each['to']:,}" for each in found["histogram"]],
        [each["documents"] for each in found["histogram"]],
        color="#4c72b0",
    )
    axes.set_xlabel("tokens per document, up to")
    axes.set_ylabel("documents")
    axes.set_title(f"{found['file']}: {found['documents']:,} documents, {found['tokens']:,} tokens")
    axes.tick_params(axis="x", rotation=60)
    figure.savefig(path, dpi=120)
