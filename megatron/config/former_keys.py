"""Keys that the configuration had once: what to write today, and files of former versions that still have them."""

from __future__ import annotations

from typing import Any

from .catalog import Path
from .tree import drop, get

_STORE = (
    "make it a level: `checkpoint: {levels: [{place: store, url: URL, every: auto, keep: all}]}`, where every may be a "
    "number of steps and keep a number of copies"
)
FORMER: dict[Path, str] = {("checkpoint", name): _STORE for name in ("upload", "upload_every", "upload_keep_last")}


def set_apart(values: dict[str, Any]) -> dict[Path, Any]:
    """Remove the former keys from the values of a resolved file, in place. They had no effect on training.

    Returns:
        What they were.
    """
    absent = object()
    found = {path: value for path in FORMER if (value := get(values, path, absent)) is not absent}
    for path in found:
        drop(values, path)
    return found
