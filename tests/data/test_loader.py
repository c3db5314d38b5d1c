"""The loader: the original's batches, and that nothing but the step matters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.errors import DataError
from megatron.data.hashing import MODULUS, sample_hash
from megatron.data.loader import build_loader
from megatron.data.plan_builder import build_plan, set_names
from megatron.data.token_file import TokenFile
from tests.data.make import configuration, write_documents, write_sizes
from tests.data.reference import blend as plain_blend
from tests.data.reference import flat_samples
from tests.paths import shared

FOLDER = shared("data/golden_pythia")
needs_arrays = pytest.mark.skipif(FOLDER is None, reason="the golden arrays are not here")


def golden_config(blend: bool, cache):
    a, b = (str(FOLDER / f"golden_{name}_text_document") for name in "ab")
    both = [{"path": a, "weight": 0.7}, {"path": b, "weight": 0.3}]
    data = {"train": both, "validation": both} if blend else {"train": a, "split": [969, 30, 1]}
    return configuration({**data, "cache": str(cache)}, ranks=2, evaluation={"every": 20, "batches": 3})


@needs_arrays
@pytest.mark.parametrize("name, iterations", [("loader_dp2_gas1", (0, 7, 33, 500)), ("blend_dp2_70_30", (0, 7))])
def test_batches_of_the_original(tmp_path, name, iterations):
    """Rank by rank, from the start and resumed, beyond the end of the order too."""
    golden = np.load(FOLDER / f"{name}.npz")
    config = golden_config("blend" in name, tmp_path)
    for rank in (0, 1):
        loader = build_loader(config, data_rank=rank, data_ranks=2)
        for iteration in iterations:
            for offset, tokens in enumerate(golden[f"rank{rank}_it{iteration}_text"]):
                if iteration + offset < loader.steps or loader.plan.period:
                    batch = loader.step(iteration + offset)
                    np.testing.assert_array_equal(batch.tokens[0].numpy(), tokens)
        validation = build_loader(config, data_rank=rank, data_ranks=2, split="validation", name="validation")
        for step, tokens in enumerate(golden[f"rank{rank}_valid_it0_text"][: validation.steps]):
            np.testing.assert_array_equal(validation.step(step).tokens[0].numpy(), tokens)


@needs_arrays
def test_blend_of_the_original(tmp_path):
    """All 838 draws of the blend and what they read."""
    golden = np.load(FOLDER / "blend_dp2_70_30.npz")
    plan = build_plan(golden_config(True, tmp_path))
    assert plan.phases[0].length == golden["blend_length"] == 838 and plan.period == 832
    drawn = plan.phases[0].blend.size
    assert drawn == 320
    places = [plan.place(number)[1:] for number in range(drawn)]
    assert [source for source, _ in places] == golden["dataset_index"][:drawn].tolist()
    assert [sample for _, sample in places] == golden["dataset_sample_index"][:drawn].tolist()
    for source, sample, tokens in zip(golden["dataset_index"], golden["dataset_sample_index"], golden["blend_first"]):
        read = plan.sources[source].sample(int(sample), plan.options, 0, True).tokens
        np.testing.assert_array_equal(read, tokens)
    for draw, tokens in zip(golden["blend_late_index"], golden["blend_late"]):
        source, sample = golden["dataset_index"][draw], int(golden["dataset_sample_index"][draw])
        np.testing.assert_array_equal(plan.sources[source].sample(sample, plan.options, 0, True).tokens, tokens)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    random = np.random.default_rng(1)
    write_sizes(folder / "a", random.integers(0, 60, 120).tolist(), 1)
    write_sizes(folder / "b", random.integers(0, 90, 40).tolist(), 2)
    return folder


def entire(config, step, ranks, micro):
    """One step's tokens [B, S+1], sample numbers and hash, put together from all ranks."""
    batch = config.training.global_batch_size
    tokens, hashes, numbers = [None] * batch, 0, [None] * batch
    for rank in range(ranks):
        loader = build_loader(config, data_rank=rank, data_ranks=ranks)
        part = loader.step(step)
        assert part.tokens.shape == (batch // micro // ranks, micro, config.training.sequence_length + 1)
        for number, row in zip(part.sample_ids.flatten().tolist(), part.tokens.flatten(0, 1).tolist()):
            tokens[number - step * batch], numbers[number - step * batch] = row, number
        hashes += part.hash
        loader.close()
    return tokens, numbers, hashes % MODULUS


@pytest.mark.parametrize("order", ["pythia", "stream", "sequential"])
def test_independent_of_the_layout(files, order):
    reference = None
    for ranks, micro, workers in [(1, 12, 0), (1, 2, 1), (2, 3, 2), (3, 1, 1), (3, 4, 0), (6, 2, 0), (12, 1, 0)]:
        config = configuration(
            {"train": [str(files / "a"), str(files / "b")], "order": order, "workers": workers},
            ranks=ranks,
            training={"global_batch_size": 12, "micro_batch_size": micro, "sequence_length": 16, "steps": 9},
            run={"dir": str(files / "run")},
        )
        found = [entire(config, step, ranks, micro) for step in (0, 5)]
        reference = reference or found
        assert found == reference
    for step, (tokens, numbers, total) in zip((0, 5), reference):
        assert numbers == list(range(step * 12, step * 12 + 12))
        assert total == sum(sample_hash(index, np.array(row)) for index, row in enumerate(tokens)) % MODULUS


def test_item_order_inside_a_step(files):
    """Item b of micro-step g on rank r is sample step*B + (g*R + r)*M + b."""
    config = configuration(
        {"train": str(files / "a")},
        ranks=2,
        run={"dir": str(files / "run")},
        training={"global_batch_size": 12, "micro_batch_size": 3, "sequence_length": 16},
    )
    loader = build_loader(config, data_rank=1, data_ranks=2)
    assert loader.step(2).sample_ids.tolist() == [[27, 28, 29], [33, 34, 35]]


def test_resume_at_any_step(files):
    """Prefetched, in any order, again and again, or from a fresh loader: the same batches."""
    config = configuration(
        {"train": [str(files / "a"), str(files / "b")], "workers": 2, "prefetch": 3},
        run={"dir": str(files / "run")},
        training={"steps": 12, "sequence_length": 16},
    )
    loader = build_loader(config, data_rank=0, data_ranks=1)
    straight = [loader.step(step) for step in range(12)]
    for step in (7, 8, 3, 11, 0, 0, 5, 4):
        for other in (loader, build_loader(config, data_rank=0, data_ranks=1)):
            batch = other.step(step)
            assert torch.equal(batch.tokens, straight[step].tokens) and batch.hash == straight[step].hash
            assert batch.step == step and batch.sample_ids[0, 0] == 8 * step
    ahead = loader.ahead(6)
    assert ahead is not None and loader.step(5) is not ahead and loader.step(6) is ahead
    assert loader.ahead(12) is None  # after the last step
    loader.close()


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 60), batch=st.sampled_from([1, 2, 4, 8]), epochs_seed=st.integers(0, 9))
def test_one_source_is_the_flat_stream(tmp_path_factory, steps, batch, epochs_seed):
    """Through the whole loader, with the 1.005 margin, N-1 and whole-batch wrapping, against the plain version."""
    folder = tmp_path_factory.mktemp("one")
    file = write_sizes(folder / "a", [4, 0, 9, 3, 3, 17, 0, 5], epochs_seed)
    config = configuration(
        {"train": str(folder / "a"), "seed": epochs_seed},
        run={"dir": str(folder)},
        training={"steps": steps, "sequence_length": 5, "global_batch_size": batch, "micro_batch_size": 1},
    )
    wanted = -(-int(round(steps * batch * 1.005 * 1000)) // 1000)
    samples, length = flat_samples([file[each].tolist() for each in range(8)], 5, epochs_seed, max(wanted, 2))
    loader = build_loader(config, data_rank=0, data_ranks=1)
    period = length // batch * batch or length
    for step in range(steps):
        rows = loader.step(step).tokens.flatten(0, 1).tolist()
        assert rows == [samples[(step * batch + index) % period] for index in range(batch)]


def test_running_past_the_end_is_said(tmp_path):
    """A split file is asked for exactly the run's samples, and a pass is one shorter: the end repeats the beginning."""
    write_sizes(tmp_path / "a", [41])
    config = configuration(
        {"train": str(tmp_path / "a"), "split": [1, 0, 0]},
        run={"dir": str(tmp_path)},
        training={"steps": 5, "sequence_length": 4, "global_batch_size": 2, "micro_batch_size": 2},
    )
    plan = build_plan(config)
    assert plan.sources[0].order.length == 9 and plan.period == 8
    assert plan.warnings() == ["the order has 8 samples, repeated from step 4"]
    assert plan.sample(8).tokens.tolist() == plan.sample(0).tokens.tolist()


def test_phases_go_on_where_a_source_stopped(files):
    a, b = str(files / "a"), str(files / "b")
    config = configuration(
        {
            "train": a,
            "phases": [
                {"start": 4, "sources": [{"path": a, "weight": 1.0}, {"path": b, "weight": 3.0, "loss": False}]},
                {"start": 7, "sources": [b, a]},
            ],
        },
        run={"dir": str(files / "run")},
        training={"steps": 10, "sequence_length": 16, "global_batch_size": 4, "micro_batch_size": 4},
    )
    plan = build_plan(config)
    middle, _ = plain_blend([0.25, 0.75], 12)
    last, _ = plain_blend([0.5, 0.5], 12)
    expected = [0] * 16 + middle + [1 - source for source in last]
    taken = Counter()
    for number, source in enumerate(expected):
        sample = plan.sample(number)
        own = plan.sources[source].sample(taken[source], plan.options, number, True)
        assert sample.source == source
        assert sample.tokens.tolist() == own.tokens.tolist()
        assert list(plan.numbers(source, taken[source], 40)) == [number]
        assert (sample.weights is None) == (source == 0 or number >= 28)
        taken[source] += 1
    assert [use.samples for use in plan.uses()] == [taken[0], taken[1]]
    with pytest.raises(DataError, match="beyond the last step"):
        plan.sample(40)


def test_the_blend_wraps_as_a_whole(files):
    """Numbers of a sample of a source, over several passes of the blend, against checking every place."""
    config = configuration(
        {
            "train": [{"path": str(files / "a"), "weight": 1.0}, {"path": str(files / "b"), "weight": 9.0}],
            "margin": 1.0,
        },
        run={"dir": str(files / "run")},
        training={"steps": 100, "sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 4},
    )
    plan = build_plan(config)
    below = 400
    seen: dict[tuple[int, int], list[int]] = {}
    for number in range(below):
        phase, member, sample = plan.place(number)
        seen.setdefault((phase.members[member], sample), []).append(number)
    for (source, sample), numbers in seen.items():
        assert list(plan.numbers(source, sample, below)) == numbers
    assert [plan.drawn(source, below) for source in (0, 1)] == [
        sum(len(numbers) for (each, _), numbers in seen.items() if each == source) for source in (0, 1)
    ]
    assert any("is read" in warning for warning in plan.warnings())


def test_weighting(files):
    paths = [str(files / "a"), str(files / "b")]
    tokens = [TokenFile(path).tokens for path in paths]
    for kind, sizes in (("documents", [120, 40]), ("tokens", tokens)):
        for alpha in (1.0, 0.5):
            config = configuration(
                {"train": paths, "weighting": kind, "alpha": alpha},
                run={"dir": str(files / "run")},
                training={"sequence_length": 16},
            )
            powers = [size**alpha for size in sizes]
            weights = [use.weight for use in build_plan(config).uses()]
            assert weights == pytest.approx([power / sum(powers) for power in powers], rel=1e-12)


def test_reading_a_validation_set_once(files):
    config = configuration(
        {"train": str(files / "a"), "validation": {"v": str(files / "b")}},
        evaluation={"batches": 0, "every": 5},
        run={"dir": str(files / "run")},
        training={"sequence_length": 16},
    )
    loader = build_loader(config, data_rank=0, data_ranks=1, split="validation")
    tokens = TokenFile(files / "b").tokens
    assert loader.steps == ((tokens - 1) // 16 - 1) // 8
    ids = torch.cat([loader.step(step).sample_ids.flatten() for step in range(loader.steps)])
    assert ids.tolist() == list(range(loader.steps * 8))
    assert max(use.epochs for use in loader.plan.uses()) <= 1


def test_sets_that_do_not_exist(files):
    config = configuration({"train": str(files / "a"), "split": [8, 1, 1]}, run={"dir": str(files / "run")})
    assert set_names(config, "validation") == ["validation"] and set_names(config, "test") == ["test"]
    with pytest.raises(DataError, match="there is no set 'nope'"):
        build_loader(config, data_rank=0, data_ranks=1, split="validation", name="nope")
    with pytest.raises(DataError, match="there is no split"):
        build_loader(config, data_rank=0, data_ranks=1, split="dev")
    with pytest.raises(DataError, match="must be a multiple"):
        build_loader(config, data_rank=0, data_ranks=3)


def test_ids_beyond_the_vocabulary(tmp_path):
    write_documents(tmp_path / "a", [[1] * 50, [300] + [1] * 50])
    small = {"vocab_size": 300, "layers": "(attention/mlp) x1", "hidden_size": 16, "attention": {"heads": 2}}
    config = configuration(
        {"train": str(tmp_path / "a")}, model=small, training={"sequence_length": 16}, run={"dir": str(tmp_path)}
    )
    with pytest.raises(DataError, match="ids 0 ... 300, but model.vocab_size is 300"):
        build_plan(config)


def test_ids_beyond_the_vocabulary_in_files_too_large_to_search(tmp_path, monkeypatch):
    """Where the start cannot check everything, the sample that would be wrong is refused."""
    from megatron.data import source

    examine = source.examine_once
    monkeypatch.setattr(source, "examine_once", lambda file, cache: examine(file, cache, scan_below=0))
    write_documents(tmp_path / "a", [[1] * 170, [300] * 17])
    small = {"vocab_size": 300, "layers": "(attention/mlp) x1", "hidden_size": 16, "attention": {"heads": 2}}
    config = configuration(
        {"train": str(tmp_path / "a"), "order": "sequential"},
        model=small,
        training={"sequence_length": 16, "global_batch_size": 1, "micro_batch_size": 1},
        run={"dir": str(tmp_path)},
    )
    plan = build_plan(config)
    assert plan.sample(0).tokens.tolist() == [1] * 17
    with pytest.raises(DataError, match="sample 10 has ids 1 ... 300"):
        plan.sample(10)


def test_synthetic_copies(files):
    config = configuration({"synthetic": "copy"}, training={"sequence_length": 31})
    loader = build_loader(config, data_rank=0, data_ranks=1)
    batch = loader.step(3)
    assert torch.equal(batch.tokens[..., :16], batch.tokens[..., 16:])
    assert torch.equal(batch.tokens, build_loader(config, data_rank=0, data_ranks=1).step(3).tokens)
    assert not torch.equal(batch.tokens, loader.step(4).tokens)
    assert set_names(config, "validation") == ["validation"]
    validation = build_loader(config, data_rank=0, data_ranks=1, split="validation", name="validation")
    assert not torch.equal(validation.step(3).tokens, batch.tokens)
    assert batch.documents is None and batch.loss_mask is None
    config = configuration(
        {"synthetic": "copy", "reset_attention_at_eod": True}, training={"sequence_length": 31}, tokenizer={"eod_id": 3}
    )
    apart = build_loader(config, data_rank=0, data_ranks=1).step(3)  # each sample is a document
    assert torch.equal(apart.tokens, batch.tokens) and apart.documents.max() == 0
    assert torch.equal(apart.positions, torch.arange(31).expand(apart.positions.shape))
