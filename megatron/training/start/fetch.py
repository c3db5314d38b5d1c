"""Checkpoints outside our folders: behind a URL, or in Hugging Face's format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron.checkpoint import CheckpointError, open_checkpoint
from megatron.checkpoint.format.communicator import Communicator
from megatron.checkpoint.format.index import checksum
from megatron.checkpoint.format.names import MANIFEST_NAME, META_NAME
from megatron.checkpoint.save.transfer import download, fetch_file, newest, remote_manifest
from megatron.report.ledger import read_ledger

FOLDER = "fetched"  # next to the run's own checkpoints
LEDGER, RUN_LEDGER = "ledger.jsonl", "run_ledger.jsonl"  # the second: of a run's folder, next to a fetched copy


def local_path(where: str, checkpoints: Path, communicator: Communicator) -> str:
    """The checkpoint that `where` names, as a path that all ranks can read.

    Rank 0 downloads a URL, or writes the weights of a Hugging Face folder as a checkpoint, into
    `<checkpoints>/fetched`. A copy of an earlier start is verified and used again.

    Args:
        where: path or fsspec URL of a checkpoint, URL of a folder of checkpoints, or path of a folder with a Hugging
            Face model. Of several checkpoints the newest whole one is used.

    Raises:
        CheckpointError: on every rank, if it is missing, is damaged or cannot be converted.
    """
    if "://" not in where and not _is_hugging_face(Path(where)):
        return where
    answer = None
    if communicator.rank == 0:
        try:
            answer = [str(fetched(where, checkpoints / FOLDER)), None]
        except (OSError, ValueError, CheckpointError) as error:
            answer = [None, str(error)]
    path, failure = communicator.broadcast(answer)
    if failure:
        raise CheckpointError(where, failure)
    return path


def _is_hugging_face(path: Path) -> bool:
    return (path / "config.json").is_file() and not (path / META_NAME).is_file()


def fetched(where: str, folder: Path) -> Path:
    """The local copy. Its folder is named by a checksum of its source: names such as `step_00001000` are not unique."""
    for left in folder.glob("*/*.tmp-*"):  # of starts that were killed
        shutil.rmtree(left)
    if "://" in where:
        where = newest(where)
        target = folder / checksum(remote_manifest(where))[:16] / where.rsplit("/", 1)[-1]
        path = target if _intact(target) else download(where, target.parent)
        for level, name in ((2, RUN_LEDGER), (1, LEDGER)):  # of a run's folder, or of a store
            fetch_file(f"{where.rsplit('/', level)[0]}/{LEDGER}", path.parent / name)
        return path
    from megatron.checkpoint.hf.importer import import_model  # transformers is slow to import

    source = Path(where).resolve()
    target = folder / _state(source) / source.name
    if not _intact(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        import_model(source, target)
    return target


def ledger_of(path: Path) -> Path | None:
    """Ledger of the run that saved a checkpoint of another folder, or None.

    A run's folder has it above the checkpoints. A store has it next to them. Several runs may share a store, so
    there it must list this checkpoint.
    """
    for of_run in (path.parent.parent / LEDGER, path.parent / RUN_LEDGER):
        if of_run.exists():
            return of_run
    if not (near := path.parent / LEDGER).exists():
        return None
    manifest = checksum((path / MANIFEST_NAME).read_bytes())
    known = any(manifest == entry.get("manifest") for entry in read_ledger(near))
    return near if known else None


def _state(source: Path) -> str:
    """Changes whenever a file of the folder is written."""
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir())
    return checksum(json.dumps([str(source), files]).encode())[:16]


def _intact(path: Path) -> bool:
    """Whether a whole copy exists. A damaged one is removed."""
    if not path.exists():
        return False
    try:
        open_checkpoint(path, verify="checksums")
    except CheckpointError:
        shutil.rmtree(path)
        return False
    return True
