"""Loss masks, documents and positions, label files, fill-in-the-middle, packing: each written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import ConfigError
from megatron.data.errors import DataError
from megatron.data.hashing import generator
from megatron.data.loader import build_loader
from megatron.data.plan_builder import build_plan
from megatron.data.sample import AssemblyOptions, Infilling, assemble, documents_and_positions, infill
from tests.data.make import configuration, write_documents

EOD = 0
INFILLING = Infilling(1.0, 0.5, 1001, 1002, 1003)


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.uint16)


def test_documents_and_positions_by_hand():
    """Documents end with their end-of-document token. A piece begins a document whether or not one stands before."""
    sample = assemble(
        [array(5, 6, EOD), array(7, EOD, 8, EOD), array(9, 10)], AssemblyOptions(8, eod=EOD, boundaries=True), 0
    )
    documents, positions = documents_and_positions(sample.begins)
    assert sample.tokens.tolist() == [5, 6, EOD, 7, EOD, 8, EOD, 9, 10]
    assert documents.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 0]
    assert sample.weights is None
    two = assemble([array(5, 6), array(7, 8, 9)], AssemblyOptions(4, boundaries=True), 0)
    assert documents_and_positions(two.begins)[0].tolist() == [0, 0, 1, 1]


@settings(max_examples=80, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=3, max_size=40))
def test_documents_and_positions_by_counting(tokens):
    sample = assemble([array(*tokens)], AssemblyOptions(len(tokens) - 1, eod=EOD, boundaries=True), 0)
    documents, positions = documents_and_positions(sample.begins)
    document = position = 0
    for place, token in enumerate(tokens[:-1]):
        assert (documents[place], positions[place]) == (document, position)
        document, position = (document + 1, 0) if token == EOD else (document, position + 1)


def test_masks_by_hand():
    options = AssemblyOptions(5, eod=EOD, mask_eod=True)
    assert assemble([array(5, 6, EOD, 7, 8, EOD)], options, 0).weights.tolist() == [1, 0, 1, 1, 0]
    targets = np.array([True, True, False, True, False, True])
    assert assemble([array(5, 6, 1, 7, 8, 2)], AssemblyOptions(5), 0, targets).weights.tolist() == [1, 0, 1, 0, 1]


def test_room_that_packing_leaves_is_no_target():
    sample = assemble([array(5, 6, EOD), array(7, EOD)], AssemblyOptions(8, eod=EOD, boundaries=True), 0)
    assert sample.tokens.tolist() == [5, 6, EOD, 7, EOD, EOD, EOD, EOD, EOD]
    assert sample.weights.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert documents_and_positions(sample.begins)[0].tolist()[:6] == [0, 0, 0, 1, 1, 2]


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 30), seed=st.integers(0, 10**6), first=st.sampled_from([0.0, 1.0]))
def test_infilling_can_be_undone(length, seed, first):
    """Reading the three parts back gives the document, in both orders."""
    tokens = np.arange(1, length + 1)
    options = Infilling(1.0, first, 1001, 1002, 1003)
    made = infill(tokens, options, generator(seed)).tolist()
    assert len(made) == length + 3 and made[0] == 1001
    if first:
        suffix, rest = made[2 : made.index(1002)], made[made.index(1002) + 1 :]
        assert made[1] == 1003
        body = rest
        assert sorted(body + suffix) == tokens.tolist() and body + suffix == tokens.tolist()
    else:
        prefix, suffix = made[1 : made.index(1003)], made[made.index(1003) + 1 : made.index(1002)]
        assert prefix + made[made.index(1002) + 1 :] + suffix == tokens.tolist()


def test_infilling_is_keyed_and_keeps_ends():
    documents = [array(*range(1, 30), EOD), array(*range(31, 60), EOD), array(*range(61, 66))]
    options = AssemblyOptions(64, seed=3, eod=EOD, boundaries=True, infilling=INFILLING)
    first, again, other = (assemble(documents, options, number) for number in (8, 8, 9))
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    assert len(first.tokens) == 65
    assert (first.tokens[:33] == EOD).sum() == 1 and first.tokens[32] == EOD
    assert np.flatnonzero(first.begins).tolist() == [0, 33]
    half = AssemblyOptions(64, seed=3, eod=EOD, infilling=Infilling(0.5, 0.5, 1001, 1002, 1003))
    changed = sum(1001 in assemble([array(*range(1, 66))], half, number).tokens for number in range(1000))
    assert 420 < changed < 580


@pytest.fixture
def files(tmp_path):
    documents = [[10 * number + place + 1 for place in range(number % 7)] + [EOD] for number in range(60)]
    write_documents(tmp_path / "a", documents)
    write_documents(tmp_path / "b", documents[::-1])
    return tmp_path


def small(files, data, **training):
    return configuration(
        data,
        run={"dir": str(files / "run")},
        tokenizer={"type": "none", "eod_id": EOD},
        training={"steps": 10, "sequence_length": 12, "global_batch_size": 4, "micro_batch_size": 2, **training},
    )


def test_through_the_loader(files):
    config = small(
        files,
        {
            "train": [{"path": str(files / "a")}, {"path": str(files / "b"), "loss": False}],
            "mask_loss_at_eod": True,
            "reset_attention_at_eod": True,
        },
    )
    batch = build_loader(config, data_rank=0, data_ranks=1).step(2)
    assert batch.loss_mask.shape == batch.documents.shape == batch.positions.shape == (2, 2, 12)
    plan = build_plan(config)
    for number, labels, mask, documents in zip(
        batch.sample_ids.flatten().tolist(),
        batch.labels.flatten(0, 1),
        batch.loss_mask.flatten(0, 1),
        batch.documents.flatten(0, 1),
    ):
        source = plan.sample(number).source
        assert mask.tolist() == [float(source == 0 and label != EOD) for label in labels.tolist()]
        assert documents[0] == 0 and set(documents.diff().tolist()) <= {0, 1}


@pytest.mark.parametrize("masks", [True, False])
def test_all_ranks_have_masks_or_none(files, masks):
    """A rank whose samples happen to count whole has a mask all the same: ranks add up their weights together."""
    config = small(
        files, {"train": [{"path": str(files / "a"), "weight": 9.0}, {"path": str(files / "b"), "loss": not masks}]}
    )
    loaders = [build_loader(config, data_rank=rank, data_ranks=2) for rank in (0, 1)]
    found = [loader.step(step).loss_mask for step in range(10) for loader in loaders]
    if not masks:
        assert found == [None] * 20
    else:
        wholes = [bool(mask.all()) for mask in found]
        assert any(one != other for one, other in zip(wholes[::2], wholes[1::2]))  # the case that matters is there


def test_infilled_samples_of_a_source_without_loss():
    """Infilling makes a packed sample longer. The tokens that it adds are no targets either."""
    options = AssemblyOptions(40, seed=1, eod=EOD, infilling=Infilling(1.0, 0.5, 901, 902, 903))
    pieces = [np.arange(1, 10), np.arange(11, 20)]
    sample = assemble(pieces, options, 0, np.zeros(18, bool))
    assert 901 in sample.tokens and not sample.weights.any()


def test_label_files(files):
    documents = [[10 * number + place + 1 for place in range(number % 7)] + [EOD] for number in range(60)]
    labels = [[-100 if token % 3 else token for token in document] for document in documents]
    write_documents(files / "labels", labels, np.int32)
    config = small(files, {"train": {"path": str(files / "a"), "labels": str(files / "labels")}})
    batch = build_loader(config, data_rank=0, data_ranks=1).step(1)
    np.testing.assert_array_equal(batch.loss_mask.numpy(), (batch.labels.numpy() % 3 == 0).astype(np.float32))
    labels[7][0] = 5
    write_documents(files / "labels", [[5] * len(each) for each in labels], np.int32)
    with pytest.raises(DataError, match="neither -100 nor its token"):
        build_loader(config, data_rank=0, data_ranks=1).step(1)
    write_documents(files / "labels", labels[:-1], np.int32)
    with pytest.raises(DataError, match="must have the sizes"):
        build_plan(config)


def test_packing_through_the_loader(files):
    config = small(
        files, {"train": str(files / "a"), "packing": "best_fit", "order": "stream", "reset_attention_at_eod": True}
    )
    loader = build_loader(config, data_rank=0, data_ranks=1)
    order = loader.plan.sources[0].order
    seen = []
    for number in range(order.length):
        sample = loader.plan.sample(number)
        used = sum(span.length for span in sample.spans)
        seen += [span.document for span in sample.spans]
        weights = [1.0] * 12 if sample.weights is None else sample.weights.tolist()
        assert weights == [1.0] * (used - 1) + [0.0] * (13 - used)
    assert sorted(seen) == list(range(60))
    with pytest.raises(ConfigError, match="must not go with the pythia order, which splits documents"):
        small(files, {"train": str(files / "a"), "packing": "best_fit"})


def test_an_end_of_document_that_is_not_known(files):
    config = configuration(
        {"train": str(files / "a"), "reset_attention_at_eod": True},
        tokenizer={"type": "none", "eod_id": EOD},
        run={"dir": str(files / "run")},
        training={"sequence_length": 12},
    )
    unknown = config.model_copy(
        update={
            "tokenizer": config.tokenizer.model_copy(update={"eod_id": None}),
            "data": config.data.model_copy(update={"mask_loss_at_eod": True}),
        }
    )
    with pytest.raises(DataError, match="must be known"):
        build_plan(unknown)
