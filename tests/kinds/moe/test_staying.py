"""Tokens that stay with their experts: the bits of the way with two exchanges, and messages by formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.config import resolve
from megatron.decoding.covered import evaluation_problem
from megatron.decoding.decoder import Decoder
from megatron.decoding.sampling import Sampling
from megatron.decoding.schedule import Request
from megatron.evaluation.scoring import Scorer
from megatron.kinds.moe.staying import Staying
from megatron.kinds.moe.trace import traced
from megatron.parallel.layers.parameters import stored_tensors
from tests.selection import toured
from tests.training import runs
from tests.training.matrix import merged
from tests.workers import run

EXPERTS, LAYERS, TOKENS = 8, (1, 3, 4), 6
KINDS: dict[str, dict[str, Any]] = {
    "one expert": {"top_k": 1},
    "two experts, a shared one": {"top_k": 2, "shared_size": 24, "router": {"score": "sigmoid", "normalize": True}},
}


def settings(kind: str, ranks: int) -> dict[str, Any]:
    layers = "attention/mlp attention/moe attention/mlp (attention/moe) x2"
    moe = {"experts": EXPERTS, "hidden_size": 24, **KINDS[kind]}
    return {
        "model": {"layers": layers, "hidden_size": 32, "vocab_size": 61, "attention": {"heads": 4, "kv_heads": 2}}
        | {"norm": {"type": "rmsnorm"}, "moe": moe, "residual": {"block_scale": True}},
        "training": {"steps": 1, "sequence_length": 96, "global_batch_size": 4, "micro_batch_size": 1},
        "parallel": {"expert": ranks},
        "zero": {"stage": 0},
        "precision": {"compute": "fp32"},
        "schedule": {"type": "constant"},
        "optimizer": {"type": "schedule_free_adamw"},  # its weights of an evaluation are written when one begins
        "evaluation": {"at_end": False},
    }


def requests() -> list[Request]:
    """All of one length, so that they grow together."""
    draw = torch.Generator().manual_seed(7)
    prompts = torch.randint(60, (11, 35), generator=draw).tolist()
    sampling = Sampling(0.8, seed=3)
    return [Request(tuple(prompt), TOKENS, at, sampling) for at, prompt in enumerate(prompts)]


def others() -> list[Request]:
    """Of many lengths, with common beginnings, more than run at once."""
    draw = torch.Generator().manual_seed(8)
    stem = torch.randint(60, (40,), generator=draw).tolist()
    return [Request((*stem[: 3 + 7 * at], at), 2 + at % 4, at, Sampling(0.9, seed=1)) for at in range(6)]


def places(ranks: int) -> dict[int, list[list[int]]]:
    draw = np.random.default_rng(5)
    return {at: draw.permutation(EXPERTS).reshape(ranks, -1).tolist() for at in LAYERS}


class Counter:
    """Rows of floats that this rank sends to others by all-to-alls, counted below the layers."""

    def __init__(self) -> None:
        self.calls = self.rows = 0
        self.plain = dist.all_to_all_single

    def __call__(self, out: torch.Tensor, x: torch.Tensor, *sizes: Any, group: Any = None) -> Any:
        if x.is_floating_point():
            self.calls += 1
            self.rows += len(x) - sizes[1][dist.get_group_rank(group, dist.get_rank())]
        return self.plain(out, x, *sizes, group=group)


def on_ranks(kind: str, ranks: int, path: str | None) -> dict[str, Any]:
    values = settings(kind, ranks)
    values["evaluation"] |= {"placement": path} if path else {}
    config, engine = runs.start(values, ranks)
    assert evaluation_problem(config) is None
    found: dict[str, Any] = {}

    def drawn(engine: Any, asked: list[Request], **how: Any) -> Any:
        decoder, logits = Decoder(engine, "cpu", **how), {}
        decoder.logits = lambda live, place, row: logits.__setitem__((live.request.number, place), row.clone())
        return decoder.run(asked), logits

    found["two"] = drawn(engine, requests())
    found["two, others"] = drawn(engine, others(), rows=3, budget=24)
    config, other = runs.start(values, ranks)
    scorer = Scorer.of_tasks(config, other, other.mesh, other.device, 3, moves=True)
    staying: Any = scorer.staying or Staying(other)
    counter = Counter()
    dist.all_to_all_single = counter
    try:
        drawn(staying, [replace(each, tokens=1) for each in requests()])  # the passes of the prompts
        found["rows before"], found["calls before"] = counter.rows, counter.calls
        counter.rows = counter.calls = 0
        found["one"] = drawn(staying, requests())
        found["passes"] = staying.moved.passes
        found["moved"], found["calls"], found["rows"] = replace(staying.moved), counter.calls, counter.rows
        found["one, others"] = drawn(staying, others(), rows=3, budget=24)
        found["scorer"] = scorer.answer(requests())
    finally:
        dist.all_to_all_single = counter.plain
    return found


def chosen(kind: str, texts: list[list[int]]) -> np.ndarray:
    """The experts [layers, texts, tokens, k] of texts by a whole model."""
    from megatron.model.stack import build_model

    model = build_model(resolve({**settings(kind, 1), "parallel": {}}), dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in stored_tensors(model):
            tensor.add_(torch.from_numpy(runs.noise(tensor.logical)).to(tensor.dtype))
    return np.stack([experts.numpy() for experts, _ in traced(model, torch.tensor(texts)).values()])


def wanted(kind: str, ranks: int, placed: bool, texts: list[list[int]]) -> tuple[int, int]:
    """Rows that go to another rank: of tokens that follow their best expert, and of other experts and back."""
    order = places(ranks) if placed else {at: np.arange(EXPERTS).reshape(ranks, -1).tolist() for at in LAYERS}
    where = [{e: rank for rank, own in enumerate(order[at]) for e in own} for at in LAYERS]
    experts, moves, back = chosen(kind, texts), 0, 0
    for text in range(len(texts)):
        for place in range(experts.shape[2] - (TOKENS - 1), experts.shape[2]):
            now = text * ranks // len(texts)
            for layer in range(len(LAYERS)):
                best, *more = (where[layer][each] for each in experts[layer, text, place].tolist())
                moves, now = moves + (best != now), best
                back += 2 * sum(each != now for each in more)
    return moves, back


@pytest.mark.parametrize(
    ("kind", "ranks", "placed"),
    toured([("one expert", 2, True), ("two experts, a shared one", 4, True), ("one expert", 4, False)], "layouts"),
)
def test_one_exchange_has_the_bits_of_two(tmp_path: Path, kind: str, ranks: int, placed: bool) -> None:
    path = tmp_path / "places.json"
    path.write_text(json.dumps({"experts": places(ranks)}))
    results = run(ranks, on_ranks, kind, ranks, str(path) if placed else None)
    drawn, logits = results[0]["two"]
    before = sum(each["rows before"] for each in results)
    for each in results:
        for name, (made, rows) in (("one", (drawn, logits)), ("one, others", results[0]["two, others"])):
            assert each[name][0] == made
            assert all(row.equal(each[name][1][key]) for key, row in rows.items())
    assert all(each["scorer"] == drawn for each in results)
    texts = [[*request.prompt, *own.tokens[:-1]] for request, own in zip(requests(), drawn)]
    moves, back = wanted(kind, ranks, placed, texts)
    moved = [each["moved"] for each in results]
    assert {each["passes"] for each in results} == {TOKENS - 1}
    assert (sum(each.rows for each in moved), sum(each.others for each in moved)) == (moves, back)
    assert sum(each["rows"] for each in results) - before == moves + back
    top_k = KINDS[kind]["top_k"]
    calls = {each["calls"] - each["calls before"] for each in results}
    assert calls == {len(LAYERS) * (TOKENS - 1) * (1 if top_k == 1 else 3)}
    assert all(each.layers == len(LAYERS) * (TOKENS - 1) for each in moved)
    assert all(each.exchanges == each.layers * (1 if top_k == 1 else 3) for each in moved)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"layers": "attention/mlp x2"}, "parallel": {"expert": 1}}, "layers with experts"),
        ({"model": {"layers": "mlp moe"}}, "layers with keys"),
        ({"model": {"layers": "attention/moe mamba2"}}, "recurrences"),
        ({"model": {"residual": {"form": "parallel"}}}, "must be sequential"),
        ({"model": {"moe": {"router": {"network": "mlp", "average": False}}}}, "routers must be linear"),
        ({"model": {"moe": {"router": {"select": "hash"}}}}, "select is hash"),
        ({"parallel": {"expert": 2, "tensor": 2}}, "expert parallel ranks only"),
        ({"parallel": {"expert": 2, "columns": 2}}, "expert parallel ranks only"),
        ({"parallel": {"expert": 2, "depth": 2}}, "expert parallel ranks only"),
        ({"parallel": {"expert": 1}}, "expert parallel ranks only"),
        ({"model": {"moe": {"capacity_factor": 1.0}}}, "experts with a capacity"),
    ],
)
def test_other_models_and_layouts_are_refused(changes: dict[str, Any], reason: str) -> None:
    values = merged(settings("one expert", 2), changes)
    values["evaluation"]["placement"] = "a.json"
    assert reason in str(evaluation_problem(resolve(values, ranks=4)))
