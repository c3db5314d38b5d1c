"""Which batch a step reads, against a list from which batches are taken away one after the other."""

from __future__ import annotations

import random

from megatron.config.arithmetic.batches import Batches
from megatron.data.loader import build_loader
from megatron.data.skipped_batches import LeftOut
from tests.data.make import configuration


def test_against_a_list() -> None:
    draw = random.Random(0)
    for _ in range(200):
        batches, pairs = list(range(400)), []
        for _ in range(draw.randrange(5)):
            step, count = draw.randrange(60), draw.randrange(1, 20)
            pairs.append((step, count))
            del batches[step : step + count]
        left_out = LeftOut.of([list(pair) for pair in pairs])
        assert [left_out.batch(step) for step in range(200)] == batches[:200]
        places = {batch: step for step, batch in enumerate(batches)}
        assert [left_out.step(batch) for batch in range(300)] == [places.get(batch) for batch in range(300)]
        assert left_out.total == 400 - len(batches) and bool(left_out) == bool(pairs)


def test_of_several_sizes_against_a_list() -> None:
    """A pair takes away the samples that its steps would read without it. Later steps keep their sizes."""
    draw = random.Random(1)
    for _ in range(100):
        begins = (0, *sorted(draw.sample(range(1, 60), 3)))
        batches = Batches(tuple(draw.randrange(1, 9) for _ in begins), begins)
        samples, pairs = list(range(3000)), []
        for _ in range(draw.randrange(4)):
            step, count = draw.randrange(50), draw.randrange(1, 10)
            pairs.append((step, count))
            del samples[batches.before(step) : batches.before(step + count)]
        left_out = LeftOut(tuple(pairs)).in_samples(batches)
        assert [left_out.batch(place) for place in range(500)] == samples[:500]
        places = {sample: place for place, sample in enumerate(samples)}
        assert [left_out.step(sample) for sample in range(600)] == [places.get(sample) for sample in range(600)]


def test_a_loader_of_several_sizes_reads_each_sample_once() -> None:
    """On two ranks: 4 batches of 4, then of 8. Step 2 skips three batches, which are 4, 4 and 8 samples."""
    training = {
        "steps": 8,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "batch_schedule": [{"until": 4, "global_batch_size": 4}],
    }
    data = {"synthetic": "copy", "left_out": [{"step": 2, "batches": 3}]}
    config = configuration(data, 2, training=training)
    loaders = [build_loader(config, data_rank=rank, data_ranks=2) for rank in range(2)]
    order = [*range(8), *range(24, 64)]
    for step in range(8):
        ids = [loader.read(step).sample_ids for loader in loaders]
        size = 4 if step < 4 else 8
        assert [tuple(each.shape) for each in ids] == [(size // 4, 2)] * 2
        found = [int(ids[place // 2 % 2][place // 4, place % 2]) for place in range(size)]
        wanted, order = order[:size], order[size:]
        assert found == wanted
