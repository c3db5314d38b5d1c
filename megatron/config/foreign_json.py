"""JSON that others may have written: read in one way, and refused in a sentence, whatever it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .file_access import read_plain

LARGEST = 2**28  # bytes of a file (the largest tokenizers have some 50 MiB)


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, or its lists and objects are nested deeper than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply, and JSON must be a few levels deep") from error


def read_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8.

    Raises:
        ValueError: as `parse_json`, or it is larger than `LARGEST`.
        OSError: it cannot be read.
    """
    return parse_json(read_plain(path, LARGEST).decode("utf-8"))
