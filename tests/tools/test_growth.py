"""What grows with the world, counted: no rank has more groups, and nothing grows faster than the world."""

from __future__ import annotations

import pytest

from tools.bench.growth import PIPELINE, TENSOR, checkpoint, groups, launcher


@pytest.mark.parametrize("world", [160, 1600])
def test_groups_of_a_rank(world: int):
    """One of each axis that it shares: tensor, pipeline and data; their members are the axes' sizes."""
    found = groups(world)
    assert found["groups"] == 3 and found["members"] == TENSOR + PIPELINE + world // (TENSOR * PIPELINE)


def test_a_rank_of_a_ten_times_larger_world_holds_ten_times_as_much_at_most():
    """Bytes, which no load of the machine changes."""
    small, large = checkpoint(160), checkpoint(1600)
    for name in ("manifest: KiB read", "index: KiB mapped", "open: KiB"):
        assert large[name] < 10.5 * small[name]
    hosts = [launcher(world)["launch: KiB to a host"] for world in (160, 1600)]
    assert hosts[1] - hosts[0] < 0.02  # digits of the numbers of hosts and ranks
