"""Index, meta data and manifest (the head) of a checkpoint whose files lie on several hosts.

Each host has the head of its own part. Rank 0 receives them one host after the other, merges them, and sends the result
along a binary tree of hosts. No host holds more than a part of a head in memory. Only each host's first rank takes
part.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..format.communicator import Communicator, all_problems
from ..format.durable import write_file
from ..format.errors import CheckpointError, describe_error
from ..format.index import INDEX_NAME
from ..format.manifest import manifest_of, open_index, part_of, read_manifest, write_merged
from ..format.names import MANIFEST_NAME, META_NAME
from ..format.rankfile import FileRecord
from .hosts import Hosts
from .peer_transfer import Courier, Parcel

HEAD = (INDEX_NAME, META_NAME, MANIFEST_NAME)
INBOX = "head"  # in the folder of the whole, on rank 0's host


class SharedHead:
    """The exchange of heads. Every rank makes one, and calls every method.

    Args:
        root: the folder of the whole checkpoint, the same on all hosts.
        part: the folder of this host's part, None if it has none.
        holders: file -> numbers of the hosts that have it. The first one reports it.
    """

    def __init__(
        self,
        root: Path,
        part: Path | None,
        holders: dict[str, list[int]],
        hosts: Hosts,
        communicator: Communicator,
        courier: Courier | None,
    ) -> None:
        self._root, self._part, self._holders, self._hosts = root, part, holders, hosts
        self._talk, self._courier = communicator, courier
        self._givers = sorted({numbers[0] for numbers in holders.values()})

    def share(self) -> list[str]:
        """Bring the head to all hosts. Returns the problems, on every rank."""
        brought = self._brought()
        problems = self._make(brought) if self._talk.rank == 0 else []
        for _ in brought:  # on rank 0 the remaining ones
            pass
        if self._talk.rank == 0:
            shutil.rmtree(self._root / INBOX, ignore_errors=True)
        sizes = [_size(self._root, name) for name in HEAD]
        problems, sizes = self._talk.broadcast([problems, sizes])
        if not problems and self._courier is not None:
            leads = [ranks[0] for ranks in self._hosts.members]
            parcels = [
                Parcel(name, size, leads[(number - 1) // 2], leads[number])
                for name, size in zip(HEAD, sizes, strict=True)
                for number in range(1, len(leads))
            ]
            failed = self._courier.carry(parcels, self._root, self._root)
            problems = all_problems(self._talk, self._told(failed))
        return list(problems)

    def _make(self, brought: Iterator[tuple[int, Path, list[str]]]) -> list[str]:
        """Merge the parts on rank 0. Returns the problems, since the other ranks wait."""
        records: list[FileRecord] = []
        metas: list[bytes] = []

        def tables() -> Iterator[tuple[str, np.ndarray]]:
            for number, folder, problems in brought:
                if problems:
                    raise CheckpointError(folder, problems)
                metas.append(b"" if metas else part_of(folder, META_NAME).read_bytes())
                index, known = open_index(folder, read_manifest(folder))
                text, rows = index.vocabulary.to_json(), index.rows
                for place, record in enumerate(known):
                    if self._holders.get(record.path, [-1])[0] == number:
                        records.append(record)
                        yield text, rows[rows["file"] == place]

        try:
            index = write_merged(self._root, tables(), records, whole=True)
            write_file(self._root / META_NAME, metas[0], wait=False)
            write_file(self._root / MANIFEST_NAME, manifest_of(index, metas[0]), wait=False)
        except Exception as error:  # the other ranks wait for the report
            return [f"{self._hosts.name}: {describe_error(error)}"]
        return []

    def _brought(self) -> Iterator[tuple[int, Path, list[str]]]:
        """For each host that reports files: (number, folder on rank 0 with its part's head, problems). Collective."""
        sizes = self._talk.gather([_size(self._part, name) for name in HEAD] if self._hosts.leads else [])
        for number in self._givers:
            lead = self._hosts.members[number][0]
            if lead == 0:
                yield number, self._part or self._root, []
            else:
                assert self._courier is not None
                parcels = [Parcel(name, size, lead, 0) for name, size in zip(HEAD, sizes[lead], strict=True)]
                failed = self._courier.carry(parcels, self._part or self._root, self._root / INBOX)
                yield number, self._root / INBOX, self._told(failed)

    def _told(self, failed: dict[str, OSError]) -> list[str]:
        return [f"{self._hosts.name}: {error}" for error in failed.values()]


def _size(folder: Path | None, name: str) -> int:
    """Size of a file. 0 if it cannot be read, so that it is not taken for complete."""
    try:
        return 0 if folder is None else part_of(folder, name).stat().st_size
    except (CheckpointError, OSError):
        return 0
