"""Span corruption: against T5's rule written again, read back, and through the loader."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.arithmetic.batches import tokens_read
from megatron.data.hashing import generator
from megatron.data.loader import build_loader
from megatron.data.plan_builder import build_plan
from megatron.data.provenance import Provenance
from megatron.data.sample import AssemblyOptions, Corruption, assemble, corrupt, noise_mask
from megatron.data.token_file import TokenFile
from tests.data.make import configuration, write_documents

EOD, FIRST = 0, 1000
SENTINELS = tuple(range(FIRST, FIRST + 100))


def random_spans_noise_mask(length: int, density: float, mean: float, seed: int) -> np.ndarray:
    """T5's rule, as its paper's program has it: shuffled marks of where segments begin."""
    draw, original = np.random.RandomState(seed), length
    length = max(length, 2)
    noise = int(np.round(length * density))
    noise = min(max(noise, 1), length - 1)
    spans = max(int(np.round(noise / mean)), 1)
    spans = min(spans, length - noise)  # of its later version: every span has something before it

    def segmentation(items: int, segments: int) -> np.ndarray:
        marks = np.arange(items - 1) < segments - 1
        draw.shuffle(marks)
        ids = np.cumsum(np.concatenate([[0], marks]))
        return np.bincount(ids, minlength=segments)

    lengths = np.stack([segmentation(length - noise, spans), segmentation(noise, spans)], axis=1).reshape(-1)
    starts = np.zeros(length, np.int64)
    starts[np.cumsum(lengths)[:-1]] = 1
    return (np.cumsum(starts) % 2 == 1)[:original]


def runs(mask: np.ndarray) -> list[int]:
    """Lengths of the spans of a mask."""
    return [len(list(each)) for taken, each in groupby(mask) if taken]


CORRUPTIONS = st.builds(
    Corruption, st.just(1.0), st.floats(0.05, 0.9), st.floats(1.0, 10.0), st.just(SENTINELS), st.booleans()
)


@settings(max_examples=150, deadline=None)
@given(length=st.integers(2, 300), options=CORRUPTIONS, seed=st.integers(0, 10**6))
def test_as_many_tokens_and_spans_as_t5_takes(length, options, seed):
    mask = noise_mask(length, options, generator(seed))
    theirs = random_spans_noise_mask(length, options.density, options.mean, seed % 1000)
    assert mask.sum() == theirs.sum() and not mask[0] and mask[-1]
    assert len(runs(mask)) == min(len(runs(theirs)), len(SENTINELS))


def test_lengths_are_drawn_as_t5_draws_them():
    """Every list of lengths is equally likely: 4 spans of 7 tokens are C(6, 3) = 20 lists, and so is what stays."""
    options, draws = Corruption(1.0, 0.5, 1.75, SENTINELS), 4000
    ours = Counter(tuple(runs(noise_mask(14, options, generator(seed)))) for seed in range(draws))
    theirs = Counter(tuple(runs(random_spans_noise_mask(14, 0.5, 1.75, seed))) for seed in range(2000))
    assert ours.keys() == theirs.keys() and len(ours) == 20
    spread = (draws / 20 * 19 / 20) ** 0.5
    assert all(abs(count - draws / 20) < 5 * spread for count in ours.values())


@settings(max_examples=150, deadline=None)
@given(length=st.integers(0, 200), options=CORRUPTIONS, seed=st.integers(0, 10**6))
def test_a_document_can_be_read_back(length, options, seed):
    tokens = np.arange(1, length + 1)
    made, targets = corrupt(tokens, options, generator(seed))
    assert len(made) == length + 2 * options.sizes(length)[1] == len(targets)
    if length < 2:
        assert made.tolist() == tokens.tolist() and targets.all()
        return
    middle = int(np.flatnonzero(made == FIRST)[1])
    text, spans, answers = made[:middle].tolist(), made[middle:].tolist(), {}
    for token in spans:
        if token >= FIRST:
            sentinel = token
            answers[sentinel] = []
        else:
            answers[sentinel].append(token)
    assert list(answers) == list(SENTINELS[: len(answers)]) == [token for token in text if token >= FIRST]
    back = [each for token in text for each in answers.get(token, [token])]
    assert back == tokens.tolist()
    assert targets.tolist() == ([False] * middle if options.targets_only else [True] * middle) + [True] * len(spans)


@settings(max_examples=150, deadline=None)
@given(length=st.integers(3, 400), options=CORRUPTIONS)
def test_as_much_is_read_as_fits(length, options):
    own = {"rate": 1.0, "noise_density": options.density, "mean_span_length": options.mean, "sentinels": 100}
    values = {f"data.span_corruption.{name}": value for name, value in own.items()}
    read = tokens_read({**values, "training.sequence_length": length}.__getitem__) + 1
    assert after(read, options) <= length + 1 < after(read + 1, options)
    assert tokens_read({"data.span_corruption.rate": 0.0, "training.sequence_length": length}.__getitem__) == length


def after(length: int, options: Corruption) -> int:
    """Tokens of a document once it is corrupted: made, and counted."""
    return len(corrupt(np.arange(1, length + 1), options, generator(length))[0])


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    options=st.builds(Corruption, st.floats(0.3, 1.0), st.floats(0.05, 0.9), st.floats(1, 10), st.just(SENTINELS)),
    extra=st.integers(0, 40),
    number=st.integers(0, 10**6),
)
def test_a_sample_loses_nothing_that_it_has_read(sizes, options, extra, number):
    """However its documents grow. The rest of it is empty and no target."""
    ends, width = np.cumsum(sizes), sum(sizes) + extra
    documents = [np.arange(end - size + 1, end + 1) for size, end in zip(sizes, ends)]
    made = assemble(documents, AssemblyOptions(width - 1, seed=3, eod=EOD, corruption=options), number)
    assert len(made.tokens) == width
    assert sorted(token for token in made.tokens.tolist() if EOD < token < FIRST) == [*range(1, ends[-1] + 1)]
    if made.weights is not None:
        assert not made.weights[made.tokens[1:] == EOD].any()


def test_samples_count_what_they_should():
    """The first documents have all of their spans, and the last one has the spans that fit."""
    corruption = Corruption(1.0, 0.2, 2.0, SENTINELS)
    options = AssemblyOptions(63, seed=3, eod=EOD, boundaries=True, corruption=corruption)
    documents = [np.array([*range(1, 30), EOD]), np.array([*range(31, 50), EOD]), np.array([*range(81, 85)])]
    first, again, other = (assemble(documents, options, number) for number in (8, 8, 9))
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist() and len(first.tokens) == 64
    whole = 29 + 2 * 3 + 1  # 6 of 29 tokens in 3 spans
    next_one = whole + 19 + 2 * 2 + 1  # of 64 - 54 places 6 are taken, and these two spans take the last four
    assert first.tokens[[whole - 1, next_one - 1]].tolist() == [EOD, EOD]
    assert np.flatnonzero(first.begins).tolist() == [0, whole, next_one]
    assert first.tokens[next_one:].tolist() == [*range(81, 85)]
    assert first.weights.sum() == (6 + 3 + 1) + (4 + 2 + 1) + 4


def test_every_token_of_an_epoch_is_trained_on(tmp_path):
    """In the file's own order, where samples are cut alike in every epoch. Through the loader."""
    sizes = [7, 30, 2, 55, 1, 120, 9, 44, 13, 80]
    ends = np.cumsum(sizes)
    documents = [[*range(end - size + 1, end), EOD] if size > 1 else [EOD] for size, end in zip(sizes, ends)]
    write_documents(tmp_path / "a", documents)
    vocabulary = {f"t{index}": index for index in range(400)}
    added = [{"id": 400 + index, "content": f"<s{index}>", "special": True} for index in range(8)]
    added = [{**each, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False} for each in added]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
    values = {
        "data": {
            "train": str(tmp_path / "a"),
            "order": "sequential",
            "span_corruption": {"rate": 1.0, "sentinel": "<s{}>", "sentinels": 8},
        },
        "model": {"vocab_size": 408},
        "tokenizer": {"path": str(tmp_path / "tokenizer.json"), "eod_id": EOD},
        "training": {"epochs": 1, "steps": None, "sequence_length": 24, "global_batch_size": 1, "micro_batch_size": 1},
    }
    config = configuration(values.pop("data"), **values)
    read = 22  # a document of 23 tokens has 3 of them in one span: 25 tokens
    assert config.training.steps == (sum(sizes) - 1) // read
    seen: set[int] = set()
    for step in range(config.training.steps):
        seen |= set(build_loader(config, data_rank=0, data_ranks=1).step(step).tokens.flatten().tolist())
    wanted = {token for document in documents for token in document}
    end = read * config.training.steps + 1  # what is no whole sample is read in the next epoch at most
    left = {token for token in wanted if token > end}
    assert wanted - left <= seen
    assert build_plan(config).uses()[0].tokens == read * config.training.steps


def test_through_the_loader_and_its_provenance(tmp_path):
    """The same on every layout. The answers of where.py and batch.py are of the documents before they were
    corrupted."""
    write_documents(
        tmp_path / "a", [[10 * (number % 9) + place + 1 for place in range(9)] + [EOD] for number in range(60)]
    )
    vocabulary = {f"t{index}": index for index in range(100)}
    added = [{"id": 100 + index, "content": f"<s{index}>", "special": True} for index in range(8)]
    added = [{**each, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False} for each in added]
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
    corruption = {"rate": 1.0, "sentinel": "<s{}>", "sentinels": 8}
    config = configuration(
        {"train": str(tmp_path / "a"), "span_corruption": corruption, "reset_attention_at_eod": True},
        run={"dir": str(tmp_path / "run")},
        model={"vocab_size": 128},
        tokenizer={"path": str(tmp_path / "tokenizer.json"), "eod_id": EOD},
        training={"steps": 8, "sequence_length": 24, "global_batch_size": 4, "micro_batch_size": 2},
    )
    one = build_loader(config, data_rank=0, data_ranks=1).step(3)
    two = [build_loader(config, data_rank=rank, data_ranks=2).step(3) for rank in range(2)]
    by_sample = {
        int(number): (tokens.tolist(), mask.tolist())
        for each in two
        for number, tokens, mask in zip(
            each.sample_ids.flatten(), each.tokens.flatten(0, 1), each.loss_mask.flatten(0, 1), strict=True
        )
    }
    rows = zip(one.sample_ids.flatten(), one.tokens.flatten(0, 1), one.loss_mask.flatten(0, 1), strict=True)
    for number, tokens, mask in rows:
        assert by_sample[int(number)] == (tokens.tolist(), mask.tolist())
        assert 100 in tokens.tolist() and 0 < mask.sum() < len(mask)
    found, documents = Provenance(config), TokenFile(tmp_path / "a")
    for index, sequence in enumerate(found.step(3)):
        assert sequence.tokens.tolist() == one.tokens.flatten(0, 1)[index].tolist()
        read = np.concatenate([documents.read(each.document, each.start, each.length) for each in sequence.pieces])
        kept = sequence.tokens[(sequence.tokens < 100) & (sequence.tokens != EOD)]
        assert not Counter(kept.tolist()) - Counter(read.tolist()) and len(kept) > 12
        assert all((3, index) in found.seen(0, each.document) for each in sequence.pieces)
