"""Which documents stay: components of documents that share a key, and the survivor of each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


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
