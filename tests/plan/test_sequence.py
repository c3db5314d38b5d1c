"""Messages of ranks that share a sequence: the plan's formulas equal a rehearsed rank of the real program."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from megatron.config import resolve
from megatron.parallel.messages.traffic import Tally
from megatron.plan.devices import cluster
from megatron.plan.prediction import choice_of
from megatron.plan.sequence import exchanges
from megatron.plan.shapes import Shapes
from megatron.plan.step import StepEstimator
from megatron.rehearsal.command import PRELOADED
from tests.training.matrix import merged

BASE = {
    "model": {"layers": "(attention/mlp) x2", "hidden_size": 32, "vocab_size": 96,
              "attention": {"heads": 4, "kv_heads": 2}},
    "training": {"steps": 1, "sequence_length": 32, "micro_batch_size": 2, "global_batch_size": 2},
    "parallel": {"context": 4},
    "data": {"synthetic": "copy"},
}  # fmt: skip
FULL = {"training": {"activation_checkpointing": {"mode": "full"}}}
SELECTIVE = {"training": {"activation_checkpointing": {"mode": "selective"}}}
RING = {"parallel": {"context_method": "ring"}}
NESTED = {"parallel": {"context_method": "nested", "context_ulysses": 2}}
GATHER = {"parallel": {"context_method": "gather"}}
CASES = {
    "ulysses": {},
    "ulysses, bf16, selective": {**SELECTIVE, "precision": "bf16"},
    "ring": RING,
    "ring, bf16, full": merged(RING, FULL, {"precision": "bf16"}),
    "ring, selective": merged(RING, SELECTIVE),
    "nested, bf16": {**NESTED, "precision": "bf16"},
    "nested, full": merged(NESTED, FULL),
    "gather": GATHER,
    "gather, full": merged(GATHER, FULL),
}


def sent(names: list[str]) -> dict[str, list]:
    """In a process of its own: the messages of rank 1 on four, by case."""
    from megatron.rehearsal.rank import rehearse_rank

    return {name: rehearse_rank(resolve(merged(BASE, CASES[name]), ranks=4), 4, 1).messages for name in names}


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, list]:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(sent, list(CASES)).result()


@pytest.mark.parametrize("name", CASES)
def test_messages_are_those_of_the_program(rehearsed, name):
    config = resolve(merged(BASE, CASES[name]), ranks=4)
    mixer, choice = config.model.blocks[0].mixers[0], choice_of(config)
    wanted: dict[tuple[str, bool], tuple[int, float]] = {}
    for each in exchanges(config, mixer, choice):
        key = (each.operation, each.backward)
        messages, size = wanted.get(key, (0, 0.0))
        wanted[key] = messages + each.messages, size + each.size
    found: dict[tuple[str, bool], tuple[int, float]] = {}
    for call, messages, size in Tally.of_rows(rehearsed[name]):
        if call.layer.startswith("layers.0") and call.operation != "recv" and "context" in call.group:
            key = (call.operation, call.phase != "forward")
            before = found.get(key, (0, 0.0))
            found[key] = before[0] + messages, before[1] + size
    assert found == wanted


def test_a_step_has_their_time():
    """On one host of H100, long sequences, one key head per query head: heads for tokens are fewer bytes than all keys
    for all ranks. Of a ring, attention hides what it can."""
    seconds = {}
    for name in ("ulysses", "ring", "gather"):
        long = {"training": {"sequence_length": 2**17}, "model": {"attention": {"kv_heads": 4}}}
        config = resolve(merged(BASE, CASES[name], long), ranks=4)
        at = cluster(4, "h100")
        seconds[name] = StepEstimator(config, Shapes(config, 4), at).step(config, choice_of(config)).parts["context"]
    assert 0 < seconds["ulysses"] < seconds["gather"]
    assert 0 <= seconds["ring"] < seconds["gather"]
