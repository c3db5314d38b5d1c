"""Operations on whole token files: merge, split, add checksums, inspect."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.file_access import keep_inputs, replacing

from ..errors import DataError
from ..hashing import file_hash
from ..manifest import ENDING, NO_CHECKSUMS, BlockChecksums, Manifest, checksums_of, hashed, keep_others, read_manifest
from ..order.order import split_bounds
from ..token_file import REMAKE, TokenFile, TokenFileWriter, prefix_of, with_ending
from ..tokenizer import Tokenizer
from .encode import ORIGIN

_TOKENS = 1 << 24  # tokens that are copied together


def read_origin(prefix: str | os.PathLike) -> np.ndarray | None:
    """Origin of each document of a pair (ORIGIN). None without a table.

    Raises:
        DataError: the table is damaged.
    """
    path = with_ending(prefix, ".origin")
    if not path.is_file():
        return None
    if path.stat().st_size % ORIGIN.itemsize:
        raise DataError(path, "it is truncated", "make the pair again, or remove the table")
    return np.memmap(path, dtype=ORIGIN, mode="r") if path.stat().st_size else np.empty(0, ORIGIN)


def write_origin(prefix: str | os.PathLike, parts: list[np.ndarray]) -> None:
    """Write the table of a pair, completely or not at all."""
    path = with_ending(prefix, ".origin")
    with replacing(path, durable=True) as file:
        for part in parts:
            file.write(part.tobytes())


def copy_documents(file: TokenFile, first: int, last: int, writer: TokenFileWriter) -> None:
    """Append documents first ... last-1 to a file that is being written, many at a time."""
    while first < last:
        begin = int(file.offsets[first]) // file.dtype.itemsize
        ends = (file.offsets[first:last] // file.dtype.itemsize) + file.sizes[first:last]
        count = max(1, int(np.searchsorted(ends, begin + _TOKENS, side="right")))
        writer.extend(file.flat(begin, int(ends[count - 1]) - begin), np.asarray(file.sizes[first : first + count]))
        first += count


def add_checksums(path: str | os.PathLike) -> Manifest:
    """Add checksums of blocks to the manifest of a pair.

    Raises:
        DataError: it has no manifest, or has changed.
    """
    file = TokenFile(path)
    manifest = read_manifest(file.prefix)
    if manifest is None:
        raise DataError(file.prefix, "it has no manifest, which must hold the checksums", "tokenize the texts here")
    for each, known in ((file.bin_path, manifest.bin_hash), (file.idx_path, manifest.idx_hash)):
        if file_hash(each) != known:
            raise DataError(each, "its content is not what was written (SHA-256 differs)", REMAKE)
    manifest = replace(manifest, blocks=checksums_of(file.bin_path))
    manifest.write(file.prefix)
    return manifest


PAIR = (".bin", ".idx", ENDING, ".origin")  # endings of a token file


def pair_files(prefix: str | os.PathLike) -> list[Path]:
    """All files of a token file, whether they exist or not."""
    return [with_ending(prefix_of(prefix), ending) for ending in PAIR]


def _check_free(prefix: Path, overwrite: bool, inputs: list[TokenFile]) -> None:
    """Refuse to overwrite an input, an existing pair without permission, or a file that is no manifest."""
    keep_inputs(pair_files(prefix), [path for each in inputs for path in pair_files(each.prefix)])
    keep_others(prefix)
    if with_ending(prefix, ".idx").exists() and not overwrite:
        raise DataError(with_ending(prefix, ".idx"), "this token file exists", "use another --output, or --overwrite")


def merge(paths: list[str], output: str | os.PathLike, version: str, overwrite: bool = False) -> Manifest | None:
    """Write the documents of several pairs, in order, as one pair.

    Returns:
        Its manifest, if all pairs have one.

    Raises:
        DataError: tokenizers or token types differ.
    """
    files, output = [TokenFile(path) for path in paths], prefix_of(output)
    _check_free(output, overwrite, files)
    manifests = [read_manifest(file.prefix) for file in files]
    for file, manifest in zip(files, manifests):
        file.verify()
        if file.dtype != files[0].dtype:
            rule = f"its tokens are {file.dtype.name}, and {files[0].prefix} has {files[0].dtype.name}"
            raise DataError(file.prefix, rule, "tokenize both with one tokenizer")
        if manifest and manifests[0] and manifest.tokenizer["hash"] != manifests[0].tokenizer["hash"]:
            raise DataError(file.prefix, "it was made with another tokenizer", "tokenize all with one tokenizer")
    with TokenFileWriter(output, files[0].dtype.newbyteorder("=")) as writer:
        for file in files:
            copy_documents(file, 0, len(file), writer)
    known = [manifest for manifest in manifests if manifest is not None]
    if len(known) < len(files):
        return None
    origins, shift = [read_origin(file.prefix) for file in files], 0
    if all(origin is not None for origin in origins):
        shifted = []
        for origin, manifest in zip(origins, known):
            part = np.array(origin)
            part["input"] += shift
            shift += len(manifest.inputs)
            shifted.append(part)
        write_origin(output, shifted)
    return _manifest(output, writer, known, version, all(origin is not None for origin in origins))


def split(
    path: str,
    shares: dict[str, float],
    output: str | os.PathLike,
    version: str,
    overwrite: bool = False,
    seed: int | None = None,
) -> dict[str, int]:
    """Split a pair's documents into several pairs `<output>_<name>` by shares.

    Args:
        shares: by name.
        seed: draw documents at random (each keeps its place in the order). None splits the file in its order.

    Returns:
        The number of documents of each.
    """
    file = TokenFile(path)
    file.verify()
    for name in shares:
        _check_free(Path(f"{prefix_of(output)}_{name}"), overwrite, [file])
    manifest, origin = read_manifest(file.prefix), read_origin(file.prefix)
    bounds = _bounds(list(shares.values()), len(file))
    order = np.arange(len(file)) if seed is None else np.random.Generator(np.random.Philox(seed)).permutation(len(file))
    counts = {}
    for name, first, last in zip(shares, bounds, bounds[1:]):
        prefix, chosen = Path(f"{prefix_of(output)}_{name}"), np.sort(order[first:last])
        with TokenFileWriter(prefix, file.dtype.newbyteorder("=")) as writer:
            for begin, end in _runs(chosen):
                copy_documents(file, begin, end, writer)
        if origin is not None:
            write_origin(prefix, [np.array(origin[chosen])])
        if manifest is not None:
            _manifest(prefix, writer, [manifest], version, origin is not None)
        counts[name] = len(chosen)
    return counts


def _bounds(shares: list[float], documents: int) -> list[int]:
    """GPT-NeoX's bounds for up to three shares. For more, cumulated shares rounded."""
    if len(shares) <= 3:
        return split_bounds(shares, documents)[: len(shares) + 1]
    total, bounds, reached = sum(shares), [0], 0.0
    for share in shares:
        reached += share
        bounds.append(round(documents * reached / total))
    return bounds


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive numbers, as (first, last + 1)."""
    if not len(numbers):
        return
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for part in zip([0, *breaks.tolist()], [*breaks.tolist(), len(numbers)]):
        yield int(numbers[part[0]]), int(numbers[part[1] - 1]) + 1


def _manifest(prefix: Path, writer: TokenFileWriter, of: list[Manifest], version: str, origin: bool) -> Manifest:
    made = Manifest(
        tokenizer=of[0].tokenizer,
        documents=writer.documents,
        tokens=writer.tokens,
        largest=writer.largest,
        dtype=writer.dtype.name,
        inputs=[entry for each in of for entry in each.inputs],
        origin=",".join(sorted({each.origin or "" for each in of})) if origin else None,
        options=of[0].options,
        encoder=of[0].encoder,
        version=version,
        **hashed(with_ending(prefix, ".bin"), with_ending(prefix, ".idx")),
    )
    made.write(prefix)
    return made


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
        problems.append(f"{missing:,} of {min(len(file), 10_000):,} checked documents end in no end-of-document token")
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
