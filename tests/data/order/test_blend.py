"""GPT-NeoX's blending order: its own arrays, published vectors, and the plain loop."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order import blend as module
from megatron.data.order.blend import Blend, build_arrays, normalised_weights
from megatron.data.plan_builder import build_plan
from tests.data.make import configuration, write_sizes
from tests.data.reference import blend as plain_blend
from tests.data.reference import neox_weights, weights_by_documents

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.mark.parametrize(
    "weights, sources, samples",
    [
        ([0.5, 0.3, 0.2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3]),
        ([0.7, 0.3], [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6, 7, 3]),
        ([1 / 3] * 3, [0, 1, 2] * 4, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
    ],
)
def test_vectors(weights, sources, samples):
    blend = Blend(weights, 12)
    assert [blend.locate(draw) for draw in range(12)] == list(zip(sources, samples))


def test_digest_of_a_long_blend():
    sources = build_arrays(np.array([0.6, 0.3, 0.1]), 100_000)["sources"]
    assert hashlib.sha256(sources.tobytes()).hexdigest().startswith("73b9f89942194eb0")


@pytest.mark.parametrize("case", GOLDEN["blends"], ids=str)
def test_digests_of_the_original(case):
    weights = np.array([float.fromhex(weight) for weight in case["weights"]])
    sources = build_arrays(weights, case["size"])["sources"]
    assert hashlib.sha256(sources.tobytes()).hexdigest()[:16] == case["dataset_index"][2]
    counts = np.empty(case["size"], np.int64)
    for source in range(len(weights)):
        mine = sources == source
        counts[mine] = np.arange(mine.sum())
    assert hashlib.sha256(counts.tobytes()).hexdigest()[:16] == case["dataset_sample_index"][2]


@pytest.mark.parametrize("kinds", [2, 3, 7, 30, 300])
def test_many_blocks(kinds, monkeypatch):
    """Several groups of blocks side by side give what one long loop gives."""
    monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(module, "_TOGETHER", 16)
    weights = normalised_weights(list(np.random.default_rng(kinds).random(kinds) ** 4 + 1e-6))
    size = 128 * 40 + 77
    arrays = build_arrays(weights, size)
    assert arrays["sources"].tolist() == plain_blend(weights.tolist(), size)[0]
    assert arrays["sources"].dtype == (np.uint8 if kinds < 255 else np.uint16)


def test_bad_guesses_are_repaired(monkeypatch):
    """Even where every guessed start is wrong, the result is exact."""
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "_RUN_IN", 0)
    monkeypatch.setattr(module, "guess", lambda weights, draws: np.zeros((len(draws), len(weights))))
    weights = normalised_weights([0.9, 0.09, 0.01])
    assert build_arrays(weights, 1000)["sources"].tolist() == plain_blend(weights.tolist(), 1000)[0]


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 10), min_size=1, max_size=6), size=st.integers(1, 700))
def test_locate_find_and_drawn(weights, size):
    sources, samples = plain_blend(neox_weights(weights), size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 64)
        blend = Blend(weights, size)
        for draw in range(size):
            assert blend.locate(draw) == (sources[draw], samples[draw])
            assert blend.find(sources[draw], samples[draw]) == draw
        for source in range(len(weights)):
            assert blend.drawn(source, size) == sources.count(source)
            assert blend.find(source, sources.count(source)) is None


def test_normalisation_as_in_the_original():
    assert normalised_weights([1, 2]).tolist() == [1 / 3, 2 / 3]


def generated_weights(number: int) -> list[float]:
    """Of 2 to 6 sources: whole numbers, two decimals, four decimals, or any floats, in turn."""
    draw = random.Random(number)
    kind = (
        lambda: float(draw.randint(1, 20)),
        lambda: round(draw.uniform(0.01, 1), 2),
        lambda: round(draw.uniform(0.0001, 1), 4),
        lambda: draw.uniform(1e-3, 10),
    )[number % 4]
    return [kind() for _ in range(draw.randint(2, 6))]


@pytest.mark.parametrize("number", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_generated_weights_as_in_the_original(number):
    """GPT-NeoX divides by the sum twice. Dividing once gives another order for one in eight of these."""
    cases = [generated_weights(each) for each in range(number)] + [[3, 2, 2]]
    wanted = [plain_blend(neox_weights(weights), 3000)[0] for weights in cases]
    assert [Blend(weights, 3000).sources.tolist() for weights in cases] == wanted
    once = [Blend(weights, 3000, as_neox=False).sources.tolist() for weights in cases]
    assert once == [plain_blend(normalised_weights(weights).tolist(), 3000)[0] for weights in cases]
    assert sum(one != other for one, other in zip(once, wanted)) > number / 20 and once[-1] != wanted[-1]


@pytest.mark.parametrize("order", ["pythia", "stream", "sequential"])
def test_which_orders_blend_as_the_original(order, tmp_path):
    """Only GPT-NeoX's order has its weights to the last digit. The others keep the blend that they always had."""
    weights = [3, 2, 2]
    for source in range(3):
        write_sizes(tmp_path / str(source), [4000] * 8, seed=source)
    train = [{"path": str(tmp_path / str(source)), "weight": weight} for source, weight in enumerate(weights)]
    plan = build_plan(configuration({"train": train, "order": order, "cache": str(tmp_path / "cache")}))
    drawn = [plan.sample(number).source for number in range(320)]
    expected = neox_weights(weights) if order == "pythia" else normalised_weights(weights).tolist()
    assert drawn == plain_blend(expected, 320)[0]
    assert plain_blend(neox_weights(weights), 320) != plain_blend(normalised_weights(weights).tolist(), 320)


@pytest.mark.parametrize("alpha", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("documents", [[10, 30, 60], [5, 5], [40], [1, 2, 3, 4, 90]], ids=str)
def test_weights_by_number_of_documents_as_in_the_original(documents, alpha, tmp_path):
    """They replace the weights that are given, and lead to GPT-NeoX's draws."""
    for source, count in enumerate(documents):
        write_sizes(tmp_path / str(source), [900] * count, seed=source)
    train = [{"path": str(tmp_path / str(source)), "weight": source + 1} for source in range(len(documents))]
    data = {"train": train, "weighting": "neox-documents", "alpha": alpha, "cache": str(tmp_path / "cache")}
    plan = build_plan(configuration(data))
    weights = weights_by_documents(documents, alpha)
    if (documents, alpha) == ([10, 30, 60], 1.0):
        assert weights == pytest.approx([1 / 6, 7 / 18, 4 / 9])
    assert [plan.sample(number).source for number in range(320)] == plain_blend(neox_weights(weights), 320)[0]
