"""Read the tensors of `torch.save` files. Pickles can run code, so any object that is no tensor is refused."""

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
    """Stands for an object of another program's class: its arguments and attributes, without its code."""

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
    """Stands for `getattr`, which Python 3.11.0 to 3.11.3 write for members of enumerations. It looks nothing up."""
    if of is not Inert:
        raise pickle.UnpicklingError("GLOBAL builtins.getattr")
    return Inert(name)


def load_tensors(path: Path, inert: Collection[str] = ()) -> Any:
    """The content of a file, memory-mapped. No code in it is run.

    Args:
        inert: modules and packages whose objects become `Inert`. They are not imported.

    Raises:
        CheckpointError: the file is damaged, or has other objects than tensors, plain values and `inert` ones.
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
            f"it was not read: it contains objects that are not tensors{what}, and reading them can run code of "
            "its author. Ask for a file with only tensors",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        said = str(error).strip() or type(error).__name__
        raise CheckpointError(path, f"it cannot be read: {said.splitlines()[0]}") from error


def _named(path: Path, inert: Collection[str]) -> list[str]:
    wanted = get_unsafe_globals_in_checkpoint(path) if inert else []
    return [name for name in wanted if any(name.startswith(f"{each}.") for each in inert)]
