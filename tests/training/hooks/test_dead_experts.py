"""Experts that die are reported, once, and so is their return. The defaults keep them alive."""

from __future__ import annotations

import pytest

from megatron.config import resolve
from megatron.training.hooks.experts import PATIENCE, DeadExpertsHook


def record(*loads: list[float]) -> dict:
    return {str(layer): {"load": load} for layer, load in enumerate(loads)}


EVEN, HALF = [0.25] * 4, [0.5, 0.5, 0.0, 0.001]


def test_dead_experts_are_told_once():
    hook = DeadExpertsHook(1, tokens=2048)
    assert [hook.look(record(EVEN, HALF)) for _ in range(PATIENCE - 1)] == [None] * (PATIENCE - 1)
    told = hook.look(record(EVEN, HALF))
    assert told.startswith("warning: 2 of 8 experts") and "2 of layer 1" in told and "layer 0" not in told
    assert hook.look(record(EVEN, HALF)) is None
    assert hook.look(record(EVEN, [0.5, 0.25, 0.25, 0.0])) is None  # one is back, one is not
    assert hook.look(record(EVEN, EVEN)) == "all 8 experts have tokens again"
    assert hook.look(record(EVEN, EVEN)) is None


def test_a_small_batch_says_nothing():
    hook = DeadExpertsHook(1, tokens=64)
    assert [hook.look(record(HALF)) for _ in range(5)] == [None] * 5


@pytest.mark.parametrize(
    "moe, wanted",
    [
        ({}, 0.01),
        ({"router": {"correction": "sign"}}, 0.0),
        ({"router": {"select": "sinkhorn"}}, 0.0),
        ({"losses": {"sequence": 0.1}}, 0.0),
        ({"losses": {"z": 0.1}}, 0.01),
        ({"losses": {"balance": 0.0}}, 0.0),
        ({"experts": 2}, 0.0),
    ],
)
def test_the_default_evens_what_nothing_else_does(moe: dict, wanted: float):
    """In the base and, by their own options, in variants."""
    model = {"layers": "attention/moe attention/moe@v", "hidden_size": 32, "vocab_size": 64, "attention": {"heads": 4}}
    training = {"steps": 1, "sequence_length": 8}
    base = resolve({"model": {**model, "moe": moe, "variants": {"v": {"top_k": 1}}}, "training": training})
    assert base.model.moe.losses.balance == wanted
    own = resolve({"model": {**model, "variants": {"v": moe or {"top_k": 1}}}, "training": training})
    found = own.model.variants["v"].get("losses", {}).get("balance", own.model.moe.losses.balance)
    assert found == wanted
