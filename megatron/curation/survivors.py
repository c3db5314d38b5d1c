"""Which documents stay: components of documents that share a key, and the survivor of each."""

import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from .recipe import Stage
from .stages import STAGES


def components(documents: int, bands: Iterable[np.ndarray]) -> np.ndarray:
    """The smallest document of each document's component, int64 [documents].

    Args:
        bands: of each band, the keys uint64 [documents, 2] of all documents. Rows of zeros are no keys.
    """
    parent = np.arange(documents, dtype=np.int64)
    for keys in bands:
        order = np.lexsort((np.arange(documents), keys[:, 1], keys[:, 0]))
        ordered = keys[order]
        same = (ordered[1:] == ordered[:-1]).all(axis=1) & ordered[1:].any(axis=1)
        _join(parent, order[1:][same], order[:-1][same])
    return _roots(parent, np.arange(documents))


def _roots(parent: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    found = parent[nodes]
    while (parent[found] != found).any():
        found = parent[found]
    return found


def _join(parent: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Unite the components of pairs, all pairs at once: the larger root points to the smaller, until all agree."""
    while True:
        first, second = _roots(parent, one), _roots(parent, other)
        apart = first != second
        if not apart.any():
            return
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        np.minimum.at(parent, high, low)


def survivors(component: np.ndarray, priority: np.ndarray) -> np.ndarray:
    """For each document the one that is kept of its component: of the smallest priority, then the first. int64.

    Args:
        component: as `components` gives it.
        priority: of each document's source, int64.
    """
    order = np.lexsort((np.arange(len(component)), priority, component))
    first = np.r_[True, component[order][1:] != component[order][:-1]] if len(order) else np.empty(0, bool)
    kept = np.empty(len(component), np.int64)
    kept[component[order[first]]] = order[first]
    return kept[component]


class KeyTable:
    """The keys of a task's documents, in their order, as a .npy file.

    Of whole documents: uint64 [documents, bands, 2], with zeros for a document without keys. Of lines: uint64 [lines,
    2], the document's row times 2^32 plus the line's number, and the line's key. Lines without a key are not stored."""

    def __init__(self, stage: Stage) -> None:
        kind = STAGES[stage.name]
        self._only, self._rows = stage.only, 0
        self._keys = kind.keys(stage.options) if kind.keys else None
        self._parts = kind.parts(stage.options) if kind.parts else None
        self._found: list[np.ndarray | None] = []

    def add(self, document: Any) -> None:
        asked = not self._only or document.metadata["source"] in self._only
        if self._keys:
            self._found.append(self._keys(document) if asked else None)
        elif self._parts and asked:
            keys = self._parts(document)
            lines = np.flatnonzero(keys).astype(np.uint64)
            self._found.append(np.stack([lines + np.uint64(self._rows << 32), keys[keys > 0]], axis=1))
        self._rows += 1

    def file(self) -> bytes:
        if self._parts:
            table = np.concatenate([np.empty((0, 2), "<u8"), *(each for each in self._found if each is not None)])
        else:
            bands = next((len(each) for each in self._found if each is not None), 0)
            table = np.zeros((len(self._found), bands, 2), "<u8")
            for row, each in enumerate(self._found):
                if each is not None:
                    table[row] = each
        file = io.BytesIO()
        np.save(file, table.astype("<u8", copy=False))
        return file.getvalue()


def duplicates(tables: list[np.ndarray], ranks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents that are duplicates of others.

    Args:
        tables: of each task, the keys of its documents.
        ranks: the priority of each.

    Returns:
        int64 [tasks + 1], the number of documents before each task. The duplicates, ascending. For each document the
        one that is kept of its group.
    """
    sizes = [len(each) for each in tables]
    starts, bands = np.cumsum([0, *sizes]), max((each.shape[1] for each in tables), default=0)

    def band(number: int) -> np.ndarray:
        return np.concatenate([
            each[:, number] if each.shape[1] else np.zeros((len(each), 2), "<u8") for each in tables
        ])

    component = components(sum(sizes), map(band, range(bands)))
    kept = survivors(component, np.concatenate(ranks) if ranks else np.empty(0, np.int64))
    return starts, np.flatnonzero(kept != np.arange(len(kept))), kept


def repeated_lines(tables: list[np.ndarray], ranks: list[np.ndarray]) -> list[list[list]]:
    """For each task the rows of documents with lines that stand elsewhere too, and the numbers of these lines.

    One of the lines with a key stays: of the smallest priority, and there the first."""
    keys = np.concatenate([each[:, 1] for each in tables]) if tables else np.empty(0, np.uint64)
    order = np.lexsort((np.arange(len(keys)), np.concatenate(ranks) if ranks else keys, keys))
    again = np.zeros(len(keys), bool)
    again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
    found, first = [], 0
    for table in tables:
        rows: dict[int, list[int]] = {}
        for place in table[again[first : first + len(table)], 0].tolist():
            rows.setdefault(place >> 32, []).append(place & 0xFFFFFFFF)
        found.append([[row, lines] for row, lines in rows.items()])
        first += len(table)
    return found
