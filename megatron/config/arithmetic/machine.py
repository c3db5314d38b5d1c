"""Parts of this machine that a run needs: a GPU, folders that can be written, programs. Torch is not asked: importing
it takes seconds."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

NAME_BYTES = 255  # of a file's or folder's name, on Linux's file systems


def has_gpu() -> bool:
    """Whether this machine has the device files of an NVIDIA or AMD GPU."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists() or Path("/dev/dxg").exists()


def existing(path: str | os.PathLike) -> Path:
    """The path, or the nearest folder above it that exists. A part that is a file ends the search there."""
    found = Path(path).absolute()
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    return found


def why_not_writable(path: str | os.PathLike) -> str | None:
    """Why no files can be made in a folder, which may not exist yet, or None."""
    longest = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if longest > NAME_BYTES:
        return f"a name in it has {longest:,} bytes, and file systems take {NAME_BYTES}"
    found = existing(path)
    if not found.is_dir():
        return f"{found} is not a folder"
    if not os.access(found, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"{found} cannot be written by this user"
    try:  # permissions say yes to root in /proc, and on network disks that do not let root write
        with tempfile.TemporaryFile(dir=found):
            return None
    except OSError as error:
        return f"no file can be made in {found} ({error.strerror})"


def free_bytes(path: str | os.PathLike) -> int | None:
    """Free space where a folder is, or would be made, or None if the system does not say."""
    try:
        return shutil.disk_usage(existing(path)).free
    except OSError:
        return None


def program(name: str, folder: str | os.PathLike) -> bool:
    """Whether a name or path is a program that a process in `folder` can start."""
    return shutil.which(os.path.join(folder, name) if os.sep in name else name) is not None


def memory_bytes() -> int | None:
    """Memory of this machine, or None if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def installed(package: str) -> bool:
    """Whether it can be found. It is loaded at its first use."""
    return importlib.util.find_spec(package) is not None


def has_file(package: str, file: str) -> bool:
    """Whether the package that would be imported has this file: another one may have its name."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return any((Path(place) / file).is_file() for place in places or ())


FA3, FA3_FIX = "flash_attn_interface", "install FlashAttention 3 (the folder hopper/ of its repository)"
WIDEST = 256  # channels of a head


def why_not(options: Any, documents: bool, length: int) -> str | None:
    """The part of a layer's attention that FlashAttention does not compute, or None.

    Args:
        options: of the layer's kind.
        documents: whether it keeps documents apart. Otherwise a window is a mask too.
        length: tokens of a sequence.
    """
    given = {name: getattr(options, name, None) for name in ("dropout", "softcap", "sinks", "window")}
    if given["dropout"]:
        return "drops probabilities by key"
    if given["softcap"] or given["sinks"] or getattr(options, "position", None) == "alibi":
        return "changes its logits"
    if given["window"] and given["window"] < length and not documents:
        return "has a window"
    if hasattr(options, "index_top_k"):
        return "reads the tokens that an indexer chooses"
    queries, values = widths(options)
    if queries is None or queries != values:
        return "has other channels for queries than for values"
    if queries > WIDEST or queries % 8:
        return f"has heads of {queries} channels, and not of 8, 16, ... or {WIDEST}"
    return None


def widths(options: Any) -> tuple[int | None, int | None]:
    """Channels of a head's queries and of its values."""
    values = getattr(options, "value_dim", None)
    if values is not None:
        return options.nope_dim + options.rope_dim, values
    return (getattr(options, "head_dim", None),) * 2
