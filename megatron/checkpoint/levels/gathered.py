"""A checkpoint whose files lie on several hosts: found, verified, and read as one."""

from __future__ import annotations

import base64
import os
import shutil
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..communicator import SOLO, Communicator, all_problems
from ..durable import write_file
from ..errors import CheckpointError, brief
from ..fragment import Fragment
from ..index import Index
from ..manifest import head_files, part_of
from ..names import META_NAME, leftover_name, step_name
from ..rankfile import FileRecord, read_table
from ..read_plan import plan
from ..reader import Checkpoint
from ..table import ROW, coverage_problems
from ..writer import describe_error
from .courier import Courier, Parcel
from .hosts import Hosts, private


@dataclass(frozen=True)
class FoundSave:
    """A save that seems to have everything.

    Attributes:
        level: number of the level.
        step: completed updates.
        save: tells saves of one step apart.
        total: files of all hosts.
    """

    level: int
    step: int
    save: str
    total: int


@dataclass(frozen=True)
class Verified:
    """What the ranks have found to be intact.

    Attributes:
        part: this host's, None if it has none.
        holders: by file, the numbers of the hosts that have it.
        problems: what was not intact.
    """

    part: Checkpoint | None
    holders: dict[str, list[int]]
    problems: list[str]


def verify(found: FoundSave, folder: Path, key: str, hosts: Hosts, communicator: Communicator) -> Verified:
    """Read every byte that any host has of a save; the ranks of a host share the work."""
    part, good, problems = None, [], []
    path = folder / step_name(found.step)
    try:
        if path.is_dir():
            part = Checkpoint(path)
            if part.meta.extra.get(key, {}).get("save") != found.save:
                part = None
    except (CheckpointError, OSError) as error:
        problems.append(f"{hosts.name}: {describe_error(error)}")
    if part is not None:
        first, step = hosts.place
        for number in range(first, len(part.records), step):
            wrong = part.file_damage(number)
            problems += [f"{hosts.name}: {each}" for each in wrong]
            good += [] if wrong else [part.records[number].path]
    everything = communicator.gather([good, problems])
    holders: dict[str, list[int]] = {}
    for rank, (names, _) in enumerate(everything):
        for name in names:
            holders.setdefault(name, []).append(hosts.number_of[rank])
    return Verified(part, holders, list(dict.fromkeys(each for _, told in everything for each in told)))


def gather(
    found: FoundSave,
    level: str,
    folder: Path,
    key: str,
    hosts: Hosts,
    communicator: Communicator,
    courier: Courier | None,
) -> GatheredCheckpoint:
    """Open a save of all hosts; every rank calls it.

    Raises:
        CheckpointError: on every rank: something is lost or damaged on every host that had it.
    """
    title = f"{level}, step {found.step}"
    seen = verify(found, folder, key, hosts, communicator)
    lost = found.total - len(seen.holders)
    if lost:
        why = f" ({brief(seen.problems)})" if seen.problems else ""
        raise CheckpointError(
            title, f"{lost} of {found.total} files are on no host, or damaged on all that have them{why}"
        )
    head = _whole(title, seen, hosts, communicator)
    root = leftover_name(folder / step_name(found.step), "tmp", communicator.broadcast(uuid.uuid4().hex[:12]))
    problem = ""
    if hosts.leads:
        try:
            private(folder.parent)
            _lay_out(root, seen, hosts.own, head)
        except (OSError, CheckpointError) as error:
            problem = f"{hosts.name}: {error}"
    problems = all_problems(communicator, [problem] if problem else [])
    if problems:
        raise CheckpointError(title, problems)
    return GatheredCheckpoint(root, title, seen.holders, hosts, communicator, courier)


def _whole(title: str, seen: Verified, hosts: Hosts, communicator: Communicator) -> dict[str, bytes]:
    """What stands beside the ranks' files of the whole, from the hosts' own."""
    own: list[Any] = []
    if hosts.leads and seen.part is not None:
        for record in seen.part.records:
            if seen.holders.get(record.path, [-1])[0] == hosts.own:
                text, rows = read_table(seen.part.path, record)
                own.append([record.to_dict(), text, base64.b64encode(rows.tobytes()).decode()])
    meta = part_of(seen.part.path, META_NAME).read_bytes().decode() if hosts.leads and seen.part is not None else None
    everything = communicator.collect([own, meta])
    answer = None
    if everything is not None:
        pieces = [piece for pieces, _ in everything for piece in pieces]
        tables = [(text, np.frombuffer(base64.b64decode(rows), ROW)) for _, text, rows in pieces]
        index = Index.merge(tables)
        text = next(each for _, each in everything if each is not None)
        problems = coverage_problems(index.rows, index.vocabulary)
        head = head_files(index, [FileRecord.from_dict(record) for record, _, _ in pieces], text.encode())
        answer = [problems, {name: base64.b64encode(content).decode() for name, content in head.items()}]
    problems, texts = communicator.broadcast(answer)
    if problems:
        raise CheckpointError(title, problems)
    return {name: base64.b64decode(text) for name, text in texts.items()}


def _lay_out(root: Path, seen: Verified, own: int, head: dict[str, bytes]) -> None:
    """A folder that is the whole checkpoint but for files of other hosts; its own intact ones are links, not copies.
    A damaged one must not be: what comes in its place would be written into it."""
    root.mkdir(parents=True)
    for name, holders in seen.holders.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if seen.part is not None and own in holders:
            os.link(part_of(seen.part.path, name), path)
    for name, content in head.items():
        write_file(root / name, content, wait=False)


class GatheredCheckpoint(Checkpoint):
    """A checkpoint of which each host has a part. What ranks need of other hosts comes when they read it."""

    def __init__(
        self,
        root: Path,
        title: str,
        holders: dict[str, list[int]],
        hosts: Hosts,
        communicator: Communicator,
        courier: Courier | None,
    ) -> None:
        super().__init__(root)
        self._title, self._holders, self._hosts = title, holders, hosts
        self._talk, self._courier = communicator, courier

    @property
    def title(self) -> str:
        return self._title

    def read_into(
        self,
        targets: Iterable[Fragment],
        *,
        cast: Collection[str] = (),
        communicator: Communicator = SOLO,
        threads: int = 4,
    ) -> list[str]:
        """See `Checkpoint.read_into`; all ranks call it."""
        targets = list(targets)
        self._bring(self._needed(targets))
        return super().read_into(targets, cast=cast, communicator=communicator, threads=threads)

    def release(self) -> None:
        """Forget what was brought here; the hosts keep their own parts."""
        self._talk.barrier()
        if self._hosts.leads:
            shutil.rmtree(self.path, ignore_errors=True)
        self._talk.barrier()

    def _needed(self, targets: list[Fragment]) -> set[str]:
        """Files that hold a part of what this rank reads."""
        numbers: set[int] = set()
        for target in targets:
            source = self.source(target.spec, target.data.dtype) if target.data.numel() else None
            if source is not None:
                numbers |= {read.file for read in plan(self.index, target.spec, source)}
        return {self.records[number].path for number in numbers}

    def _bring(self, names: set[str]) -> None:
        lacking = sorted(name for name in names if self._hosts.own not in self._holders[name])
        parcels = self._parcels(self._talk.gather(lacking))
        problems = [str(each) for each in self._carried(parcels).values()]
        numbers = {record.path: number for number, record in enumerate(self.records)}
        for parcel in parcels:
            if parcel.receiver == self._hosts.rank:
                problems += self.file_damage(numbers[parcel.name])
        self._raise_together(problems, self._talk)

    def _carried(self, parcels: list[Parcel]) -> dict[str, OSError]:
        if not parcels:
            return {}
        if self._courier is None:
            raise CheckpointError(self._title, "files of other hosts are needed, and nothing can bring them")
        return self._courier.carry(parcels, self.path, self.path)

    def _parcels(self, wanted: list[list[str]]) -> list[Parcel]:
        """Each file that a host lacks comes to it once, from hosts that have it in turn."""
        sizes = {record.path: record.size for record in self.records}
        receivers: dict[tuple[str, int], int] = {}
        for rank, names in enumerate(wanted):
            for name in names:
                receivers.setdefault((name, self._hosts.number_of[rank]), rank)
        found = []
        for turn, ((name, host), receiver) in enumerate(sorted(receivers.items())):
            holders = self._holders[name]
            ranks = self._hosts.members[holders[(host + turn) % len(holders)]]
            found.append(Parcel(name, sizes[name], ranks[turn % len(ranks)], receiver))
        return found
