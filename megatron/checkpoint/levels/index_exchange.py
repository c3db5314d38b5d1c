"""Find, verify and read a checkpoint whose files lie on several hosts.

Each host has the head (index, meta data, manifest) of its own part. Rank 0 receives them one host after the other,
merges them, and sends the result along a binary tree of hosts. No host holds more than a part of a head in memory. Only
each host's first rank takes part."""

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..format.communicator import all_problems
from ..format.durable import MANIFEST, META, leftover_name, step_name, write_file
from ..format.errors import CheckpointError, brief, describe_error
from ..format.fragment import Fragment
from ..format.index import INDEX_NAME
from ..format.manifest import manifest_of, open_index, part_of, read_manifest, write_merged
from ..format.rankfile import FileRecord, file_name
from ..read.read_plan import plan
from ..read.reader import Checkpoint
from .hosts import Hosts, Parcel, private

HEAD = (INDEX_NAME, META, MANIFEST)
INBOX = "head"  # in the folder of the whole, on rank 0's host


@dataclass
class SharedHead:
    """The exchange of heads. Every rank makes one, and calls every method."""

    root: Path  # the folder of the whole checkpoint, the same on all hosts
    part: Path | None  # the folder of this host's part, None if it has none
    holders: dict[str, list[int]]  # file -> numbers of the hosts that have it. The first one reports it.
    hosts: Hosts

    def share(self) -> list[str]:
        """Bring the head to all hosts. Returns the problems, on every rank."""
        brought, talk = self._brought(), self.hosts.talk
        problems = self._make(brought) if talk.rank == 0 else []
        for _ in brought:  # on rank 0 the remaining ones
            pass
        if talk.rank == 0:
            shutil.rmtree(self.root / INBOX, ignore_errors=True)
        sizes = [_size(self.root, name) for name in HEAD]
        problems, sizes = talk.broadcast([problems, sizes])
        if not problems and self.hosts.courier is not None:
            leads = [ranks[0] for ranks in self.hosts.members]
            parcels = [
                Parcel(name, size, leads[(number - 1) // 2], leads[number])
                for name, size in zip(HEAD, sizes, strict=True)
                for number in range(1, len(leads))
            ]
            problems = all_problems(talk, self._carried(parcels, self.root, self.root))
        return list(problems)

    def _make(self, brought: Iterator[tuple[int, Path, list[str]]]) -> list[str]:
        """Merge the parts on rank 0. Returns the problems, since the other ranks wait."""
        records: list[FileRecord] = []
        metas: list[bytes] = []

        def tables() -> Iterator[tuple[str, np.ndarray]]:
            for number, folder, problems in brought:
                if problems:
                    raise CheckpointError(folder, problems)
                metas.append(b"" if metas else part_of(folder, META).read_bytes())
                index, known = open_index(folder, read_manifest(folder))
                text, rows = index.vocabulary.to_json(), index.rows
                for place, record in enumerate(known):
                    if self.holders.get(record.path, [-1])[0] == number:
                        records.append(record)
                        yield text, rows[rows["file"] == place]

        try:
            index = write_merged(self.root, tables(), records, whole=True)
            write_file(self.root / META, metas[0], wait=False)
            write_file(self.root / MANIFEST, manifest_of(index, metas[0]), wait=False)
        except Exception as error:  # the other ranks wait for the report
            return [f"{self.hosts.name}: {describe_error(error)}"]
        return []

    def _brought(self) -> Iterator[tuple[int, Path, list[str]]]:
        """For each host that reports files: (number, folder on rank 0 with its part's head, problems). Collective."""
        sizes = self.hosts.talk.gather([_size(self.part, name) for name in HEAD] if self.hosts.leads else [])
        for number in sorted({numbers[0] for numbers in self.holders.values()}):
            lead = self.hosts.members[number][0]
            if lead == 0:
                yield number, self.part or self.root, []
            else:
                parcels = [Parcel(name, size, lead, 0) for name, size in zip(HEAD, sizes[lead], strict=True)]
                inbox = self.root / INBOX
                yield number, inbox, self._carried(parcels, self.part or self.root, inbox)

    def _carried(self, parcels: list[Parcel], source: Path, target: Path) -> list[str]:
        assert self.hosts.courier is not None  # there are several ranks
        failed = self.hosts.courier.carry(parcels, source, target)
        return [f"{self.hosts.name}: {error}" for error in failed.values()]


def _size(folder: Path | None, name: str) -> int:
    """Size of a file. 0 if it cannot be read, so that it is not taken for complete."""
    try:
        return 0 if folder is None else part_of(folder, name).stat().st_size
    except (CheckpointError, OSError):
        return 0


@dataclass(frozen=True)
class FoundSave:
    """A save that seems complete. `save` identifies it among saves of the step, and `total` counts the files of all
    hosts."""

    level: int
    step: int
    save: str
    total: int


@dataclass(frozen=True)
class Verified:
    """The intact files of a save: this host's part, file -> numbers of the hosts that have it, and damage."""

    part: Checkpoint | None
    holders: dict[str, list[int]]
    problems: list[str]


def verify(found: FoundSave, folder: Path, key: str, hosts: Hosts) -> Verified:
    """Verify every byte that any host has of a save. The ranks of a host share the work."""
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
            good += [] if wrong else [part.records[number].rank]
    everything = hosts.talk.gather([good, problems])
    holders: dict[str, list[int]] = {}
    for rank, (writers, _) in enumerate(everything):
        for writer in writers:
            holders.setdefault(file_name(writer), []).append(hosts.number_of[rank])
    return Verified(part, holders, list(dict.fromkeys(each for _, told in everything for each in told)))


def gather(found: FoundSave, level: str, folder: Path, key: str, hosts: Hosts) -> "GatheredCheckpoint":
    """Open a save of all hosts. Every rank calls it.

    Raises:
        CheckpointError: on every rank: a file is missing or damaged on all hosts.
    """
    title, talk = f"{level}, step {found.step}", hosts.talk
    seen = verify(found, folder, key, hosts)
    lost = found.total - len(seen.holders)
    if lost:
        why = f" ({brief(seen.problems)})" if seen.problems else ""
        raise CheckpointError(title, f"{lost} of {found.total} files are absent or damaged on every host{why}")
    root = leftover_name(folder / step_name(found.step), "tmp", talk.broadcast(uuid.uuid4().hex[:12]))
    problems = all_problems(talk, _lay_out(root, seen, hosts) if hosts.leads else [])
    if not problems:
        part = None if seen.part is None else seen.part.path
        problems = SharedHead(root, part, seen.holders, hosts).share()
    checkpoint = None
    if not problems:
        try:
            checkpoint = GatheredCheckpoint(root, title, seen.holders, hosts)
        except CheckpointError as error:
            problems = [f"{hosts.name}: {describe_error(error)}"]
        problems = all_problems(talk, problems)
    if problems or checkpoint is None:
        raise CheckpointError(title, problems)
    return checkpoint


def _lay_out(root: Path, seen: Verified, hosts: Hosts) -> list[str]:
    """Make the folder of the whole checkpoint. Returns the problems.

    This host's intact files are hard links. A damaged one must not be linked, since its replacement would overwrite it.
    """
    try:
        private(root.parent.parent)
        root.mkdir(parents=True)
        for name, holders in seen.holders.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if seen.part is not None and hosts.own in holders:
                os.link(part_of(seen.part.path, name), path)
    except (OSError, CheckpointError) as error:
        return [f"{hosts.name}: {error}"]
    return []


class GatheredCheckpoint(Checkpoint):
    """A checkpoint that is spread over hosts. Files of other hosts are fetched on reading."""

    def __init__(self, root: Path, title: str, holders: dict[str, list[int]], hosts: Hosts) -> None:
        super().__init__(root, share=hosts.place)
        self._title, self._holders, self._hosts = title, holders, hosts

    @property
    def title(self) -> str:
        return self._title

    def read_into(self, targets: Iterable[Fragment], **options: Any) -> list[str]:
        """See `Checkpoint.read_into`. All ranks call it."""
        targets = list(targets)
        self._bring(self._needed(targets))
        return super().read_into(targets, **options)

    def release(self) -> None:
        """Delete the gathered folder. The hosts keep their own parts."""
        self._hosts.talk.barrier()
        if self._hosts.leads:
            shutil.rmtree(self.path, ignore_errors=True)
        self._hosts.talk.barrier()

    def _needed(self, targets: list[Fragment]) -> set[str]:
        numbers: set[int] = set()
        for target in targets:
            source = self.source(target.spec, target.data.dtype) if target.data.numel() else None
            if source is not None:
                numbers |= {read.file for read in plan(self.index, target.spec, source)}
        return {self.records[number].path for number in numbers}

    def _bring(self, names: set[str]) -> None:
        lacking = sorted(name for name in names if self._hosts.own not in self._holders[name])
        parcels = self._parcels(self._hosts.talk.gather(lacking))
        problems = [str(each) for each in self._carried(parcels).values()]
        numbers = {record.path: number for number, record in enumerate(self.records)}
        for parcel in parcels:
            if parcel.receiver == self._hosts.rank:
                problems += self.file_damage(numbers[parcel.name])
        self._raise_together(problems, self._hosts.talk)

    def _carried(self, parcels: list[Parcel]) -> dict[str, OSError]:
        if not parcels:
            return {}
        if self._hosts.courier is None:
            raise CheckpointError(self._title, "files of other hosts are needed, but no process group can send them")
        return self._hosts.courier.carry(parcels, self.path, self.path)

    def _parcels(self, wanted: list[list[str]]) -> list[Parcel]:
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
