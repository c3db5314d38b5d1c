"""The manifest of a `.bin/.idx` pair: its inputs, tokenizer and hashes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config.file_access import read_json, replace_file
from .block_checksums import checksums_of
from .errors import DataError
from .hashing import file_hash
from .token_file import with_ending

ENDING = ".json"
FORMAT = "token file manifest"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Facts about a token file besides its tokens.

    Attributes:
        tokenizer: kind, name, hash, size and eod_id of the tokenizer.
        documents, tokens: counts.
        largest: the largest id.
        dtype: type of the stored tokens.
        bin_hash, idx_hash: SHA-256 of the two files.
        inputs: for each input file its path, bytes, SHA-256 (of files), documents and tokens.
        origin: unit of the numbers in the pair's `.origin` table ("bytes", "rows"). None without a table.
        options: treatment of the texts.
        encoder: program that computed the ids.
        version: of this program.
        blocks: checksums of the .bin by block (`block_checksums`), or None.
        job: hash of the inputs and options of a tokenizing job, or "".
    """

    tokenizer: dict[str, Any]
    documents: int
    tokens: int
    largest: int
    dtype: str
    bin_hash: str
    idx_hash: str
    inputs: list[dict[str, Any]] = field(default_factory=list)
    origin: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    encoder: str = ""
    version: str = ""
    job: str = ""
    blocks: dict[str, Any] | None = None

    def write(self, prefix: str | os.PathLike) -> Path:
        """Write it next to a pair, completely or not at all."""
        path = with_ending(prefix, ENDING)
        values = {"format": FORMAT, "format_version": VERSION, **asdict(self)}
        replace_file(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")
        return path


def pair_hashes(binary: Path, index: Path) -> dict[str, Any]:
    """The entries of a manifest that depend on the content of a pair."""
    return {"bin_hash": file_hash(binary), "idx_hash": file_hash(index), "blocks": checksums_of(binary)}


def keep_others(prefix: str | os.PathLike) -> None:
    """Refuse to overwrite a file that is no manifest.

    Raises:
        DataError: there is such a file.
    """
    path = with_ending(prefix, ENDING)
    if not path.exists():
        return
    try:
        ours = read_json(path)["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise DataError(
            path, "the manifest would be written over this file, which is something else", "use another --output"
        )


def read_manifest(prefix: str | os.PathLike) -> Manifest | None:
    """The manifest of a pair. None if there is none, as with other programs' files.

    Raises:
        DataError: it is damaged.
    """
    path = with_ending(prefix, ENDING)
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        if values.pop("format") != FORMAT or values.pop("format_version") != VERSION:
            raise ValueError("another format")
        return Manifest(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            path, f"it is no intact manifest ({error})", "make the pair again, or remove the manifest"
        ) from error
