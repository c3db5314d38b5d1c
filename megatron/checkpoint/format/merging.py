"""The rows of all ranks' files as one sorted table, in memory of constant size.

Rows are sorted in batches. With more than one batch, the sorted batches wait in an unnamed temporary file. The table is
then merged part by part, a few groups at a time.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from .durable import name_errors, read_fully, write_fully
from .errors import understanding
from .index import groups_of
from .table import ROW, Vocabulary

BATCH = 1 << 16  # rows that are sorted at once: 3.4 MB, and a few times that while sorting
VOCABULARIES = 64  # parsed ones that are cached. Neighbouring ranks share a few


@dataclass
class _Batch:
    """Sorted rows.

    Attributes:
        keys: of each group in the batch, increasing.
        bounds: first row of each group, then the number of rows.
        groups: as of an index with only these rows.
        rows: None if they are in the file ...
        place: ... from this byte on.
    """

    keys: np.ndarray
    bounds: np.ndarray
    groups: np.ndarray
    rows: np.ndarray | None
    place: int = 0


class Merged:
    """The merged rows of several files. A context manager, which frees the temporary disk space.

    Attributes:
        vocabulary: of all files.
        groups: array of `index.GROUP`, sorted.
    """

    def __init__(
        self, pieces: Iterable[tuple[str, np.ndarray]], folder: Path, name: Callable[[int], str] = "file {}".format
    ) -> None:
        """Args:
            pieces: (vocabulary as JSON, rows) of each file, by file number. Read one at a time.
            folder: folder of the temporary file.
            name: name of the file with a given number, for messages.

        Raises:
            CheckpointError: a file's vocabulary is damaged or contradicts the files before it.
            OSError: the disk is full, ...
        """
        self.vocabulary = Vocabulary()
        self._folder, self._written = folder, 0
        self._name = name
        self._file: IO[bytes] | None = None
        self._numbers = lru_cache(VOCABULARIES)(self._take)
        self._batches: list[_Batch] = []
        try:
            self._sort(pieces)
        except BaseException:
            self._close()
            raise
        keys, where, group = np.unique(
            np.concatenate([batch.keys for batch in self._batches]), return_index=True, return_inverse=True
        )
        sizes = np.bincount(group, np.concatenate([np.diff(batch.bounds) for batch in self._batches])).astype(np.int64)
        self._keys, self._bounds = keys, np.append(0, np.cumsum(sizes))
        self.groups = np.concatenate([batch.groups for batch in self._batches])[where]
        self.groups["first"] = self._bounds[:-1]

    def __len__(self) -> int:
        """Rows."""
        return int(self._bounds[-1])

    def __enter__(self) -> Merged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def parts(self) -> Iterator[np.ndarray]:
        """All rows in order. A group is never split over two parts."""
        begin = 0
        while begin < len(self._keys):
            fitting = np.searchsorted(self._bounds, self._bounds[begin] + BATCH, side="right") - 1
            end = max(begin + 1, int(fitting))
            found = [self._rows(batch, self._keys[begin], self._keys[end - 1]) for batch in self._batches]
            yield found[0] if len(found) == 1 else _in_order(np.concatenate(found))
            begin = end

    def _sort(self, pieces: Iterable[tuple[str, np.ndarray]]) -> None:
        waiting, count = list[np.ndarray](), 0
        for number, (text, rows) in enumerate(pieces):
            if waiting and count + len(rows) > BATCH:
                self._batches.append(_batch(waiting))
                self._put_away(self._batches[-1])
                waiting, count = [], 0
            renamed = self._renamed(number, text, rows)
            waiting.append(renamed)
            count += len(rows)
        self._batches.append(_batch(waiting))

    def _renamed(self, number: int, text: str, rows: np.ndarray) -> np.ndarray:
        renamed = rows.copy()
        with understanding(self._name(number)):
            tensors, states = self._numbers(text)
            renamed["tensor"], renamed["state"] = tensors[rows["tensor"]], states[rows["state"]]
        renamed["file"] = number
        return renamed

    def _take(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of a file's tensors and states in the common vocabulary."""
        local = Vocabulary.from_json(text)
        return (
            np.array([self.vocabulary.tensor(tensor) for tensor in local.tensors], dtype=np.int32),
            np.array([self.vocabulary.state(state) for state in local.states], dtype=np.int16),
        )

    def _put_away(self, batch: _Batch) -> None:
        assert batch.rows is not None
        with name_errors(self._folder):
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            write_fully(self._file.fileno(), batch.rows.view(np.uint8).data)
        batch.rows, batch.place = None, self._written
        self._written += int(batch.bounds[-1]) * ROW.itemsize

    def _rows(self, batch: _Batch, low: np.int64, high: np.int64) -> np.ndarray:
        """A batch's rows of the groups with keys from `low` to `high`."""
        first, last = np.searchsorted(batch.keys, low), np.searchsorted(batch.keys, high, side="right")
        begin, end = int(batch.bounds[first]), int(batch.bounds[last])
        if batch.rows is not None:
            return batch.rows[begin:end]
        assert self._file is not None
        rows = np.empty(end - begin, ROW)
        with name_errors(self._folder):
            content = rows.view(np.uint8).data
            if read_fully(self._file.fileno(), content, batch.place + begin * ROW.itemsize) < len(content):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rows

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def _batch(waiting: list[np.ndarray]) -> _Batch:
    rows = _in_order(np.concatenate([np.empty(0, ROW), *waiting]))
    groups = groups_of(rows)
    keys = groups["tensor"].astype(np.int64) << 16 | groups["state"]
    return _Batch(keys, np.append(groups["first"], len(rows)), groups, rows)


def _in_order(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort((rows["start"], rows["tensor_rank"], rows["state"], rows["tensor"]))]
