"""Checkpoints that are not in a folder of ours yet: behind a URL, or in Hugging Face's format."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.communicator import Communicator
from megatron.checkpoint.names import META_NAME
from megatron.checkpoint.transfer import download, newest

FOLDER = "fetched"  # beside the run's own checkpoints


def local_path(where: str, checkpoints: Path, communicator: Communicator) -> str:
    """The checkpoint that `where` names, as a path that all ranks can read.

    A URL is downloaded, and the weights of a Hugging Face folder are written as a checkpoint, by rank 0, into
    `<checkpoints>/fetched`. What is there from an earlier start is verified and used again.

    Args:
        where: path or fsspec URL of a checkpoint, URL of a folder of checkpoints (its newest whole one is meant), or
            path of a folder with a Hugging Face model.

    Raises:
        CheckpointError: on every rank, if it is not there, is damaged or cannot be converted.
    """
    if "://" not in where and not _is_hugging_face(Path(where)):
        return where
    answer = None
    if communicator.rank == 0:
        try:
            answer = [str(_fetched(where, checkpoints / FOLDER)), None]
        except (OSError, ValueError, CheckpointError) as error:
            answer = [None, str(error)]
    path, failure = communicator.gather(answer)[0]
    if failure:
        raise CheckpointError(where, failure)
    return path


def _is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file() and not (path / META_NAME).is_file()


def _fetched(where: str, folder: Path) -> Path:
    if "://" in where:
        where = newest(where)
        target = folder / where.rstrip("/").rsplit("/", 1)[-1]
        return _intact(target) or download(where, folder)
    from megatron.checkpoint.hf.importer import import_model  # transformers is slow to import

    target = folder / Path(where).resolve().name
    if _intact(target) is None:
        folder.mkdir(parents=True, exist_ok=True)
        import_model(Path(where), target)
    return target


def _intact(path: Path) -> Path | None:
    """The path, if a whole checkpoint is there; an error if a damaged one is."""
    if not path.exists():
        return None
    open_checkpoint(path, verify="checksums")
    return path
