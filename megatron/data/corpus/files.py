"""Operations on whole token files: merge, split, add checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron.config.file_access import keep_inputs, replacing

from ..block_checksums import checksums_of
from ..errors import DataError
from ..hashing import file_hash
from ..manifest import ENDING, Manifest, keep_others, pair_hashes, read_manifest
from ..order.order import split_bounds
from ..token_file import REMAKE, TokenFile, prefix_of, with_ending
from ..token_writer import TokenFileWriter
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
        raise DataError(
            with_ending(prefix, ".idx"), "this token file exists already", "use another --output, or --overwrite"
        )


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
            raise DataError(
                file.prefix,
                f"its tokens are {file.dtype.name}, and {files[0].prefix} has {files[0].dtype.name}",
                "tokenize both with one tokenizer",
            )
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
        **pair_hashes(with_ending(prefix, ".bin"), with_ending(prefix, ".idx")),
    )
    made.write(prefix)
    return made
