"""The levels of a run: their folders on this host, and the newest complete save of all levels."""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...config.file_access import replace_file
from ...config.sections.output import LevelSection
from ..format.communicator import Communicator, all_problems
from ..format.durable import name_errors, sync_directory, write_file
from ..format.errors import CheckpointError, StoreRefuses, brief, disk_refuses
from ..format.fragment import Fragment
from ..format.manifest import Meta
from ..read.reader import Checkpoint
from .hosts import Hosts, own_folder
from .index_exchange import FoundSave, gather
from .level import KEY, Level

MEMORY = "/dev/shm"  # noqa: S108  (a file system in memory, with private folders).
# File in the folder of checkpoints: the token of its folders on hosts, and the steps after which it left a branch.
TOKEN = ".levels"


class Levels:
    """All levels of a run. Every rank calls every method together.

    Args:
        sections: of `checkpoint.levels` that are on hosts, the nearest first.
        directory: the run's folder of checkpoints, which all hosts see.
        communicator: of all ranks, for the main thread.
        device: of messages between hosts.
        insist: whether all folders must exist now. Otherwise a disk that refuses is tried again at each save of its
            level.

    Attributes:
        refused: folders that are missing now or were replaced, the same on all ranks.

    Raises:
        CheckpointError: on every rank: a folder cannot be made on some host, or there are too few hosts.
    """

    def __init__(
        self,
        sections: Sequence[LevelSection],
        directory: str | Path,
        communicator: Communicator,
        device: torch.device | str = "cpu",
        insist: bool = True,
    ) -> None:
        self._communicator, self._insist = communicator, insist
        self.hosts = Hosts.of(communicator, device)
        self._folders: list[Path] = []
        self._note = Path(directory) / TOKEN
        self._token, self._left = self._known()
        self.refused: list[str] = []
        problem = ""
        try:
            self.levels = [self._level(section) for section in sections]
        except (OSError, CheckpointError) as error:
            problem = f"{self.hosts.name}: {error}"
        problems = all_problems(communicator, [problem] if problem else [])
        most = max((section.neighbours for section in sections), default=0)
        if not problems and most >= len(self.hosts.members):
            problems = [
                f"neighbours must be fewer than the hosts: {most} of {len(self.hosts.members)} (set it to "
                f"{len(self.hosts.members) - 1}, or start the run on more hosts)"
            ]
        if problems:
            raise CheckpointError("checkpoint.levels", problems)
        self.refused = sorted({each for told in communicator.gather(self.refused) for each in told})
        if self.hosts.leads:
            for level in self.levels:
                level.clean()
        communicator.barrier()

    def save(self, number: int, step: int, fragments: Iterable[Fragment], meta: Meta) -> str | None:
        """Save a step at a level. Returns the reason if that failed: a run continues without a level."""
        try:
            self.levels[number].save(step, fragments, meta, len(self._left))
        except StoreRefuses as error:
            return str(error)
        return None

    def newest(self, least: int) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
        """The newest complete and undamaged save of at least `least` updates, of the nearest level that has it. Then
        the skipped saves, with reasons."""
        skipped: list[tuple[Path, str]] = []
        for found in self._candidates(least):
            level = self.levels[found.level]
            try:
                checkpoint = gather(found, level.name, level.folder, KEY, self.hosts)
                return checkpoint, skipped
            except CheckpointError as error:
                skipped.append((Path(error.subject), brief(error.problems)))
        return None, skipped

    def drop(self, after: int) -> list[str]:
        """Leave the branch of later steps. Saves of it are void on all hosts, and are deleted where the disk allows it.

        Returns:
            Descriptions of the changes, on every rank.

        Raises:
            CheckpointError: on every rank: the folder of checkpoints cannot record it.
        """
        self._leave(after)
        gone, refused = set[str](), []
        for level in self.levels if self.hosts.leads else ():
            names, problem = level.drop(after)
            gone |= set(names)
            if problem:
                where = f"{level.name} of {self.hosts.name}"
                refused.append(f"{where} keeps saves of the branch that this run leaves, and they are void: {problem}")
        told = self._communicator.gather([sorted(gone), refused])
        names = sorted({name for deleted, _ in told for name in deleted})
        done = [f"{', '.join(names)} deleted from checkpoint.levels: this run leaves that branch"] if names else []
        return done + [line for _, lines in told for line in lines]

    def remove(self) -> None:
        """Delete all folders: the run has ended, and its folder of checkpoints has its last state."""
        if self.hosts.leads:
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
        self._communicator.barrier()

    def _candidates(self, least: int) -> list[FoundSave]:
        own: list[Any] = []
        if self.hosts.leads:
            for number, level in enumerate(self.levels):
                own += [
                    [number, part.step, part.save, part.total, part.writers]
                    for part in level.parts()
                    if part.step >= least and all(part.step <= after for after in self._left[part.branch :])
                ]
        everything = self._communicator.collect(own)
        answer = None
        if everything is not None:
            files: dict[tuple[int, int, str, int], set[int]] = {}
            for number, step, save, total, writers in (each for found in everything for each in found):
                files.setdefault((number, step, save, total), set()).update(writers)
            whole = [key for key, writers in files.items() if len(writers) == key[3]]
            answer = sorted(whole, key=lambda key: (-key[1], key[0], key[2]))
        return [FoundSave(*each) for each in self._communicator.broadcast(answer)]

    def _level(self, section: LevelSection) -> Level:
        base = MEMORY if section.path is None else section.path.replace("{host}", self.hosts.name)
        folder = Path(base) / f"deepy-{os.geteuid()}-{self._token}-{re.sub(r'[^A-Za-z0-9_.-]', '_', self.hosts.name)}"
        name = section.title
        try:
            folder, why = own_folder(folder)
            if why:
                self.refused.append(f"{name} of {self.hosts.name}: {why}")
        except OSError as error:
            if self._insist or not disk_refuses(error):
                raise
            self.refused.append(
                f"{name} of {self.hosts.name}: {error}. The run continues without this level until its next save"
            )
        self._folders.append(folder)
        return Level(name, folder / name.replace(" ", "_"), int(section.keep), section.neighbours, self.hosts)

    def _known(self) -> tuple[str, list[int]]:
        """The token in the names of this run's folders on hosts, and the steps after which it left a branch.

        The token differs for another run, also for one that starts again in the same place after a deletion."""

        def read() -> list[str]:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            if not self._note.exists():
                write_file(self._note, uuid.uuid4().hex[:16].encode())
            text = self._note.read_text(errors="replace").strip()
            if not re.fullmatch(r"[0-9a-f]{16}(\n-?[0-9]{1,12})*", text):
                raise CheckpointError("checkpoint.levels", f"{self._note} is damaged: remove it")
            return text.split("\n")

        token, *left = self._on_rank_0(read)
        return token, [int(step) for step in left]

    def _leave(self, after: int) -> None:
        left = [*self._left, after]

        def write() -> list[str]:
            with name_errors(self._note):
                replace_file(self._note, "\n".join([self._token, *map(str, left)]), durable=True)
            sync_directory(self._note.parent)
            return []

        self._on_rank_0(write)
        self._left = left

    def _on_rank_0(self, work: Callable[[], list[str]]) -> list[str]:
        answer = None
        if self._communicator.rank == 0:
            try:
                answer = [work(), ""]
            except CheckpointError as error:
                answer = [[], "; ".join(error.problems)]
            except OSError as error:
                answer = [[], str(error) + (" (checkpoint.dir)" if disk_refuses(error) else "")]
        found, problem = self._communicator.broadcast(answer)
        if problem:
            raise CheckpointError("checkpoint.levels", problem)
        return found
