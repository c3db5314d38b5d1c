"""Batch sizes of stages against sums over steps, and the published schedules."""

from __future__ import annotations

import random

import pytest

from megatron.config import load, resolve
from megatron.config.arithmetic.batches import Batches, batches_by, batches_of
from megatron.model.costs.describe import totals, training_operations
from tests.paths import ROOT

TRAINING = {
    "steps": 20,
    "sequence_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "batch_schedule": [{"until": 3, "global_batch_size": 4}, {"until_tokens": 1000, "global_batch_size": 8}],
}
RUN = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 64, "attention": {"heads": 4}},
    "training": TRAINING,
    "data": {"synthetic": "copy"},
}
LLAMAS = -((61 * 2**22 - 2870 * 10**9) // 2**23)  # whole batches of 8M from step 61 up to 2.87T tokens


def test_against_sums_over_steps() -> None:
    draw = random.Random(0)
    for _ in range(50):
        begins = (0, *sorted(draw.sample(range(1, 30), draw.randrange(4))))
        sizes = [draw.randrange(1, 20) for _ in begins]
        batches, read = Batches(tuple(sizes), begins), 0
        for step in range(40):
            size = sizes[sum(begin <= step for begin in begins) - 1]
            assert (batches.before(step), batches.size(step)) == (read, size)
            assert all(batches.step(sample) == step for sample in range(read, read + size))
            for start in range(step):  # whole steps, and a quarter of the next one
                tokens = read - batches.before(start)
                assert batches.steps_of(tokens * 8, 8, start) == pytest.approx(step - start)
                assert batches.steps_of((tokens + size / 4) * 8, 8, start) == pytest.approx(step - start + 0.25)
            read += size
        assert sum(size * count for size, count in batches.counts(25)) == batches.before(25)
        assert sum(count for _, count in batches.counts(25)) == 25


def test_a_stage_ends_with_the_batch_that_has_its_last_token() -> None:
    """After 3 steps of 4 samples: 192 tokens. 6 steps of 8 samples more have 960, and 7 have 1,088."""
    assert batches_of(resolve(RUN, ranks=1)).begins == (0, 3, 10)
    for tokens, end in ((960, 9), (961, 10), (1088, 10), (1089, 11)):
        stages = [{"until": 3, "global_batch_size": 4}, {"until_tokens": tokens, "global_batch_size": 8}]
        assert batches_by(16, stages, 16).begins == (0, 3, end)


def test_operations_of_a_run_are_those_of_its_samples() -> None:
    config = resolve(RUN, ranks=1)
    for steps, samples in ((2, 8), (10, 68), (20, 228)):
        assert training_operations(config, steps) == totals(config).training_flops * samples * 16


@pytest.mark.parametrize(
    ("model", "name", "length", "ends"),
    [
        # tokens per batch, and the first step of each stage: ceil(tokens / tokens per batch) steps after the last one
        (
            "llama/llama3_70b",
            "llama3_405b",
            8192,
            {2**22: 61, 2**23: 61 - (61 * 2**22 - 2870 * 10**9) // 2**23, 2**24: None},
        ),
        ("olmo/7b", "olmo_65b", 2048, {2**21: 47684, 2**22: 71526, 2**23: 83447, 2**24: None}),
    ],
)
def test_published_schedules(model, name, length, ends) -> None:
    files = [ROOT / "configs" / f"{model}.yml", ROOT / "examples" / "batch_schedules" / f"{name}.yml"]
    config = load(files, ["data.synthetic=copy", "data.train=[]"], check_inputs=False).config
    batches = batches_of(config)
    assert config.training.sequence_length == length
    assert {size * length: end for size, end in zip(batches.sizes, (*batches.begins[1:], None))} == ends


def test_deepseeks_schedule() -> None:
    """From 3,072 to 15,360 samples within 469B tokens, and 14.8T tokens in all."""
    files = [ROOT / "configs/deepseek_v3/671b.yml", ROOT / "examples/batch_schedules/deepseek_v3.yml"]
    config = load(files, ["data.synthetic=copy", "data.train=[]"], check_inputs=False).config
    batches = batches_of(config)
    assert batches.sizes == tuple(range(3072, 15361, 1024))
    last = batches.begins[-1]
    assert batches.before(last - 1) * 4096 < 469e9 <= batches.before(last) * 4096
    assert batches.before(config.training.steps) * 4096 == pytest.approx(14.8e12, rel=0.005)
