"""The small file beside a `.bin/.idx` pair that says what it was made from, with what."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config.file_access import replace_file
from ..config.foreign_json import read_json
from .errors import DataError
from .token_file import with_ending

ENDING = ".json"
FORMAT = "token file manifest"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What is known of a token file beyond its tokens.

    Attributes:
        tokenizer: kind, name, hash, size and eod_id of the tokenizer.
        documents, tokens: counts.
        largest: the largest id.
        dtype: type of the stored tokens.
        bin_hash, idx_hash: SHA-256 of the two files.
        inputs: for each input file its path, bytes, SHA-256 (where it is a file), documents and tokens.
        origin: what the numbers of the `.origin` table beside the pair are ("bytes", "rows"); None without a table.
        options: how the texts were treated.
        encoder: what computed the ids.
        version: of this program.
        blocks: checksums of the .bin by block (`block_checksums`); None in manifests of older versions.
        job: hash of the inputs and options it was tokenized with; "" for a file made otherwise.
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

    def text(self) -> str:
        return (
            json.dumps({"format": FORMAT, "format_version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False)
            + "\n"
        )

    def write(self, prefix: str | os.PathLike) -> Path:
        """Write it beside a pair, whole or not at all."""
        path = with_ending(prefix, ENDING)
        replace_file(path, self.text())
        return path


def keep_others(prefix: str | os.PathLike) -> None:
    """Refuse to put a manifest in the place of a file that is none.

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
    """The manifest beside a pair; None if there is none (files of other programs have none).

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
