"""The trainer's saves: in the foreground or the background, then upload and retention."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...config.sections.output import CheckpointSection, LevelSection
from ..format.communicator import SOLO, Communicator
from ..format.durable import MANIFEST, number_of, step_name
from ..format.errors import CheckpointError, StoreRefuses
from ..format.fragment import Fragment
from ..format.index import checksum
from ..format.manifest import Meta
from .store import Store, is_complete
from .transfer import manifest_at, retain_there, upload
from .writer import save


@dataclass(frozen=True)
class Copy:
    """A checkpoint in a store, with the checksum of its manifest. Two runs use the same names, but never have the same
    manifest."""

    url: str
    manifest: str


class Copies:
    """The copies that one run has made. Names at a URL do not identify the run, so the run keeps this account.

    Attributes:
        own: step -> copy of the run's state after it. Without steps of branches that the run has left.
        urls: of all copies that the run ever made.
    """

    def __init__(self, record: Callable[[int, Copy], None] | None = None) -> None:
        """`record` is called, from any thread, with each new copy."""
        self.own: dict[int, Copy] = {}
        self.urls: set[str] = set()
        self._record = record

    def add(self, step: int, copy: Copy) -> None:
        known = self.own.get(step) == copy
        self.own[step] = copy
        self.urls.add(copy.url)
        if self._record is not None and not known:
            self._record(step, copy)

    def go_back(self, step: int) -> None:
        """Forget copies of later steps, of a branch that the run leaves. -1: it starts from the beginning."""
        self.own = {each: copy for each, copy in self.own.items() if each <= step}

    def within(self, url: str) -> list[int]:
        """Steps of its own copies in a store's folder, oldest first."""
        return sorted(step for step, copy in self.own.items() if copy.url.rpartition("/")[0] == url.rstrip("/"))


@dataclass(frozen=True)
class Saved:
    """A finished save."""

    path: Path
    stall: float  # seconds of the training step that it took
    seconds: float  # seconds from the call until it was on the disk
    deleted: list[str]  # names of older checkpoints that retention removed
    uploaded: str | None = None  # URL of the copy, if any
    upload_problem: str | None = None  # why it, or an earlier one, was not copied. The next save tries again.
    failure: str | None = None  # why it was not written. Earlier checkpoints are unchanged.


class HostCopy:
    """Copies of fragments in host memory that every save uses again: no page faults, no new pinned memory."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(self, fragments: Iterable[Fragment]) -> list[Fragment]:
        """Copy all fragments. The originals may change after the return."""
        copies, devices = [], set()
        for place, fragment in enumerate(fragments):
            buffer = self._buffer(place, fragment.data)
            buffer.copy_(fragment.data, non_blocking=True)
            if fragment.data.is_cuda:
                devices.add(fragment.data.device)
            copies.append(Fragment.of(fragment.spec, buffer))
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def prepare(self, fragments: Iterable[Fragment]) -> None:
        """Allocate the memory and touch its pages, so that the first save is as fast as the later ones."""
        for place, fragment in enumerate(fragments):
            self._buffer(place, fragment.data).zero_()

    def _buffer(self, place: int, data: torch.Tensor) -> torch.Tensor:
        if place == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer = self._buffers[place]
        if buffer.dtype != data.dtype or buffer.shape != data.shape or buffer.is_pinned() != data.is_cuda:
            buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._buffers[place] = buffer
        return buffer


class Saver:
    """Saves steps of a run into its folder.

    Args:
        directory: folder of checkpoints.
        section: the configuration's `checkpoint` section.
        communicator: used by a background thread, so its group must have no other user.
        copies: the run's uploads, on rank 0. New ones are added.
    """

    def __init__(
        self,
        directory: str | Path,
        section: CheckpointSection,
        communicator: Communicator = SOLO,
        copies: Copies | None = None,
    ) -> None:
        self.store = Store(directory, communicator)
        self._section, self._level = section, section.store
        self._url = "" if section.store is None else (section.store.url or "").rstrip("/")
        self._communicator = communicator
        self._copies = copies or Copies()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Saved] | None = None
        self._ended: list[Saved] = []
        self._owed: list[Path] | None = None  # None until the store is listed
        self._upload_problem: str | None = None
        self._refused: StoreRefuses | None = None  # the last save's
        self._host = HostCopy()

    def prepare(self, fragments: Iterable[Fragment]) -> None:
        """Allocate the host memory of background saves. Optional, before the first step."""
        if self._section.asynchronous:
            self._host.prepare(fragments)

    def save(self, step: int, fragments: Iterable[Fragment], meta: Meta) -> float:
        """Save a step. All ranks call. Returns the seconds for which the training stood still.

        In the background, this waits only for the previous save and for the copy to host memory. Errors are raised by
        the next `poll`, `save` or `close`. A disk that is full or refuses does not stop the run: `poll` reports it, and
        only `close` raises it if no later save succeeded."""
        began = time.perf_counter()
        self._settle()
        if self._section.asynchronous:
            copies = self._host.take(fragments)
            stall = time.perf_counter() - began
            self._pending = self._thread.submit(self._write, step, copies, meta, began, stall)
            return stall
        try:
            path = save(self.store.directory, step, fragments, meta, self._communicator)
        except StoreRefuses as error:
            self._ended.append(self._failed(error, step, time.perf_counter() - began))
            return time.perf_counter() - began
        stall = time.perf_counter() - began
        self._pending = self._thread.submit(self._finish, path, stall, stall)
        return stall

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call. Call at every step.

        Raises:
            CheckpointError: one failed.
        """
        if self._pending is not None and self._pending.done():
            self._settle()
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> list[Saved]:
        """Like `poll`, but waits for a running save."""
        self._settle()
        return self.poll()

    def close(self) -> list[Saved]:
        """Wait for all saves, try the missing uploads a last time, and stop the thread.

        Raises:
            CheckpointError: a save failed, or a checkpoint could not be uploaded.
        """
        try:
            ended = self.wait()
            if self._level is not None and self._find_owed():
                self._upload_owed(self._find_owed())
            if self._refused is not None:
                raise self._refused
            if self._owed:
                names = ", ".join(path.name for path in self._owed)
                raise CheckpointError(self._url, f"never uploaded: {names}. {self._upload_problem}")
            return ended
        finally:
            self._thread.shutdown()

    def _settle(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._ended.append(pending.result())

    def _write(self, step: int, copies: list[Fragment], meta: Meta, began: float, stall: float) -> Saved:
        try:
            path = save(self.store.directory, step, copies, meta, self._communicator)
        except StoreRefuses as error:
            return self._failed(error, step, stall, time.perf_counter() - began)
        return self._finish(path, stall, time.perf_counter() - began)

    def _failed(self, error: StoreRefuses, step: int, stall: float, seconds: float | None = None) -> Saved:
        self._refused = error
        path = self.store.directory / step_name(step)
        return Saved(path, stall, stall if seconds is None else seconds, [], failure=str(error))

    def _finish(self, path: Path, stall: float, seconds: float) -> Saved:
        self._refused = None
        uploaded = self._upload(path, self._level) if self._level is not None else None
        deleted = self.store.retain(
            self._section.keep_last, self._section.keep_every, protect={owed.name for owed in self._owed or ()}
        )
        return Saved(path, stall, seconds, deleted, uploaded, self._upload_problem)

    def _upload(self, path: Path, level: LevelSection) -> str | None:
        """Copy this checkpoint and earlier ones that failed. A store's outage does not stop a run whose checkpoints are
        safe on its disk: it is reported, retried, and raised at the end."""
        owed = self._find_owed()
        due = path not in owed and _goes_there(path, level)
        left = self._upload_owed([*owed, path] if due else owed)
        if path in left or not (due or path in owed):
            return None
        if level.keep != "all" and self._communicator.rank == 0:
            kept = [step for step in self._copies.within(self._url) if step <= number_of(path)][-level.keep :]
            retain_there(self._url, kept[0], self._copies.urls)
        return f"{self._url}/{path.name}"

    def _find_owed(self) -> list[Path]:
        if self._owed is None:
            answer = [str(path) for path in self._not_there()] if self._communicator.rank == 0 else None
            self._owed = [Path(path) for path in self._communicator.broadcast(answer)]
        return self._owed

    def _upload_owed(self, owed: list[Path]) -> list[Path]:
        self._owed, self._upload_problem = [], None
        for each in owed:
            patience: dict[str, Any] = {"attempts": 1} if self._upload_problem else {}  # wait for an outage only once
            try:
                upload(each, self._url, self._communicator, **patience)
                if self._communicator.rank == 0:
                    self._count(each)
            except CheckpointError as error:
                self._owed.append(each)
                self._upload_problem = str(error)
        return self._owed

    def _not_there(self) -> list[Path]:
        """Checkpoints of an earlier start that were not copied: complete ones newer than this run's newest copy.

        Copies are compared by content, since another branch or run may use the same names. If this run has no copy,
        only the newest checkpoint counts: older ones may be from a time without upload."""
        owed: list[Path] = []
        due = [path for path in self.store.paths() if self._level is not None and _goes_there(path, self._level)]
        with suppress(CheckpointError):  # an unreachable store counts as empty
            for path in reversed(due):
                if not is_complete(path):
                    continue
                owed.append(path)
                if manifest_at(f"{self._url}/{path.name}") == (path / MANIFEST).read_bytes():
                    owed.pop()
                    self._count(path)
                    return owed[::-1]
        known = self._copies.within(self._url)
        return [path for path in reversed(owed) if number_of(path) > known[-1]] if known else owed[:1]

    def _count(self, path: Path) -> None:
        manifest = checksum((path / MANIFEST).read_bytes())
        self._copies.add(number_of(path), Copy(f"{self._url}/{path.name}", manifest))


def _goes_there(path: Path, level: LevelSection) -> bool:
    """Whether the store gets a copy. `auto` copies all, since copying costs the steps no time."""
    return level.every == "auto" or number_of(path) % level.every == 0
