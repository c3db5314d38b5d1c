"""Predicted costs against published numbers and the formula of compression."""

from __future__ import annotations

import pytest

from megatron.features.peers.costs import link_for, over_link, with_failures
from megatron.features.peers.sparse import bytes_of


def test_bytes_are_those_of_the_compression():
    """Tables of 16 bytes for each tensor are not in the prediction."""
    shape = (4096, 1024)
    assert over_link(4096 * 1024, 2, 1.0, 1e9, 1e9).sent == bytes_of(shape, 64) - 16


def test_covenant_72b():
    """arXiv 2603.08163: 20 minutes of steps and 70 s of communication are 94.5 %, with 16.9 contributors on average."""
    assert 1200 / (1200 + 70) == pytest.approx(0.945, abs=5e-4)
    link = over_link(72e9, 16.9, 1200, 1e9, 1e9)
    assert link.sent == pytest.approx(1.97e9, rel=1e-2)
    needed = link_for(72e9, 16.9, 1200, 0.945)
    assert over_link(72e9, 16.9, 1200, needed, needed).utilisation == pytest.approx(0.945)
    assert over_link(72e9, 16.9, 1200, needed, needed).seconds == pytest.approx(70, abs=0.5)


def test_healing_wins_with_more_devices():
    """The waste of restarts for one device count, term by term as in the page on faults: C = 30 s, M = 3.09 h."""
    at = {"save": 30.0, "start": 0.0, "notice": 0.0, "timeout": 30.0, "heal": 948.0}
    large = with_failures(16384, 8, **at)
    assert large.between == pytest.approx(3.09 * 3600, rel=3e-3)
    assert 1 - large.restart == pytest.approx(0.073, abs=1e-3)
    few, many = (with_failures(n, 8, **at, overhead=0.05) for n in (64, 65536))
    assert few.restart > few.healing and many.healing > many.restart
