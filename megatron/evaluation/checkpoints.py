"""Chooses checkpoints of a run, on rank 0 for all ranks."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint import CheckpointError
from megatron.checkpoint.format.communicator import from_rank_0
from megatron.checkpoint.save.store import Store, find_checkpoint
from megatron.config import Config
from megatron.training.start.fetch import local_path
from megatron.training.world import World


def named_checkpoints(config: Config, world: World, named: str | None, every: bool, folder: Path) -> list[Path]:
    """The checkpoints to evaluate, as rank 0 finds them. All ranks call it.

    Args:
        named: a step of the run, or the path or URL of a checkpoint, a run or a Hugging Face folder. None: the newest.
        every: all checkpoints of the run instead, oldest first.
        folder: for fetched or converted checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    paths, failure = from_rank_0(
        world.communicator, lambda: [*map(str, _found(config, named, every))], CheckpointError, OSError
    )
    if failure:
        raise CheckpointError(config.checkpoint.dir, failure)
    return [Path(local_path(each, folder, world.communicator)) for each in paths]


def _found(config: Config, named: str | None, every: bool) -> Sequence[Path | str]:
    folder = Path(config.checkpoint.dir)
    if every:
        found = sorted(Store(folder).paths())
        if not found:
            raise CheckpointError(folder, "there are no checkpoints to evaluate")
        return found
    if named is None:
        return [find_checkpoint(folder)]
    if named.isdigit():
        path = folder / f"step_{int(named):08d}"
        if not path.is_dir():
            steps = ", ".join(str(int(each.name.removeprefix("step_"))) for each in sorted(Store(folder).paths()))
            raise CheckpointError(folder, f"there is no checkpoint of step {named}. Steps with one: {steps or 'none'}")
        return [path]
    whole = "://" in named or (Path(named) / "config.json").is_file()
    return [named if whole else find_checkpoint(Path(named))]
