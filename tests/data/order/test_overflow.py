"""GPT-NeoX's pack_until_overflow against a version written document by document."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.order.overflow import OverflowOrder
from megatron.data.plan_builder import build_plan
from tests.data.make import configuration, write_documents
from tests.data.reference import pack_until_overflow

SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 21]), min_size=2, max_size=25).filter(lambda s: sum(s) > 3)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, length=st.integers(1, 12), seed=st.integers(0, 99), samples=st.integers(3, 40), drop=st.booleans())
def test_samples_are_gpt_neoxs(tmp_path_factory, sizes, length, seed, samples, drop):
    documents = [[1 + 30 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    folder = tmp_path_factory.mktemp("overflow")
    file = write_documents(folder / "a", documents)
    given = {"samples": samples, "drop_long": drop, "cache": folder / "c"}
    if not sum(size for size in sizes if not drop or size <= length + 1):
        with pytest.raises(DataError, match="no document"):
            OverflowOrder(file, 0, len(sizes), length, seed, **given)
        return
    order = OverflowOrder(file, 0, len(sizes), length, seed, **given)
    assert order.length == samples - 1
    if order.pieces[0] != samples - 1:  # GPT-NeoX calls itself without end there
        expected = pack_until_overflow(documents, None, samples, length, seed, not drop)
        for sample, (tokens, _) in enumerate(expected):
            found = [token for span in order.spans(sample) for token in file.read(*span).tolist()]
            # an empty document has no first token (GPT-NeoX reads past its end)
            assert found + [0] * (length + 1 - len(found)) == tokens
    below = 2 * order.length + 3
    for document in range(0, len(sizes), 5):
        seen = [sample for sample in range(below) if any(span.document == document for span in order.spans(sample))]
        assert list(order.find(document, below)) == seen


def test_a_run_reads_them(tmp_path):
    """Two blended files of a run, one with labels: tokens, what is filled up, and which labels count."""
    random = np.random.default_rng(3)
    documents = [[random.integers(1, 99, size).tolist() for size in random.integers(1, 90, 40)] for _ in range(2)]
    labels = [[-100 if random.random() < 0.4 else token for token in document] for document in documents[1]]
    labels[7] = [-100] * len(labels[7])
    write_documents(tmp_path / "a", documents[0])
    write_documents(tmp_path / "b", documents[1])
    write_documents(tmp_path / "l", labels, np.int32)
    config = configuration({
        "train": [{"path": str(tmp_path / "a")}, {"path": str(tmp_path / "b"), "labels": str(tmp_path / "l")}],
        "packing": "until_overflow",
        "drop_long": True,
    })
    plan = build_plan(config)
    asked = int(np.ceil(40 * 8 * 0.5 * 1.005))
    expected = [
        pack_until_overflow(documents[0], None, asked, 64, config.data.seed, False),
        pack_until_overflow(documents[1], labels, asked, 64, config.data.seed, False),
    ]
    for number in range(64):
        sample, (tokens, counted) = plan.sample(number), expected[number % 2][number // 2]
        assert sample.tokens.tolist() == tokens
        weights = np.ones(64) if sample.weights is None else sample.weights
        assert (weights > 0).tolist() == counted[1:]
    assert plan.masked and "documents skipped" in plan.uses()[1].order
    padded = [number for number in range(0, 64, 2) if (plan.sample(number).tokens == 0).any()]
    assert padded and all(plan.sample(number).weights is None for number in padded)  # they count, as in GPT-NeoX


def test_the_whole_of_a_validation_set(tmp_path):
    documents = [[5] * size for size in (30, 40, 10, 64, 66)]
    write_documents(tmp_path / "a", documents)
    data = {"train": str(tmp_path / "a"), "validation": {"v": str(tmp_path / "a")}, "packing": "until_overflow"}
    plan = build_plan(
        configuration(data, evaluation={"every": 10, "batches": 0}, training={"global_batch_size": 4}), "validation"
    )
    read = sorted(
        span.document for number in range(plan.steps * 4) for span in plan.sample(number).spans if span.length > 1
    )
    assert read == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "data, key",
    [({"packing": "until_overflow", "order": "stream"}, "data.packing"), ({"drop_long": True}, "data.drop_long")],
)
def test_it_belongs_to_its_order(data, key):
    from megatron.config import ConfigError

    with pytest.raises(ConfigError, match=key):
        configuration({"train": "x", **data})
