"""Which labels the goldfish loss omits: against definitions written out token by token, and the authors' table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.data.loader import build_loader
from megatron.data.plan import Targets
from megatron.data.sample import AssemblyOptions, Infilling, assemble
from megatron.objectives.goldfish.objective import Goldfish
from tests.data.make import configuration, write_documents

MASK64 = 2**64 - 1


def ids(count: int, seed: int = 0, low: int = 1, high: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, count)


def mixed(value: int) -> int:
    """splitmix64's finaliser, in whole numbers."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK64
    return value ^ value >> 31


def dropped(window: list[int], k: int) -> bool:
    total = 0
    for token in window:
        total = (total * 0x9E3779B97F4A7C15 + mixed(token + 1)) & MASK64
    return mixed(total) < 2**64 // k


def kept(goldfish: Goldfish, *documents: np.ndarray) -> list[bool]:
    """Whether each token of documents, back to back, counts as a label. The first one is never predicted."""
    begins = np.concatenate([np.arange(len(each)) == 0 for each in documents])
    return [True, *(goldfish.weights(np.concatenate(documents), begins) == 1.0).tolist()]


@pytest.mark.parametrize(("k", "h"), [(2, 1), (3, 13), (7, 4)])
def test_hashed_is_a_function_of_the_tokens_before_in_the_document(k, h):
    documents = [ids(length, length, high=9) for length in (40, 1, 2, 100, 60)]
    found = [
        place < h or not dropped(each[place - h : place].tolist(), k)
        for each in documents
        for place in range(len(each))
    ]
    assert kept(Goldfish(k, h), *documents) == found
    assert not all(found)


def test_a_passage_loses_the_same_labels_wherever_it_stands():
    passage, goldfish = ids(100, 1), Goldfish(3, 5)
    twice = kept(goldfish, np.concatenate([ids(37, 2), passage, ids(11, 3), passage]))
    assert twice[37 + 5 : 137] == twice[148 + 5 :] == kept(goldfish, passage)[5:]


def test_nothing_before_a_document_decides_about_it():
    first, second, goldfish = ids(60, 5), ids(60, 6), Goldfish(2, 8)
    alone = kept(goldfish, second)
    assert kept(goldfish, first, second)[60:] == alone
    assert all(alone[:8])
    assert kept(goldfish, np.concatenate([first, second]))[60:] != alone, "the test sees windows"


@pytest.mark.parametrize("h", [4, 13, 64])  # many windows are alike if they are shorter
@pytest.mark.parametrize("k", [2, 3, 4, 32])
def test_one_label_of_k_is_left_out_whatever_the_ids_are(k, h):
    """Within four standard deviations, also of windows that have id 0 or a single id many times."""
    tokens = ids(200_000, k, 0, 50_000)
    tokens[::5] = 0
    left_out = ~np.array(kept(Goldfish(k, h), tokens))[h:]
    has_zero = np.lib.stride_tricks.sliding_window_view(tokens == 0, h).any(1)[:-1]
    for group in (left_out, left_out[has_zero], left_out[tokens[h:] == 0]):
        assert abs(group.mean() - 1 / k) < 4 * np.sqrt((1 - 1 / k) / k / len(group))


def test_static_leaves_out_every_kth_label_of_a_sample():
    found = kept(Goldfish(3, 13, "static"), ids(5), ids(6))[1:]
    assert found == [False, True, True, False, True, True, False, True, True, False]


def by_definition(labels: torch.Tensor, k: int, h: int) -> list[bool]:
    """The authors' strategy `hash-table`, one label at a time."""
    table = torch.rand(1_000_003, generator=torch.Generator().manual_seed(2971215073))
    assert table[:4].tolist() == pytest.approx([0.233684, 0.441264, 0.741148, 0.909272], abs=1e-6)
    found = [True] * (h - 1)
    for end in range(h, len(labels) + 1):
        found.append(not bool(table[labels[end - h : end].prod() % 1_000_003] < 1 / k))
    return found


@pytest.mark.parametrize(("k", "h"), [(4, 4), (3, 13)])
def test_the_reference_as_published(k, h):
    """And its fault, which `hashed` does not have: with k of at most 4, id 0 takes all labels near it out."""
    tokens = ids(400, 7, 0, 50_000)
    tokens[100] = 0
    found = kept(Goldfish(k, h, "reference"), tokens[:150], tokens[150:])[1:]
    assert found == by_definition(torch.from_numpy(tokens[1:]), k, h)
    assert not any(found[99 : 99 + h])
    assert any(kept(Goldfish(k, h), tokens)[100 : 100 + h])


EOD = 0
OBJECTIVE = {"type": "goldfish", "k": 2, "h": 4}


def masks(tmp_path, ranks: int = 1, data: dict | None = None, **objective) -> dict[tuple[int, int], list]:
    """Weights that the run's loaders give each token of the file: by (document, place), labels' weights over two
    epochs."""
    config = configuration(
        {"train": [{"path": str(tmp_path / "text")}], "order": "stream", **(data or {})},
        ranks=ranks,
        run={"dir": str(tmp_path / "run")},
        training={"steps": 16, "sequence_length": 20, "global_batch_size": 4, "micro_batch_size": 2},
        objective={**OBJECTIVE, **objective},
        tokenizer={"type": "none", "eod_id": EOD},
    )
    found: dict[tuple[int, int], list] = {}
    for rank in range(ranks):
        loader = build_loader(config, data_rank=rank, data_ranks=ranks)
        for step in range(16):
            batch = loader.step(step)
            for number, weights in zip(batch.sample_ids.flatten().tolist(), batch.loss_mask.flatten(0, 1).tolist()):
                spans = loader.plan.sample(number).spans
                places = [(span.document, span.start + at) for span in spans for at in range(span.length)]
                for place, weight in zip(places[1:], weights, strict=True):
                    found.setdefault(place, []).append(weight)
    return found


@pytest.fixture
def text(tmp_path):
    """Documents of 150 and 90 tokens. The first has the end of one inside."""
    documents = [ids(150, 21), ids(90, 22)]
    documents[0][70] = EOD
    write_documents(tmp_path / "text", [each.tolist() for each in documents])
    return documents


def test_each_token_of_a_document_is_always_a_label_or_never(tmp_path, text):
    """However samples cut it, and on one rank and two: what counts is what stands before it in its document."""
    first, second = text
    expected = [kept(Goldfish(2, 4), first[:71], first[71:]), kept(Goldfish(2, 4), second)]
    found = masks(tmp_path)
    assert len(found) == 220  # eleven samples of the 240 tokens
    assert {place: set(weights) for place, weights in found.items()} == {
        (document, place): {float(expected[document][place])} for document, place in found
    }
    assert masks(tmp_path, ranks=2) == found


def test_other_masks_are_heard_too(tmp_path, text):
    with_ends = masks(tmp_path, data={"mask_loss_at_eod": True})
    plain = masks(tmp_path)
    assert all(
        weights == ([0.0] * len(weights) if place == (0, 70) else plain[place]) for place, weights in with_ends.items()
    )


def test_validation_and_reordered_documents(tmp_path, text):
    """Validation skips nothing. Infilled documents are read as they are then, without what stood before them."""
    source = [{"path": str(tmp_path / "text")}]
    config = configuration(
        {"train": source, "validation": {"held": source}, "order": "sequential"},
        run={"dir": str(tmp_path / "run")},
        training={"steps": 2, "sequence_length": 20, "global_batch_size": 4, "micro_batch_size": 2},
        evaluation={"every": 1, "batches": 1},
        objective=OBJECTIVE,
        tokenizer={"type": "none", "eod_id": EOD},
    )
    assert build_loader(config, data_rank=0, data_ranks=1, split="validation").step(0).loss_mask is None
    options = AssemblyOptions(60, eod=EOD, boundaries=True, context=4, infilling=Infilling(1.0, 0.5, 1001, 1002, 1003))
    made = Targets(Goldfish(2, 4)).of(assemble([np.append(ids(30, 1), EOD), ids(30, 2)], options, 3))
    border = int(np.flatnonzero(made.tokens == EOD)[0]) + 1
    expected = kept(Goldfish(2, 4), made.tokens[:border], made.tokens[border:])
    assert made.weights.tolist() == [float(each) for each in expected[1:]]
