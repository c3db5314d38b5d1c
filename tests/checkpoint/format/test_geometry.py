"""Rectangles and pieces against arrays that are cut element by element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.format.fragment import FragmentSpec, common_width, overlap, rectangles
from megatron.parallel.layout.shard import LogicalTensor, Role, Shard
from tests.checkpoint.brute import local_shard


@st.composite
def tensors(draw):
    """Logical tensors of up to three dimensions, cut along any of them, in parts and units, or not cut."""
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 6)) for _ in range(rank)]
    dim = draw(st.integers(-1, rank - 1))
    if dim < 0:
        return LogicalTensor("t", tuple(shape), Role.HIDDEN)
    unit = draw(st.integers(1, 3))
    parts = tuple(unit * n for n in draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    shape[dim] = sum(parts)
    return LogicalTensor("t", tuple(shape), Role.HIDDEN, Shard(dim, parts if len(parts) > 1 else None, unit))


@st.composite
def ranges(draw, tensor):
    """Any range of any shard of a tensor."""
    ranks = draw(st.integers(1, 8))
    rank = draw(st.integers(0, ranks - 1))
    size = FragmentSpec.whole(tensor, "weight", rank, ranks).length
    start = draw(st.integers(0, size))
    return FragmentSpec(tensor, "weight", rank, ranks, start, draw(st.integers(0, size - start)))


def numbers(tensor: LogicalTensor) -> np.ndarray:
    return np.arange(int(np.prod(tensor.shape))).reshape(tensor.shape)


def values(spec: FragmentSpec) -> np.ndarray:
    """Logical flat indices of a fragment's elements."""
    return local_shard(numbers(spec.tensor), spec.tensor, spec.tensor_rank, spec.tensor_ranks)[spec.start : spec.stop]


def copied(pieces, source: np.ndarray, size: int) -> np.ndarray:
    """Values that the pieces bring over, -1 where none came. Fails if a place is written twice."""
    target = np.full(size, -1)
    for piece in pieces:
        for run in range(piece.count):
            begin, place = piece.source + run * piece.source_stride, piece.target + run * piece.target_stride
            assert begin >= 0 and begin + piece.length <= len(source) and place >= 0
            assert (target[place : place + piece.length] == -1).all()
            target[place : place + piece.length] = source[begin : begin + piece.length]
    return target


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_rectangles_cover_each_element_once(data):
    spec = data.draw(ranges(data.draw(tensors())))
    first = spec.tensor.shard.dim if spec.tensor.shard else 0
    width = int(np.prod(spec.tensor.shape[first:]))
    found = np.full(spec.length, -1)
    for rectangle in rectangles(spec):
        for row in range(rectangle.rows):
            for column in range(rectangle.columns):
                place = rectangle.local + row * rectangle.stride + column
                assert found[place] == -1
                found[place] = (rectangle.row + row) * width + rectangle.column + column
    np.testing.assert_array_equal(found, values(spec))


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_overlap_copies_what_both_have(data):
    tensor = data.draw(tensors())
    source, target = data.draw(ranges(tensor)), data.draw(ranges(tensor))
    pieces = overlap(rectangles(source), rectangles(target))
    expected = np.where(np.isin(values(target), values(source)), values(target), -1)
    np.testing.assert_array_equal(copied(pieces, values(source), target.length), expected)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_overlap_of_different_cuts_of_one_tensor(data):
    """A checkpoint whose writer cut the tensor along another dimension, or not at all."""
    shape = tuple(data.draw(st.integers(1, 7)) for _ in range(3))
    cut = [data.draw(st.sampled_from([None, Shard(0), Shard(1), Shard(2)])) for _ in range(2)]
    one = LogicalTensor("t", shape, Role.HIDDEN, cut[0])
    source, target = data.draw(ranges(one)), data.draw(ranges(replace(one, shard=cut[1])))
    width = common_width(source.tensor, target.tensor)
    pieces = overlap(rectangles(source, width), rectangles(target, width))
    expected = np.where(np.isin(values(target), values(source)), values(target), -1)
    np.testing.assert_array_equal(copied(pieces, values(source), target.length), expected)


def test_a_large_matrix_cut_along_columns_is_a_handful_of_rectangles():
    """However many rows there are: the plan of a large model is not millions of objects."""
    gate_up = LogicalTensor("t", (12288, 2 * 49152), Role.HIDDEN, Shard(1, (49152, 49152), 128))
    size = FragmentSpec.whole(gate_up, "weight", 3, 8).length
    cut = FragmentSpec(gate_up, "weight", 3, 8, 12345, size - 54321)
    whole = FragmentSpec.whole(gate_up, "weight")
    assert len(rectangles(cut)) <= 6
    pieces = overlap(rectangles(cut), rectangles(whole))
    assert len(pieces) <= 6 and sum(piece.count * piece.length for piece in pieces) == cut.length


def test_equal_cuts_are_one_run():
    matrix = LogicalTensor("t", (64, 32), Role.HIDDEN, Shard(1))
    spec = FragmentSpec(matrix, "weight", 1, 4, 0, 512)
    (piece,) = overlap(rectangles(spec), rectangles(spec))
    assert (piece.count, piece.length, piece.source, piece.target) == (1, 512, 0, 0)
