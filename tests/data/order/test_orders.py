"""Keyed permutations, the stream and sequential orders, and best-fit packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.order.order import Lookup, Permutation, SequentialOrder, StreamOrder
from megatron.data.order.packing import PackedOrder, best_fit
from tests.data.make import write_documents, write_sizes
from tests.data.reference import best_fit as plain_best_fit


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 600), seed=st.integers(0, 2**40))
def test_a_permutation_forwards_backwards_and_in_bulk(size, seed):
    permutation = Permutation(size, seed, "x")
    images = [permutation(index) for index in range(size)]
    assert sorted(images) == list(range(size))
    assert [permutation.inverse(image) for image in images] == list(range(size))
    assert permutation.many(np.arange(size)).tolist() == images


def test_a_permutation_looks_random():
    """Displacements, fixed points and neighbours of 100 000 indices are as for a uniform permutation."""
    size = 100_000
    images = Permutation(size, 7, "x").many(np.arange(size))
    correlation = np.corrcoef(np.arange(size), images)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)
    assert (images == np.arange(size)).sum() < 10
    assert abs((np.diff(images) > 0).mean() - 0.5) < 5 / np.sqrt(size)
    counts = np.histogram2d(np.arange(size), images, bins=20)[0]
    assert ((counts - size / 400) ** 2 / (size / 400)).sum() < 400 + 6 * np.sqrt(800)


def test_permutations_of_other_keys_differ():
    first, other = (Permutation(1000, 1, "x", epoch).many(np.arange(1000)) for epoch in (0, 1))
    assert (first == other).sum() < 15
    assert Permutation(2**45, 1, "x").inverse(Permutation(2**45, 1, "x")(123456789012)) == 123456789012


def text(file, order, sample):
    return np.concatenate([file.read(*span) for span in order.spans(sample)]).tolist()


sizes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 21]), min_size=2, max_size=30).filter(lambda s: sum(s) > 12)


@settings(max_examples=60, deadline=None)
@given(sizes=sizes, length=st.integers(1, 9), data=st.data())
def test_sequential_and_stream(tmp_path_factory, sizes, length, data):
    documents = [[100 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    file = write_documents(tmp_path_factory.mktemp("seq") / "a", documents)
    first = data.draw(st.integers(0, len(sizes) - 1))
    flat = [token for document in documents[first:] for token in document]
    if len(flat) <= length:
        with pytest.raises(DataError):
            SequentialOrder(file, first, len(sizes), length)
        return
    rows = set(sizes[first:]) == {length + 1}
    stride = length + 1 if rows else length
    pieces = [flat[begin : begin + length + 1] for begin in range(0, len(flat) - length, stride)]
    sequential = SequentialOrder(file, first, len(sizes), length)
    stream = StreamOrder(file, first, len(sizes), length, 5)
    assert sequential.length == stream.length == len(pieces)
    assert [text(file, sequential, sample) for sample in range(len(pieces))] == pieces
    for epoch in range(2):
        samples = [text(file, stream, epoch * len(pieces) + sample) for sample in range(len(pieces))]
        assert sorted(samples) == sorted(pieces)
    below = 2 * len(pieces) + 1
    for order in (sequential, stream):
        for document in (first, len(sizes) - 1):
            seen = [sample for sample in range(below) if any(span.document == document for span in order.spans(sample))]
            assert list(order.find(document, below)) == seen


def test_preshuffled_rows(tmp_path):
    """Documents that are samples already are read as they are, without sharing tokens."""
    file = write_documents(tmp_path / "rows", [[10 * row + place for place in range(5)] for row in range(4)])
    order = SequentialOrder(file, 0, 4, 4)
    assert order.length == 4
    assert [text(file, order, sample) for sample in range(5)] == [
        [0, 1, 2, 3, 4],
        [10, 11, 12, 13, 14],
        [20, 21, 22, 23, 24],
        [30, 31, 32, 33, 34],
        [0, 1, 2, 3, 4],
    ]


@settings(max_examples=120, deadline=None)
@given(lengths=st.lists(st.integers(1, 17), min_size=1, max_size=120))
def test_best_fit_is_best_fit(lengths):
    bins = best_fit(np.array(lengths, np.int32), 17)
    filled = np.bincount(bins, weights=lengths)
    assert filled.max() <= 17 and filled.min() >= 1
    assert len(filled) == plain_best_fit(lengths, 17)


@settings(max_examples=40, deadline=None)
@given(sizes=sizes, length=st.integers(2, 9), shuffled=st.booleans())
def test_packing_loses_and_cuts_nothing(tmp_path_factory, sizes, length, shuffled):
    documents = [[100 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    file = write_documents(tmp_path_factory.mktemp("pack") / "a", documents)
    order = PackedOrder(file, 0, len(sizes), length, 3 if shuffled else None)
    for epoch in range(2):
        spans = [span for sample in range(order.length) for span in order.spans(epoch * order.length + sample)]
        tokens = [token for span in spans for token in file.read(*span).tolist()]
        assert sorted(tokens) == sorted(token for document in documents for token in document)
        whole = {span.document for span in spans if span.length == sizes[span.document]}
        assert whole == {number for number, size in enumerate(sizes) if 0 < size <= length + 1}
    below = order.length + order.length // 2
    for document in range(0, len(sizes), 3):
        seen = [sample for sample in range(below) if any(span.document == document for span in order.spans(sample))]
        assert list(order.find(document, below)) == seen


def test_packing_fills_well(tmp_path):
    file = write_sizes(tmp_path / "a", np.random.default_rng(0).integers(1, 400, 3000).tolist())
    assert PackedOrder(file, 0, 3000, 511, 1).filled > 0.99


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(0, 9), max_size=30), wanted=st.sets(st.integers(-1, 11), max_size=4))
def test_places_by_scanning_and_by_an_index(values, wanted):
    lookup, expected = Lookup(np.array(values, np.int32)), [k for k, value in enumerate(values) if value in wanted]
    assert [lookup.places(wanted).tolist() for _ in range(Lookup.SCANS + 2)] == [expected] * (Lookup.SCANS + 2)


def test_unpacked_samples_have_one_document(tmp_path):
    """Long documents are cut into samples of their own, or skipped. Empty ones are none."""
    documents = [[1, 2, 3], [], [4], [5] * 9, [6, 7]]
    file = write_documents(tmp_path / "a", documents)

    def all_of(**options: bool) -> list[list[int]]:
        order = PackedOrder(file, 0, len(documents), 3, None, apart=True, cache=tmp_path / "cache", **options)
        return [text(file, order, sample) for sample in range(order.length)]

    assert all_of() == [[1, 2, 3], [4], [5] * 4, [5] * 4, [5], [6, 7]]
    assert all_of(drop_long=True) == [[1, 2, 3], [4], [6, 7]]
    packed = PackedOrder(file, 0, len(documents), 3, None, cache=tmp_path / "cache")
    assert packed.length < 6
    drawn = PackedOrder(file, 0, len(documents), 3, 5, apart=True)
    assert sorted(text(file, drawn, sample) for sample in range(6)) == sorted(all_of())
