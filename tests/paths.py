"""Where tests find data that is not part of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def shared(name: str) -> Path | None:
    """The file or folder `name` under shared/, in the repository or next to it. None where there is none."""
    for folder in (ROOT / "shared", ROOT.parent / "shared"):
        if (folder / name).exists():
            return folder / name
    return None
