"""Tensors in files of `torch.save`. They are pickles, which can run code: what is no tensor is refused, not loaded."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError

_WANTED = re.compile(r"GLOBAL ([\w.]+)|type ([\w.]+) (?:was|is) not")


def load_tensors(path: Path) -> Any:
    """The content of a file, mapped and not read. No code in it is run.

    Raises:
        CheckpointError: it is damaged, or has anything but tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # torch's own text advises to load such a file with weights_only=False, which would run what is in it.
        found = _WANTED.search(str(error))
        what = f" ({found[1] or found[2]})" if found else ""
        raise CheckpointError(
            path,
            f"it was not read: it has something other than tensors{what}, and reading that can run code of whoever "
            "made it; ask for a file of tensors alone",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        said = str(error).strip() or type(error).__name__
        raise CheckpointError(path, f"it cannot be read: {said.splitlines()[0]}") from error
