"""GPT-NeoX's sample order against its own arrays, published vectors, and a token-by-token version."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.order.order import split_bounds
from megatron.data.order.pythia import PythiaOrder, build_arrays, epochs_for, narrowed
from megatron.data.token_file import TokenFile
from tests.data.make import write_documents, write_sizes
from tests.data.reference import flat_samples, sample_index
from tests.paths import shared

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
FOLDER = shared("data/golden_pythia")
needs_arrays = pytest.mark.skipif(FOLDER is None, reason="the golden arrays are not here")

TOY = [[100 * document + position for position in range(size)] for document, size in enumerate([5, 3, 8, 2, 7, 4])]


def read(file: TokenFile, order: PythiaOrder, sample: int) -> list[int]:
    return np.concatenate([file.read(*span) for span in order.spans(sample)]).tolist()


def sha(array: np.ndarray) -> list:
    return [array.dtype.name, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()[:16]]


@pytest.mark.parametrize(
    "shares, documents, bounds",
    [
        ([969, 30, 1], 1000, [0, 969, 999, 1000]),
        ([969, 30, 1], 2_877_800, [0, 2788588, 2874922, 2877800]),
        ([949, 50, 1], 17, [0, 16, 17, 17]),
        ([8, 1, 1], 7, [0, 5, 6, 7]),
        ([969, 30, 1], 622, [0, 602, 621, 622]),
        ([1], 5, [0, 5, 5, 5]),
    ],
)
def test_split(shares, documents, bounds):
    assert split_bounds(shares, documents) == bounds


def test_the_generator_is_the_legacy_one():
    random = np.random.RandomState(1234)
    array = np.arange(10**6, dtype=np.int32)
    random.shuffle(array)
    assert array[:5].tolist() == [433572, 254298, 686334, 866486, 649015]
    assert hashlib.sha256(array.astype("<i4").tobytes()).hexdigest().startswith("794a68e5d9e0c4c20aa33c0f2f6c4baa")


@pytest.mark.parametrize("samples", [10, 8])
def test_toy_two_epochs(tmp_path, samples):
    file = write_documents(tmp_path / "toy", TOY)
    order = PythiaOrder(file, 0, 6, 4, 1234, samples=samples)
    assert order.documents.tolist() == [1, 2, 5, 2, 3, 4, 1, 0, 4, 5, 0, 3]
    assert sample_index(order).tolist() == [
        [0, 0],
        [1, 1],
        [1, 5],
        [2, 1],
        [3, 1],
        [3, 5],
        [4, 1],
        [5, 3],
        [6, 0],
        [7, 1],
        [8, 0],
        [8, 4],
        [9, 1],
        [10, 1],
        [11, 0],
    ]
    assert order.pieces.tolist() == [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 6, 10, 13, 12]
    assert order.length == 13
    assert [read(file, order, sample) for sample in range(4)] == [
        [403, 404, 405, 406, 100],
        [404, 405, 406, 500, 501],
        [205, 206, 207, 500, 501],
        [501, 502, 503, 200, 201],
    ]


@pytest.mark.parametrize("samples", [6, 7])
def test_toy_one_epoch(tmp_path, samples):
    file = write_documents(tmp_path / "toy", TOY)
    order = PythiaOrder(file, 0, 6, 4, 1234, samples=samples)
    assert order.documents.tolist() == [2, 1, 5, 0, 4, 3]
    assert sample_index(order).tolist() == [[0, 0], [0, 4], [1, 0], [2, 1], [3, 1], [4, 0], [4, 4], [5, 1]]
    assert order.pieces.tolist() == [5, 0, 3, 4, 2, 6, 1]
    assert order.length == 6
    assert [read(file, order, sample) for sample in range(4)] == [
        [400, 401, 402, 403, 404],
        [200, 201, 202, 203, 204],
        [501, 502, 503, 0, 1],
        [1, 2, 3, 4, 400],
    ]


@pytest.mark.parametrize(
    "case", GOLDEN["orders"], ids=lambda case: f"{case['sizes']}-{case['first']}-{case['samples']}"
)
def test_digests_of_the_original(tmp_path, case):
    file = write_sizes(tmp_path / "sizes", GOLDEN["sizes"][case["sizes"]])
    order = PythiaOrder(file, case["first"], case["last"], 64, 1234, samples=case["samples"], epochs=case["epochs"])
    assert sha(order.documents) == case["doc_idx"]
    assert sha(order.pieces) == case["shuffle_idx"]
    assert sha(sample_index(order)) == case["sample_idx"]
    assert case["length"] in (None, order.length)


@needs_arrays
@pytest.mark.parametrize(
    "name, part, first, last, samples, epochs",
    [
        *(
            (f"split_s1234_{epochs}ep", part, *bounds, samples, None)
            for epochs, wanted in ((1, (300, 10, 2)), (2, (900, 25, 3)), (5, (3100, 100, 9)))
            for part, bounds, samples in zip(("train_", "valid_", "test_"), ((0, 602), (602, 621), (621, 622)), wanted)
        ),
        ("epochs1_s1234", "", 0, 622, None, 1),
    ],
)
def test_arrays_and_samples_of_the_original(tmp_path, name, part, first, last, samples, epochs):
    golden = np.load(FOLDER / f"{name}.npz")
    file = TokenFile(FOLDER / "golden_a_text_document")
    order = PythiaOrder(file, first, last, 64, 1234, samples=samples, epochs=epochs, cache=tmp_path)
    for own, original in (("documents", "doc_idx"), ("pieces", "shuffle_idx")):
        np.testing.assert_array_equal(getattr(order, own), golden[part + original])
        assert getattr(order, own).dtype == golden[part + original].dtype
    np.testing.assert_array_equal(sample_index(order), golden[part + "sample_idx"])
    assert order.length == golden[part + "length"]
    for sample, tokens in enumerate(golden[part + "first"]):
        assert read(file, order, sample) == tokens.tolist()
    for which in ("late", "past"):
        for sample, tokens in zip(golden[f"{part}{which}_index"], golden[part + which]):
            assert read(file, order, int(sample)) == tokens.tolist()


sizes = st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 33]), min_size=1, max_size=40).filter(
    lambda s: sum(s) > 0
)


@settings(max_examples=80, deadline=None)
@given(sizes=sizes, length=st.integers(1, 9), samples=st.integers(2, 60), seed=st.integers(0, 2**32 - 1))
def test_flat_stream(tmp_path_factory, sizes, length, samples, seed):
    documents = [[100 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    file = write_documents(tmp_path_factory.mktemp("flat") / "a", documents)
    order = PythiaOrder(file, 0, len(sizes), length, seed, samples=samples)
    expected, count = flat_samples(documents, length, seed, samples)
    assert order.length == count
    assert [read(file, order, sample) for sample in range(count + 1)] == expected
    assert read(file, order, 2 * count + 1) == expected[(2 * count + 1) % count]
    below = 2 * count + 3
    for document in {0, len(sizes) - 1, len(sizes) // 2}:
        seen = [sample for sample in range(below) if any(span.document == document for span in order.spans(sample))]
        assert list(order.find(document, below)) == seen


@settings(max_examples=200, deadline=None)
@given(samples=st.integers(2, 10**12), tokens=st.integers(1, 10**13), length=st.integers(1, 10**5))
def test_epochs_are_the_fewest(samples, tokens, length):
    epochs = epochs_for(samples, tokens, length)
    assert (epochs * tokens - 1) // length >= samples
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // length < samples


def test_blocks_longer_than_a_chunk(tmp_path, monkeypatch):
    """The cumulated starts do not depend on how many entries are handled together."""
    from megatron.data.order import pythia

    sizes = np.random.default_rng(3).integers(0, 9, 1000).astype(np.int32)
    whole = build_arrays(sizes, 0, 1000, 8, 5, 3)
    monkeypatch.setattr(pythia, "_CHUNK", 4 * pythia.STRIDE)
    parts = build_arrays(sizes, 0, 1000, 8, 5, 3)
    np.testing.assert_array_equal(whole["starts"], parts["starts"])
    cumulated = np.concatenate([[0], np.cumsum(sizes[whole["documents"]])[:-1]])
    np.testing.assert_array_equal(whole["starts"], cumulated[:: pythia.STRIDE])


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("wide", [np.int32, np.int64])
def test_integers_are_narrowed_in_their_own_memory(wide, kind):
    """Over several chunks, whose places overlap, up to the largest value of both types."""
    from megatron.data.order import pythia

    if np.dtype(kind).itemsize > np.dtype(wide).itemsize:
        return
    largest = min(np.iinfo(wide).max, np.iinfo(kind).max)
    values = np.random.default_rng(5).integers(0, largest, 3 * pythia._CHUNK + 5, wide, endpoint=True)
    values[-1] = largest
    expected = values.astype(kind)
    made = narrowed(values, kind)
    assert made.dtype == kind and np.shares_memory(made, values)
    np.testing.assert_array_equal(made, expected)


def test_an_index_that_is_not_aligned_has_the_same_order():
    sizes = np.random.default_rng(4).integers(0, 90, 70_001).astype(np.int32)
    shifted = np.ndarray(len(sizes), np.int32, b"xx" + sizes.tobytes(), 2)
    assert not shifted.flags.aligned
    found, expected = (build_arrays(each, 3, 70_000, 64, 7, 2) for each in (shifted, sizes))
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_too_small(tmp_path):
    empty = write_sizes(tmp_path / "empty", [0, 0])
    with pytest.raises(DataError, match="do not fill one sample"):
        PythiaOrder(empty, 0, 2, 4, 1, samples=3)
    with pytest.raises(DataError, match="do not fill one sample"):
        PythiaOrder(write_sizes(tmp_path / "small", [5]), 0, 1, 8, 1, epochs=1)
    with pytest.raises(DataError, match="32 bits"):
        PythiaOrder(write_sizes(tmp_path / "seed", [50]), 0, 1, 8, 2**32, samples=1)
