"""The window order: against plain lists, and that a longer file begins with the same samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.order import Permutation, SequentialOrder, WindowOrder
from tests.data.make import write_sizes

LENGTH, SEED = 5, 7


def plain(pieces: int, window: int, epochs: int) -> list[int]:
    """The piece of each sample: windows one after the other, each shuffled as a list, then whole epochs."""
    found: list[int] = []
    begin, size = 0, min(64, window)
    while begin < pieces:
        part = list(range(begin, min(begin + size, pieces)))
        shuffled = Permutation(len(part), SEED, "window", begin)
        found += [part[shuffled(index)] for index in range(len(part))]
        begin += size
        size = size * 2 if size * 2 <= window else window
    for epoch in range(1, epochs):
        shuffled = Permutation(pieces, SEED, "stream", epoch)
        found += [shuffled(index) for index in range(pieces)]
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 900), st.integers(1, 400))
def test_samples_are_those_of_plain_lists(tmp_path_factory, pieces, window):
    folder = tmp_path_factory.mktemp("window")
    file = write_sizes(folder / "a", [pieces * LENGTH + 1])
    order = WindowOrder(file, 0, 1, LENGTH, SEED, window)
    expected = plain(pieces, window, 3)
    assert order.length == pieces
    assert [order.place(sample) for sample in range(3 * pieces)] == expected
    assert sorted(expected[:pieces]) == list(range(pieces))
    for place in {0, pieces // 2, pieces - 1}:
        assert [order.sample_at(place, epoch) for epoch in range(3)] == [
            expected.index(place, epoch * pieces) for epoch in range(3)
        ]


@pytest.mark.parametrize("sizes", [[6] * 400, [13, 1, 40, 6] * 60])
def test_a_longer_file_begins_with_the_same_samples(tmp_path, sizes):
    """As far as the windows of the shorter one go. Files of rows keep their rows."""
    short, long = write_sizes(tmp_path / "a", sizes), write_sizes(tmp_path / "b", sizes * 2)
    orders = [WindowOrder(file, 0, len(file), LENGTH, SEED, 128) for file in (short, long)]
    complete = max(begin for begin in (64, 192, 320, 448, 576, 704, 832) if begin <= orders[0].length)
    assert orders[0].rows == (sizes[0] == sizes[1])
    for sample in range(complete):
        assert orders[0].spans(sample) == orders[1].spans(sample)
    whole = SequentialOrder(short, 0, len(short), LENGTH)
    assert sorted(map(orders[0].spans, range(whole.length))) == sorted(map(whole.spans, range(whole.length)))


def test_documents_are_found_where_they_are_read(tmp_path):
    file = write_sizes(tmp_path / "a", [13, 1, 40, 6, 90, 2, 7] * 20)
    order = WindowOrder(file, 0, len(file), LENGTH, SEED, 100)
    below = 2 * order.length + 9
    for document in np.random.default_rng(0).integers(0, len(file), 12).tolist():
        read = [n for n in range(below) if any(span.document == document for span in order.spans(n))]
        assert list(order.find(document, below)) == read
