"""Tensors in files of `torch.save`. They are pickles, which can run code: what is no tensor is refused, not loaded."""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from .errors import CheckpointError

_WANTED = re.compile(r"GLOBAL ([\w.]+)|type ([\w.]+) (?:was|is) not")


class Inert:
    """Stands for an object of another program's class: what it was made of and its attributes, and no code of it."""

    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _member(of: Any, name: Any) -> Inert:
    """In the place of `getattr`, with which Python 3.11.0 to 3.11.3 write members of enumerations; it looks nothing up.

    Raises:
        pickle.UnpicklingError: it is asked for something of another object.
    """
    if of is not Inert:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    return Inert(name)


def load_tensors(path: Path, inert: Collection[str] = ()) -> Any:
    """The content of a file, mapped and not read. No code in it is run.

    Args:
        inert: modules and packages whose classes and functions may be named in the file: objects of theirs become
            `Inert`. Nothing of theirs is imported.

    Raises:
        CheckpointError: it is damaged, or has anything but tensors, plain values and what `inert` names.
    """
    try:
        stand_ins: list[Any] = [(Inert, name) for name in _named(path, inert)]
        with safe_globals([*stand_ins, (_member, "builtins.getattr")] if stand_ins else []):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises to load such a file with weights_only=False, which would run what is in it.
        found = _WANTED.search(str(error))
        what = f" ({found[1] or found[2]})" if found else ""
        raise CheckpointError(
            path,
            f"it was not read: it contains objects that are not tensors{what}, and reading that can run code of "
            "whoever made it; ask for a file of tensors alone",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        said = str(error).strip() or type(error).__name__
        raise CheckpointError(path, f"it cannot be read: {said.splitlines()[0]}") from error


def _named(path: Path, inert: Collection[str]) -> list[str]:
    """Full names of what the file asks for in the modules and packages of `inert`."""
    wanted = get_unsafe_globals_in_checkpoint(path) if inert else []
    return [name for name in wanted if any(name.startswith(f"{each}.") for each in inert)]
