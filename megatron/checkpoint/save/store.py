"""A folder of checkpoints: choose one to resume from, retain some, remove leftovers of killed runs.

One run writes to a folder at a time."""

import itertools
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.worker.writer_lock import LOCK_NAME, take

from ...config.foreign import advice, neox_checkpoint
from ..format.communicator import SOLO, Communicator, from_rank_0
from ..format.durable import MANIFEST, leftover_of, move, number_of, remove, step_of, sync_directory
from ..format.errors import CheckpointError, brief
from ..read.reader import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class Resume:
    """The start of a run."""

    checkpoint: Checkpoint | None  # the opened checkpoint. None: the run starts from step 0.
    # Newer checkpoints that were skipped, with the reason
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    reason: str = ""  # one sentence: the choice and its reason


NEITHER = "it is neither a checkpoint nor a folder with one: name a run's directory or one of its checkpoints"


def folder_of(path: Path) -> Path | None:
    """The folder of checkpoints at `path`, or in the run's directory `path`. None for anything else."""
    if (path / MANIFEST).exists():
        return None
    return next((folder for folder in (path / "checkpoints", path) if Store(folder).paths()), None)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest in the folder of checkpoints or run directory `path`.

    Raises:
        CheckpointError: there is none.
    """
    folder = folder_of(path)
    if folder is not None:
        return Store(folder).paths()[-1]
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return path
    raise CheckpointError(path, NEITHER if path.exists() else "there is no such checkpoint")


class Store:
    """The checkpoints in a folder.

    Args:
        directory: the folder, which need not exist yet.
        communicator: the ranks that use it together. All call every method.
    """

    def __init__(self, directory: str | Path, communicator: Communicator = SOLO) -> None:
        self.directory = Path(directory)
        self.communicator = communicator

    def paths(self) -> list[Path]:
        """Directories with a checkpoint's name, oldest step first. They may be damaged."""
        if not self.directory.is_dir():
            return []
        found = [path for path in self.directory.iterdir() if step_of(path) is not None and path.is_dir()]
        return sorted(found, key=number_of)

    # -- resume ----------------------------------------------------------------------------------------------------

    def resume(self, how: str = "auto", *, before: int | None = None) -> Resume:
        """The checkpoint to continue from.

        Args:
            how: "auto": the newest intact one here, if any. "none": start from step 0. A path: that of a
                checkpoint, or of a folder of them or a run's directory (then its newest intact one).
            before: with "auto", only checkpoints of earlier steps than this.

        Raises:
            CheckpointError: the given one is missing, damaged or not resumable, or none of those here is intact. A run
                never starts from step 0 because of unreadable checkpoints.
        """
        self._refuse_foreign(self.directory)
        if how == "none":
            return Resume(None, reason="started from step 0: checkpoint.resume is none")
        if how == "auto":
            return self._newest_intact(before=before)
        found = self._named(Path(how), "checkpoint.resume")
        checkpoint = found.checkpoint
        if checkpoint is not None and not checkpoint.meta.resumable:
            raise CheckpointError(checkpoint.path, "it has only weights: give it as checkpoint.initialize_from")
        return found

    def weights(self, path: str | Path, *, key: str = "checkpoint.initialize_from") -> Resume:
        """The checkpoint to take weights from: the given one, or the newest intact one of a folder or a run's
        directory.

        Args:
            key: that names it.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return self._named(Path(path), key, weights=True)

    def _refuse_foreign(self, path: Path) -> None:
        """Refuse a folder with another program's checkpoints. It is not empty, and nothing is written into it."""
        found = self._on_rank_0(lambda: str(neox_checkpoint(path) or ""))
        if found:
            name = Path(found).name
            raise CheckpointError(path, f"there are checkpoints of GPT-NeoX here ({name}): {advice(Path(found))}")

    def _named(self, path: Path, key: str, *, weights: bool = False) -> Resume:
        self._refuse_foreign(path)
        folder, there, whole = self._on_rank_0(lambda: _look(path))
        if folder is not None:
            found = Store(folder, self.communicator)._newest_intact(weights=weights)
            if found.checkpoint is None:  # they were there a moment ago
                raise CheckpointError(path, f"{key} asks for it, but {NEITHER}")
            return Resume(found.checkpoint, found.skipped, f"{found.reason}, as {key} asks")
        if not there:
            raise CheckpointError(path, f"{key} asks for it, but it does not exist. {self._offer(path)}")
        if not whole and step_of(path) is None:
            raise CheckpointError(path, f"{key} asks for it, but {NEITHER}")
        checkpoint = open_checkpoint(path, verify="checksums", communicator=self.communicator)
        verb = "weights" if weights else "resumed"
        return Resume(checkpoint, reason=f"{verb} from {path} (step {checkpoint.step}), as {key} asks")

    def _newest_intact(self, *, weights: bool = False, before: int | None = None) -> Resume:
        skipped = []
        for path in map(Path, reversed(self._on_rank_0(lambda: list(map(str, self.paths()))))):
            if before is not None and number_of(path) >= before:
                continue
            try:
                checkpoint = open_checkpoint(path, verify="checksums", communicator=self.communicator)
            except CheckpointError as error:
                skipped.append((path, brief(error.problems)))
                continue
            if not (weights or checkpoint.meta.resumable):
                skipped.append((path, "it has only weights"))
                continue
            note = "".join(f"; skipped {bad.name}: {why}" for bad, why in skipped)
            start = "weights" if weights else "resumed"
            reason = f"{start} from {path} (step {checkpoint.step}), the newest intact one{note}"
            return Resume(checkpoint, skipped, reason)
        if skipped:
            none = (
                "none is intact"
                if weights
                else ("none can be resumed: repair or move them away, or set checkpoint.resume to none")
            )
            raise CheckpointError(
                self.directory,
                [f"there are checkpoints, but {none}", *(f"{path.name}: {why}" for path, why in skipped)],
            )
        return Resume(None, reason=f"started from step 0: no checkpoint in {self.directory}")

    def _offer(self, path: Path) -> str:
        siblings = Store(path.parent).paths()
        if not siblings:
            return f"There is no checkpoint in {path.parent}"
        return f"{path.parent} has {', '.join(found.name for found in siblings[-5:])}"

    # -- housekeeping ----------------------------------------------------------------------------------------------

    def clean(self) -> list[str]:
        """Remove leftovers of killed saves and deletions, and put back a checkpoint that was being replaced.

        Call when a run starts, before it resumes. Only rank 0 works.

        Returns:
            Descriptions of the changes, on every rank.
        """
        return self._on_rank_0(self._clean)

    def set_aside(self, after: int) -> list[str]:
        """Move checkpoints of later steps out of the sight of `resume("auto")`: the run goes back and leaves that
        branch.

        They move into `superseded_1`, `superseded_2`, … within the folder.

        Args:
            after: the step that the run continues from. -1: from the beginning.

        Returns:
            Descriptions of the changes, on every rank.
        """
        return self._on_rank_0(lambda: self._set_aside(after))

    def retain(
        self, keep_last: int | None, keep_every: int | None = None, *, protect: Collection[str] = ()
    ) -> list[str]:
        """Delete all but the newest `keep_last` complete checkpoints and those at multiples of `keep_every` steps.

        The newest complete one always stays. Incomplete ones are not deleted and do not count.

        Args:
            protect: names that stay in any case.

        Returns:
            Names of the deleted ones, on every rank.
        """
        if keep_last is None:
            return []
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, not {keep_last}")
        return self._on_rank_0(lambda: self._retain(keep_last, keep_every, protect))

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        done, failure = from_rank_0(self.communicator, work, OSError, CheckpointError)
        if failure:
            raise CheckpointError(self.directory, failure)
        return done

    def _clean(self) -> list[str]:
        done = []
        for path in sorted(self.directory.iterdir()) if self.directory.is_dir() else []:
            leftover = leftover_of(path)
            if leftover is None:
                continue
            name, kind = leftover
            whole = path.with_name(name)
            if kind == "old" and not whole.exists():
                move(path, whole)
                done.append(f"{name} put back: a run was killed while replacing it")
            else:
                shutil.rmtree(path)
                done.append(f"{path.name} removed: a run was killed while {_DOING[kind]} {name}")
        return done

    def _set_aside(self, after: int) -> list[str]:
        later = [path for path in self.paths() if number_of(path) > after]
        if not later:
            return []
        aside = next(path for n in itertools.count(1) if not (path := self.directory / f"superseded_{n}").exists())
        aside.mkdir()
        for path in later:
            move(path, aside / path.name)
        sync_directory(self.directory)
        names = ", ".join(path.name for path in later)
        return [f"{names} set aside in {aside}: this run leaves that branch"]

    def _retain(self, keep_last: int, keep_every: int | None, protect: Collection[str]) -> list[str]:
        """To see whether one is complete, each of its files is inspected. So only the newest ones are inspected, until
        `keep_last` are complete, and candidates for deletion."""
        complete, deleted = 0, []
        for path in reversed(self.paths()):
            stays = path.name in protect or bool(keep_every and number_of(path) % keep_every == 0)
            if complete == keep_last and stays or not is_complete(path):
                continue
            if complete < keep_last:
                complete += 1
            else:
                remove(path, uuid.uuid4().hex[:12])
                deleted.append(path.name)
        return deleted[::-1]


def _look(path: Path) -> tuple[str | None, bool, bool]:
    """(folder of checkpoints or None, whether the path is a directory, whether it has a manifest)."""
    folder = folder_of(path)
    return None if folder is None else str(folder), path.is_dir(), (path / MANIFEST).exists()


_DOING = {"tmp": "writing", "old": "replacing", "trash": "deleting"}


def is_complete(path: Path) -> bool:
    """Whether all files of a checkpoint exist with their sizes."""
    try:
        open_checkpoint(path, verify="sizes")
    except CheckpointError:
        return False
    return True


@contextmanager
def sole_writer(directory: str | Path, communicator: Communicator = SOLO, *, insist: bool = True) -> Iterator[None]:
    """Hold a folder for one run, until rank 0's process ends in any way. Does nothing on disks without locks.

    Args:
        insist: raise if another run holds it. A restarted run passes False: it must not wait until a file server
            notices that its former host is gone.

    Raises:
        CheckpointError: on every rank, with the host and the process that hold it.
    """
    handle, holder = None, None
    if communicator.rank == 0:
        handle, holder = take(Path(directory) / LOCK_NAME)
    holder = communicator.broadcast(holder)
    try:
        if holder is not None and insist:
            rule = f"another run writes here ({holder}): wait for its end, or give this one a run.dir of its own"
            raise CheckpointError(directory, rule)
        yield
    finally:
        if handle is not None:
            os.close(handle)
