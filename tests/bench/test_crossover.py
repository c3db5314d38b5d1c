"""The benchmark of sequence lengths on a tiny shape, and where it says that speeds cross."""

from __future__ import annotations

import time

import pytest

from bench.step.contenders import has
from bench.step.crossover import KINDS, crossover, model_of, speeds
from bench.step.setup import SHAPES, Setup, configuration


def test_crossover_is_between_the_lengths_that_enclose_it():
    assert crossover({256: 0.5, 512: 2.0}) == pytest.approx(256 * 2**0.5)
    assert crossover({256: 0.5, 512: 1.2, 1024: 0.8, 2048: 1.25}) == pytest.approx(1024 * 2**0.5)  # for good
    assert crossover({256: 0.5, 512: 0.9}) is None
    assert crossover({256: 1.1, 512: 1.9}) == 0


def test_kinds_have_about_equal_parameters():
    sizes = [model_of(kind, 128, 1, 32)[1] for kind in KINDS]
    assert max(sizes) < 1.5 * min(sizes)


def test_every_kind_is_timed_at_every_length():
    found, _ = speeds(32, 1, [16, 32], 64, 1, time.process_time)
    assert set(found) == {16, 32}
    for row in found.values():
        assert set(row) == set(KINDS) and all(value > 0 for value in row.values())


def test_contenders_of_a_shape():
    assert [name for name in ("ours", "eager", "compiled", "fla") if has(name, "rwkv7-14m")] == ["ours", "fla"]
    assert not has("fla", "mamba2-14m") and has("compiled", "mamba2-14m")


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("rwkv7")])
def test_rwkv_shapes_resolve(shape: str):
    assert configuration(Setup(shape, 64, 1)).model.layers.startswith("(rwkv7/rwkv7_ffn)")
