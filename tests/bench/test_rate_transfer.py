"""The benchmark of rates over widths: the base width is the same model under both parametrizations, others are not."""

from __future__ import annotations

import math

from bench.learning import rate_transfer


def test_the_base_agrees_and_wider_models_differ(tmp_path):
    found = rate_transfer.sweep([16, 32], [2.0**-7, 2.0**-5], steps=3, seeds=1)
    assert found["standard"][16] == found["mup"][16]
    assert all(found["standard"][32][rate] != found["mup"][32][rate] for rate in (2.0**-7, 2.0**-5))
    assert all(math.isfinite(loss) for widths in found.values() for by in widths.values() for loss in by.values())
    text = rate_transfer.table(found)
    assert text.count("**") == 2 * 4 and "| width 32 |" in text and "| mup | 2^-7 | 2^-5 |" in text
    rate_transfer.picture(found, str(tmp_path / "rates.png"))
    assert (tmp_path / "rates.png").read_bytes()[:4] == b"\x89PNG"
