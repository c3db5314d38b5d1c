"""One level: a folder on each host with the files of the host's ranks.

A host's part is a checkpoint like any other, with an index and a manifest of its own files. Its meta data say how many
files all hosts have. With neighbours a host also has the files of the hosts before it."""

import json
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..format.durable import MANIFEST, META, leftover_name, leftover_of, move, number_of, remove, step_name, write_file
from ..format.errors import CheckpointError, StoreRefuses, describe_error, disk_refuses, understanding
from ..format.fragment import Fragment
from ..format.manifest import Meta, manifest_of, open_index, part_of, read_manifest, write_merged
from ..format.rankfile import FileRecord, file_name, host_values, tables_of, write_rank_file
from ..save.store import Store
from .hosts import Hosts, Parcel, private

NOTES, NOTE_BYTES = "notes", 256  # padded with spaces, so that receivers know the size
KEY = "level"  # in `Meta.extra`: the save of a part, and its number of files


@dataclass(frozen=True)
class HostPart:
    """A host's part of a save."""

    step: int
    save: str  # identifies the save among saves of the step
    total: int  # files of all hosts
    writers: tuple[int, ...]  # ranks whose files are here, not verified yet
    branch: int  # how often the run had gone back before


class Level:
    """A level on all hosts, whose ranks call every method together.

    Args:
        folder: on this host.
        keep: number of saves that stay.
        neighbours: number of following hosts that get copies of this host's files.
    """

    def __init__(self, name: str, folder: Path, keep: int, neighbours: int, hosts: Hosts) -> None:
        self.name, self.folder, self.keep = name, folder, keep
        self._neighbours, self._hosts, self._communicator = neighbours, hosts, hosts.talk

    # ---- writing

    def save(self, step: int, fragments: Iterable[Fragment], meta: Meta, branch: int = 0) -> None:
        """Write a step without fsync. Checksums detect losses of a crashed host.

        Args:
            branch: how often the run has gone back.

        Raises:
            StoreRefuses: on every rank, if a disk or memory is full or refuses.
            CheckpointError: on every rank, if it could not be written for another reason.
        """
        save, ledger = self._communicator.broadcast([uuid.uuid4().hex[:12], meta.ledger])
        path = self.folder / step_name(step)
        draft = leftover_name(path, "tmp", save)
        size = 0

        def write() -> None:
            nonlocal size
            private(self.folder.parent)  # it may have been deleted, or its disk is back
            size = _write(draft, self._hosts.rank, list(fragments))

        self._together(draft, write)
        sizes = self._communicator.gather(size)
        facts = {"save": save, "files": sum(map(bool, sizes)), "branch": branch}
        meta = replace(meta, ledger=ledger, extra={**meta.extra, KEY: facts})
        parcels = self._parcels(sizes)
        self._together(draft, lambda: self._carry(draft, parcels))
        self._together(draft, lambda: self._commit(draft, sizes, parcels, meta))
        self._together(draft, lambda: self._take_name(draft, path))
        self._together(draft, lambda: self._retain(step), "it was saved, but others could not be deleted")

    def _together(self, draft: Path, work: Callable[[], None], result: str = "it was not saved") -> None:
        """Work on every rank. Any rank's error deletes the draft, and is raised on all."""
        failure: Exception | None = None
        try:
            work()
        except Exception as error:  # the other ranks wait for the report
            failure = error
        refused = disk_refuses(failure)
        failed, otherwise = self._communicator.any_rank([failure is not None, failure is not None and not refused])
        if not failed:
            return
        told = self._communicator.gather(failure and describe_error(failure))
        if self._hosts.leads:
            shutil.rmtree(draft, ignore_errors=True)
        subject = f"{self.name}: {step_name(number_of(Path(draft.name.partition('.')[0])))}"
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        raise (CheckpointError if otherwise else StoreRefuses)(subject, [result, *problems]) from failure

    def _carry(self, draft: Path, parcels: list[Parcel]) -> None:
        courier = self._hosts.courier
        for problem in courier.carry(parcels, draft, draft).values() if courier is not None else ():
            raise problem

    def _commit(self, draft: Path, sizes: list[int], parcels: list[Parcel], meta: Meta) -> None:
        if not self._hosts.leads:
            return
        mine = self._hosts.members[self._hosts.own]
        notes = [note_name(rank) for rank in mine if sizes[rank]]
        notes += [parcel.name for parcel in parcels if parcel.receiver in mine and parcel.name.startswith(NOTES)]
        if not notes:
            shutil.rmtree(draft, ignore_errors=True)
            return
        here = [_noted(draft / name) for name in notes]
        index, content = write_merged(draft, tables_of(draft, here), here, whole=False), meta.to_bytes()
        shutil.rmtree(draft / NOTES)
        write_file(draft / META, content, wait=False)
        write_file(draft / MANIFEST, manifest_of(index, content), wait=False)

    def _parcels(self, sizes: list[int]) -> list[Parcel]:
        members, found = self._hosts.members, []
        for distance in range(1, self._neighbours + 1):
            for number, ranks in enumerate(members):
                there = members[(number + distance) % len(members)]
                for place, rank in enumerate(ranks):
                    to = there[place % len(there)]
                    if sizes[rank]:
                        found.append(Parcel(file_name(rank), sizes[rank], rank, to))
                        found.append(Parcel(note_name(rank), NOTE_BYTES, rank, to))
        return found

    def _take_name(self, draft: Path, path: Path) -> None:
        if self._hosts.leads and draft.exists():
            if path.exists():  # of another branch, or of a start that died early
                remove(path, uuid.uuid4().hex[:12])
            move(draft, path)

    def _retain(self, step: int) -> None:
        """Delete all but the newest saves. Later saves than `step` belong to a branch that the run has left."""
        paths = Store(self.folder).paths() if self._hosts.leads else []
        own = [path for path in paths if number_of(path) <= step]
        for path in [*paths[len(own) :], *own[: -self.keep]]:
            remove(path, uuid.uuid4().hex[:12])

    # ---- what is there

    def parts(self) -> list[HostPart]:
        """This host's parts, by their manifests. Unreadable ones are skipped."""
        found: list[HostPart] = []
        try:
            paths = Store(self.folder).paths()
        except OSError:
            return found
        for path in paths:
            try:
                _, records = open_index(path, read_manifest(path), None)
                meta = Meta.from_bytes(part_of(path, META).read_bytes(), path)
                facts = meta.extra[KEY]
                writers = tuple(record.rank for record in records)
                branch = max(int(facts.get("branch", 0)), 0)
                found.append(HostPart(meta.step, str(facts["save"]), int(facts["files"]), writers, branch))
            except (CheckpointError, OSError, KeyError, TypeError, ValueError):
                continue
        return found

    def clean(self) -> None:
        """Delete leftovers of killed starts on this host."""
        try:
            found = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        except OSError:  # a disk that is gone
            return
        for path in found:
            if leftover_of(path) is not None:
                shutil.rmtree(path, ignore_errors=True)

    def drop(self, after: int) -> tuple[list[str], str]:
        """Delete this host's saves of later steps. Returns their names, and the disk's error if it refuses."""
        gone: list[str] = []
        try:
            for path in Store(self.folder).paths():
                if number_of(path) > after:
                    remove(path, uuid.uuid4().hex[:12])
                    gone.append(path.name)
        except OSError as error:
            return gone, str(error)
        return gone, ""


def _noted(path: Path) -> FileRecord:
    with understanding(path):
        return FileRecord.from_dict(json.loads(path.read_bytes()))


def note_name(rank: int) -> str:
    """File with a rank's record, until its host and the following ones have made their parts."""
    return f"{NOTES}/rank_{rank:05d}.json"


def _write(draft: Path, rank: int, fragments: list[Fragment]) -> int:
    """Returns the bytes of the rank's file, 0 without one."""
    draft.mkdir(parents=True, exist_ok=True)
    items = [(fragment.spec, fragment.data.dtype) for fragment in fragments]
    record = write_rank_file(draft, rank, items, host_values([fragment.data for fragment in fragments]), wait=False)
    if record is None:
        return 0
    (draft / NOTES).mkdir(exist_ok=True)
    write_file(draft / note_name(rank), json.dumps(asdict(record)).encode().ljust(NOTE_BYTES), wait=False)
    return record.size
