"""Which batch a step reads, against a list from which batches are taken away one after the other."""

from __future__ import annotations

import random

from megatron.data.skipped_batches import LeftOut


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
