"""QK-clip on layouts, against one process that computes all logits of all heads and shrinks the rows of the masters."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.config import load, resolve
from megatron.kinds.common.attention import attend_across
from megatron.kinds.common.attention.pattern import Pattern
from megatron.model.logit_clip import largest_logits
from megatron.model.stack import build_model
from megatron.testing.ranks import on_ranks
from tests.training import runs
from tests.training.matrix import merged, read

STEPS = 2
LAYOUTS = {
    "one, ZeRO 0": {"ranks": 1, "zero": {"stage": 0}},
    "tp2 · pp2, ZeRO 1": {"ranks": 4, "parallel": {"tensor": 2, "pipeline": 2}},
    "tp2 · dp2, ZeRO 3": {"ranks": 4, "parallel": {"tensor": 2}, "zero": {"stage": 3, "persistent_size": 100}},
    "dp2, ZeRO 2, recomputation": {
        "ranks": 2,
        "zero": {"stage": 2},
        "training": {"activation_checkpointing": {"mode": "full"}},
    },
}
# Grouped queries with windows and documents. Every head its own keys, and biases, which noise makes other than 0.
MODELS = {
    "grouped": {
        "model": {
            "layers": "(attention/mlp attention@local/mlp) x2",
            "attention": {"kv_heads": 2, "qk_clip": 0.5},
            "variants": {"local": {"window": 5}},
        },
        "data": {"reset_attention_at_eod": True},
    },
    "own keys": {"model": {"attention": {"qkv_bias": True, "qk_clip": 0.5}}},
    "latent": {
        "model": {
            "layers": "(mla/mlp) x4",
            "mla": {"heads": 4, "query_rank": 12, "kv_rank": 8, "nope_dim": 6, "rope_dim": 4, "value_dim": 5,
                    "qk_clip": 0.05},
        },
    },
}  # fmt: skip
RECIPE = {
    "training": {"micro_batch_size": 2, "steps": STEPS},
    "optimizer": {"type": "sgd", "lr": 0.6, "momentum": 0.9, "weight_decay": 0.1, "gradient_clipping": 0.3},
}


def values_of(model: str) -> dict[str, Any]:
    return merged(read()["common"], MODELS[model], RECIPE)


def seen(q: torch.Tensor, k: torch.Tensor, pattern, documents) -> torch.Tensor:
    """The largest logit of each head, from the whole matrix of them."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    at = torch.arange(q.shape[2])
    visible = at[None, :] <= at[:, None]
    if pattern.window is not None:
        visible &= at[:, None] - at[None, :] < pattern.window
    visible = visible.expand(len(q), 1, -1, -1)
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    return torch.where(visible, q @ k.mT * pattern.scale, -torch.inf).amax((0, 2, 3))


def plainly(values: dict[str, Any]) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, largest logits and weights of one process of plain PyTorch."""
    config = resolve(values)
    kind = "mla" if "mla" in config.model.layers else "attention"
    own = getattr(config.model, kind)
    threshold = own.qk_clip
    begun, model = build_model(config), build_model(config)
    parameters = list(dict.fromkeys(model.parameters()))
    masters = [p.detach() + torch.from_numpy(runs.noise(p.logical)) for p in dict.fromkeys(begun.parameters())]
    optimizer = runs.PlainOptimizer(config, [p.logical for p in parameters], masters)
    named = {p.logical.name: master for p, master in zip(parameters, masters)}
    attend, losses, tops = attend_across.attend, [], []
    calls: list[torch.Tensor] = []

    def watched(q, k, v, pattern, *, documents_BS=None, **more):
        calls.append(seen(q.detach(), k.detach(), pattern, documents_BS))
        return attend(q, k, v, pattern, documents_BS=documents_BS, **more)

    for step in range(STEPS):
        runs.load(parameters, masters, torch.float32)
        calls.clear()
        with mock.patch.object(attend_across, "attend", watched):
            loss, gradients = runs.plain_gradients(config, model, parameters, step)
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients))
        optimizer.step([g * min(1.0, 0.3 / (float(norm) + 1e-6)) for g in gradients])
        largest = [torch.stack(calls[layer::4]).amax(0) for layer in range(4)]
        for layer, each in enumerate(largest):
            factors = (threshold / each).clamp(max=1.0)
            for head, factor in enumerate(factors.tolist()):
                shrink = shrink_latent if kind == "mla" else shrink_head
                shrink(named, f"layers.{layer}.{kind}", own, head, factor)
        losses.append(loss)
        tops.append(float(torch.stack(largest).max()))
    return losses, tops, {name: master.numpy().reshape(-1) for name, master in named.items()}


def shrink_head(named: dict[str, torch.Tensor], prefix: str, own: Any, head: int, factor: float) -> None:
    rows, shared = slice(head * own.head_dim, (head + 1) * own.head_dim), own.kv_heads < own.heads
    for each in ("weight", "bias"):
        if f"{prefix}.query.{each}" in named:
            named[f"{prefix}.query.{each}"][rows] *= factor if shared else factor**0.5
            named[f"{prefix}.key_value.{each}"][rows] *= 1.0 if shared else factor**0.5


def shrink_latent(named: dict[str, torch.Tensor], prefix: str, own: Any, head: int, factor: float) -> None:
    """Queries that positions turn, the other queries, keys of this head. Then the head's values, which stay."""
    query, keys = named[f"{prefix}.query.weight"], named[f"{prefix}.key_value.weight"]
    begin = head * (own.rope_dim + own.nope_dim)
    query[begin : begin + own.rope_dim] *= factor
    query[begin + own.rope_dim : begin + own.rope_dim + own.nope_dim] *= factor**0.5
    begin = head * (own.nope_dim + own.value_dim)
    keys[begin : begin + own.nope_dim] *= factor**0.5


def clipped(values: dict[str, Any], ranks: int) -> tuple[list[float], list[dict], list]:
    """On every rank: losses, the steps' numbers of logits, and fragments of the masters."""
    config, engine = runs.start(values, ranks)
    data, losses, told = engine.mesh.data, [], []
    for step in range(STEPS):
        result = engine.step(runs.local_batch(config, step, data.rank, data.size), config.optimizer.lr)
        tokens = float(result.tokens)
        losses.append(runs.mean(float(result.loss) * tokens if tokens else 0.0, tokens)[0])
        told.append(dict(result.extras["attention_logits"]))
    return losses, told, runs.portable(f for f in engine.state.fragments() if f.state == "master")


@pytest.mark.layouts
@pytest.mark.parametrize("model", MODELS)
def test_layouts_clip_as_one_process(model):
    values = values_of(model)
    losses, tops, weights = plainly(values)
    kind = "mla" if model == "latent" else "attention"
    without, _, _ = plainly(merged(values, {"model": {kind: {"qk_clip": 1e9}}}))
    assert abs(losses[-1] - without[-1]) > 1e-3, "nothing was clipped, so this proves nothing"
    for name, own in LAYOUTS.items():
        cut = {key: value for key, value in own.items() if key != "ranks"}
        results = on_ranks(own["ranks"], clipped, merged(values, cut), own["ranks"])
        for found, told, _ in results:
            np.testing.assert_allclose(found, losses, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose([each["largest"] for each in told], tops, rtol=1e-5, err_msg=name)
            assert told == results[0][1] and told[0]["clipped_heads"] > 0
        found = {key: value for (key, _), value in runs.assemble([result[2] for result in results]).items()}
        for key, value in found.items():
            error = np.linalg.norm(value - weights[key]) / np.linalg.norm(weights[key])
            assert error < 1e-5, f"{key} on {name}: {error}"


def test_the_largest_logits_are_those_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr("megatron.model.logit_clip.ROWS", 3)
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 11, 8, generator=draw, dtype=torch.float64)
    k = torch.randn(2, 2, 11, 8, generator=draw, dtype=torch.float64)
    documents = (torch.rand(2, 11, generator=draw) < 0.2).int().cumsum(-1)
    for window in (None, 1, 4, 20):
        for which in (None, documents):
            pattern = Pattern(0.3, window)
            torch.testing.assert_close(largest_logits(q, k, 0.3, window, which), seen(q, k, pattern, which))


def test_clipping_after_updates_is_no_part_of_what_a_model_computes():
    """So a model that was trained with it can be exported."""
    from megatron.checkpoint.hf.config import differences

    for name, kind in (("tiny_llama", "attention"), ("tiny_deepseek_v2", "mla")):
        file, clip = f"configs/test/{name}.yml", f"model.{kind}.qk_clip=50"
        plain, clipped = (load([file], given, ranks=1).config.model for given in ([], [clip]))
        assert plain != clipped and differences(clipped, plain) == []
