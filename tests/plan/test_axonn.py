"""AxoNN's model against what its authors' program gives (axonn-ai/Megatron-AxoNN, examples/comm_model.py)."""

from __future__ import annotations

import pytest

from megatron.plan.axonn import FRONTIER, PERLMUTTER, AxonnGrid, AxonnWork, best, seconds

MODELS = {
    "5B": (24, 4096, 4),
    "20B": (32, 7168, 16),
    "40B": (38, 9216, 32),
    "80B": (42, 12288, 64),
}  # blocks, width, least devices of a copy


@pytest.mark.parametrize(
    "machine, model, devices, batch, grid, expected",
    [
        (PERLMUTTER, "5B", 64, 16, AxonnGrid(2, 4, 8, 1), 0.3002),
        (PERLMUTTER, "5B", 64, 16, AxonnGrid(2, 4, 4, 2), 0.3072),
        (PERLMUTTER, "5B", 64, 16, AxonnGrid(2, 4, 2, 4), 0.3213),
        (PERLMUTTER, "5B", 64, 16, AxonnGrid(8, 1, 8, 1), 0.3445),
        (PERLMUTTER, "20B", 256, 64, AxonnGrid(2, 4, 32, 1), 1.0234),
        (PERLMUTTER, "20B", 256, 64, AxonnGrid(2, 4, 16, 2), 1.0305),
        (PERLMUTTER, "40B", 512, 128, AxonnGrid(2, 4, 64, 1), 1.8748),
        (PERLMUTTER, "80B", 1024, 256, AxonnGrid(2, 8, 64, 1), 3.2769),
        (PERLMUTTER, "80B", 1024, 256, AxonnGrid(2, 8, 32, 2), 3.2838),
        (FRONTIER, "20B", 256, 64, AxonnGrid(2, 8, 16, 1), 2.7050),
        (FRONTIER, "80B", 1024, 256, AxonnGrid(2, 8, 64, 1), 8.4117),
    ],
)
def test_the_authors_figures(machine, model, devices, batch, grid, expected):
    blocks, hidden, least = MODELS[model]
    work = AxonnWork(blocks, hidden, batch)
    assert seconds(machine, work, grid) == pytest.approx(expected, abs=5.1e-5)
    ranked = best(machine, work, devices, least)
    assert any(grid == found for _, found in ranked)
    firsts = {
        "5B": AxonnGrid(2, 4, 8, 1),
        "20B": AxonnGrid(2, 4, 32, 1),
        "40B": AxonnGrid(2, 4, 64, 1),
        "80B": AxonnGrid(2, 8, 64, 1),
    }
    if machine is PERLMUTTER:
        assert ranked[0][1] == firsts[model]


def test_a_large_batch_prefers_depth_alone():
    """With at least a sample for each device no matrix is worth cutting: that is ZeRO 3."""
    time, grid = best(PERLMUTTER, AxonnWork(24, 4096, 512), 64, 4)[0]
    assert grid == AxonnGrid(1, 1, 64, 1) and time == pytest.approx(0.332, abs=5e-4)


def test_the_number_of_grids():
    assert len(best(PERLMUTTER, AxonnWork(24, 4096, 16), 64, 4)) == 65
