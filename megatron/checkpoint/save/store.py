"""A folder of checkpoints: which to resume from, which to keep, and what killed runs left behind.

One run writes to a folder at a time.
"""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.foreign import advice, neox_checkpoint
from ..format.communicator import SOLO, Communicator
from ..format.durable import move, remove, sync_directory
from ..format.errors import CheckpointError, brief
from ..format.names import MANIFEST_NAME, leftover_of, number_of, step_of
from ..read.reader import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class Resume:
    """What a run starts from.

    Attributes:
        checkpoint: the opened checkpoint, None to start anew.
        skipped: newer checkpoints that were passed over, with the reason.
        reason: one sentence that says what was chosen and why.
    """

    checkpoint: Checkpoint | None
    skipped: list[tuple[Path, str]] = field(default_factory=list)
    reason: str = ""


NEITHER = "it is neither a checkpoint nor a folder with one; name a run's directory or one of its checkpoints"


def folder_of(path: Path) -> Path | None:
    """The folder of checkpoints that `path` is, or that the run's directory `path` has; None for anything else."""
    if (path / MANIFEST_NAME).exists():
        return None
    return next((folder for folder in (path / "checkpoints", path) if Store(folder).paths()), None)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` is, or the newest in the folder of checkpoints or the run's directory that it is.

    Raises:
        CheckpointError: there is none.
    """
    folder = folder_of(path)
    if folder is not None:
        return Store(folder).paths()[-1]
    if (path / MANIFEST_NAME).exists() or step_of(path) is not None:
        return path
    raise CheckpointError(path, NEITHER if path.exists() else "there is no such checkpoint")


class Store:
    """The checkpoints in a folder.

    Args:
        directory: the folder; it need not exist yet.
        communicator: the ranks that work on it together; all call every method.
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

    def resume(self, how: str = "auto", *, verify: str = "checksums", before: int | None = None) -> Resume:
        """The checkpoint to go on from.

        Args:
            how: "auto": the newest intact one here, if there is any; "none": start anew; otherwise the path of a
                checkpoint, or of a folder of them or a run's directory (then its newest intact one).
            verify: how far to trust the disk; see `open_checkpoint`.
            before: with "auto", only checkpoints of earlier steps than this.

        Raises:
            CheckpointError: the one asked for is not there, damaged or cannot be resumed; or there are checkpoints
                here and none is intact. A run never starts anew because it could not read.
        """
        self._refuse_foreign(self.directory)
        if how == "none":
            return Resume(None, reason="started anew: checkpoint.resume is none")
        if how == "auto":
            return self._newest_intact(verify, before=before)
        found = self._named(Path(how), "checkpoint.resume", verify)
        checkpoint = found.checkpoint
        if checkpoint is not None and not checkpoint.meta.resumable:
            raise CheckpointError(
                checkpoint.path, "it has only weights; name it in checkpoint.initialize_from to start from them"
            )
        return found

    def weights(self, path: str | Path, *, verify: str = "checksums") -> Resume:
        """The checkpoint to take weights from: the one named, or the newest intact one of a folder or a run's
        directory.

        Raises:
            CheckpointError: it is not there or damaged.
        """
        return self._named(Path(path), "checkpoint.initialize_from", verify, weights=True)

    def _refuse_foreign(self, path: Path) -> None:
        """Another program's checkpoints are not `no checkpoint`, and nothing of ours is put among them."""
        found = self._on_rank_0(lambda: str(neox_checkpoint(path) or ""))
        if found:
            name = Path(found).name
            raise CheckpointError(path, f"there are checkpoints of GPT-NeoX here ({name}): {advice(Path(found))}")

    def _named(self, path: Path, key: str, verify: str, *, weights: bool = False) -> Resume:
        self._refuse_foreign(path)
        folder, there, whole = self._on_rank_0(lambda: _look(path))
        if folder is not None:
            found = Store(folder, self.communicator)._newest_intact(verify, weights=weights)
            if found.checkpoint is None:  # they were there a moment ago
                raise CheckpointError(path, f"{key} asks for it, but {NEITHER}")
            return Resume(found.checkpoint, found.skipped, f"{found.reason}, as {key} asks")
        if not there:
            raise CheckpointError(path, f"{key} asks for it, but it does not exist; {self._offer(path)}")
        if not whole and step_of(path) is None:
            raise CheckpointError(path, f"{key} asks for it, but {NEITHER}")
        checkpoint = open_checkpoint(path, verify=verify, communicator=self.communicator)
        verb = "weights" if weights else "resumed"
        return Resume(checkpoint, reason=f"{verb} from {path} (step {checkpoint.step}), as {key} asks")

    def _listing(self) -> list[Path]:
        """Rank 0's view of the folder, so that all ranks walk through the same names."""
        return [Path(name) for name in self._on_rank_0(lambda: [str(path) for path in self.paths()])]

    def _newest_intact(self, verify: str, *, weights: bool = False, before: int | None = None) -> Resume:
        skipped = []
        for path in reversed(self._listing()):
            if before is not None and number_of(path) >= before:
                continue
            try:
                checkpoint = open_checkpoint(path, verify=verify, communicator=self.communicator)
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
                else ("none can be resumed; repair or move them away, or set checkpoint.resume to none")
            )
            raise CheckpointError(
                self.directory,
                [f"there are checkpoints, but {none}", *(f"{path.name}: {why}" for path, why in skipped)],
            )
        return Resume(None, reason=f"started anew: no checkpoint in {self.directory}")

    def _offer(self, path: Path) -> str:
        beside = Store(path.parent).paths()
        if not beside:
            return f"there is no checkpoint in {path.parent}"
        return f"{path.parent} has {', '.join(found.name for found in beside[-5:])}"

    # -- housekeeping ----------------------------------------------------------------------------------------------

    def clean(self) -> list[str]:
        """Remove what killed saves and deletions left; put back a checkpoint that was being replaced.

        Call when a run starts, before it resumes. Rank 0 does it, the others wait.

        Returns:
            What was done, on every rank.
        """
        return self._on_rank_0(self._clean)

    def set_aside(self, after: int) -> list[str]:
        """Put checkpoints of later steps where `resume("auto")` does not look: the run goes back and leaves that
        branch.

        They move into `superseded_1`, `superseded_2`, … within the folder, and stay whole there.

        Args:
            after: the step that the run goes on from; -1 if it starts anew.

        Returns:
            What was done, on every rank.
        """
        return self._on_rank_0(lambda: self._set_aside(after))

    def retain(
        self, keep_last: int | None, keep_every: int | None = None, *, protect: Collection[str] = ()
    ) -> list[str]:
        """Delete all but the newest `keep_last` complete checkpoints and those at multiples of `keep_every` steps.

        The newest complete one always stays. One that lacks something is not deleted and does not count.

        Args:
            protect: names that stay for another reason.

        Returns:
            Names of the deleted, on every rank.
        """
        if keep_last is None:
            return []
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least the newest checkpoint stays")
        return self._on_rank_0(lambda: self._retain(keep_last, keep_every, protect))

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """What rank 0 finds (JSON values), on every rank; its error too."""
        answer = None
        if self.communicator.rank == 0:
            try:
                answer = [work(), None]
            except (OSError, CheckpointError) as error:
                answer = [None, str(error)]
        done, failure = self.communicator.broadcast(answer)
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
        aside = next(
            path for number in itertools.count(1) if not (path := self.directory / f"superseded_{number}").exists()
        )
        aside.mkdir()
        for path in later:
            move(path, aside / path.name)
        sync_directory(self.directory)
        names = ", ".join(path.name for path in later)
        return [f"{names} set aside in {aside}: this run leaves that branch"]

    def _retain(self, keep_last: int, keep_every: int | None, protect: Collection[str]) -> list[str]:
        """To see that one is complete takes a look at each of its files, so only those are looked at that matter: the
        newest ones, until `keep_last` were complete, and before them those that may go."""
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
    """(the folder of checkpoints that is meant, if one is; whether the path is a directory; whether it has a
    manifest).
    """
    folder = folder_of(path)
    return None if folder is None else str(folder), path.is_dir(), (path / MANIFEST_NAME).exists()


_DOING = {"tmp": "writing", "old": "replacing", "trash": "deleting"}


def is_complete(path: Path) -> bool:
    """Whether all files of a checkpoint are there with their sizes."""
    try:
        open_checkpoint(path, verify="sizes")
    except CheckpointError:
        return False
    return True
