"""Folders of checkpoints that another program wrote: recognised in one place, by rules and by whoever resumes."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_STEP = re.compile(r"global_step(\d+)")
_FILES = ("mp_rank_*_model_states.pt", "layer_*-model_*.pt", "zero_pp_rank_*_optim_states.pt", "*zero_pp_rank_*.pt")


def neox_checkpoint(path: str | Path) -> Path | None:
    """The `global_step...` folder of GPT-NeoX or DeepSpeed that `path` is or has: the one that its file `latest` names,
    else the last one. None where there is none, or the folder cannot be read."""
    path = Path(path)
    try:
        if _STEP.fullmatch(path.name) and _is_one(path):
            return path
        if not path.is_dir():
            return None
        found = {each.name: each for each in path.iterdir() if _STEP.fullmatch(each.name) and _is_one(each)}
        latest = path / "latest"
        named = latest.read_text(errors="replace")[:200].strip() if latest.is_file() else ""
    except OSError:
        return None
    if named in found:
        return found[named]
    return max(found.values(), key=lambda each: int(_STEP.sub(r"\1", each.name)), default=None)


def _is_one(path: Path) -> bool:
    return path.is_dir() and any(next(path.glob(pattern), None) for pattern in _FILES)


def advice(step: Path, files: Sequence[str] = (), weights: bool = False) -> str:
    """The advice about such a folder.

    Args:
        files: of the run's configuration, if they are known.
        weights: whether only the weights are wanted.
    """
    given = shlex.join(files) if files else "YOUR.yml"
    command = f"deepy checkpoint from-neox {shlex.quote(str(step))} OUT --config {given}"
    own = "and a checkpoint.dir (GPT-NeoX's save) of its own"
    if weights:
        return f"to start from its weights: {command} --weights, then checkpoint.initialize_from=OUT {own}"
    return (
        f"to continue from it: {command}, then checkpoint.resume=OUT {own}. With --weights, "
        "checkpoint.initialize_from=OUT starts a new run from its weights"
    )
