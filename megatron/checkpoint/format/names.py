"""Names of checkpoint directories, and of what a killed run leaves behind."""

from __future__ import annotations

import re
from pathlib import Path

META_NAME = "meta.json"
MANIFEST_NAME = "manifest.json"

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"(.+)\.(tmp|old|trash)-([0-9a-f]+)")


def step_name(step: int) -> str:
    """`step_00001000`: sorts by step, up to a hundred million steps."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint directory's name. None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def number_of(path: Path) -> int:
    """The step in a checkpoint directory's name. ValueError for any other name."""
    step = step_of(path)
    if step is None:
        raise ValueError(f"{path} does not have the name of a checkpoint")
    return step


def wrong_name(path: Path, step: int) -> str | None:
    """Why a checkpoint of this step must not have this name, or None. A name without a step is always allowed."""
    named = step_of(path)
    if named is None or named == step:
        return None
    return f"its name says step {named}, and it holds step {step}: call it {step_name(step)}"


def leftover_name(target: Path, kind: str, token: str) -> Path:
    """A name next to the checkpoint: "tmp" while it is written, "old" while replaced, "trash" while deleted."""
    return target.with_name(f"{target.name}.{kind}-{token}")


def leftover_of(path: Path) -> tuple[str, str] | None:
    """(checkpoint name, kind) of a name made by `leftover_name`. None for any other."""
    match = _LEFTOVER.fullmatch(path.name)
    return (match[1], match[2]) if match and _STEP.fullmatch(match[1]) else None
