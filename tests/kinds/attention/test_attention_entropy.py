"""The entropy of attention, of every kind that attends: against each query's softmax written out in float64.

The probabilities that are written out must give the layer's own result with its values, so the layer uses them, and the
entropy is theirs.
"""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from megatron.config import resolve
from megatron.kinds.common.attention.entropy import AttentionEntropy
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.model.parity import randomise

MODULES = ("attention", "mla", "cca")
S = 14
GROUPED = {"heads": 4, "kv_heads": 2}
CASES = {
    "grouped": {"model": {"layers": "(attention/mlp) x2", "attention": GROUPED}},
    "window": {"model": {"layers": "attention/mlp", "attention": {**GROUPED, "window": 5}}},
    "alibi": {"model": {"layers": "attention/mlp", "attention": {"heads": 4, "position": "alibi"}}},
    "softcap": {"model": {"layers": "attention/mlp", "attention": {"heads": 4, "softcap": 0.5}}},
    "sinks": {"model": {"layers": "attention/mlp", "attention": {**GROUPED, "sinks": True}}},
    "scale, window and sinks": {
        "model": {"layers": "attention/mlp", "attention": {"heads": 2, "scale": 0.7, "window": 4, "sinks": True}}
    },
    "documents": {"model": {"layers": "attention/mlp", "attention": GROUPED}, "data": {"reset_attention_at_eod": True}},
    "documents and window": {
        "model": {"layers": "attention/mlp", "attention": {**GROUPED, "window": 3}},
        "data": {"reset_attention_at_eod": True},
    },
    "mla": {
        "model": {
            "layers": "(mla/mlp) x2",
            "mla": {"heads": 2, "kv_rank": 16, "query_rank": 12, "nope_dim": 8, "rope_dim": 4, "value_dim": 6},
        }
    },
    "cca": {"model": {"layers": "cca/mlp", "cca": {"heads": 4, "kv_heads": 2, "head_dim": 8}}},
    "cca, documents": {
        "model": {"layers": "cca/mlp", "cca": {"heads": 4, "kv_heads": 2, "head_dim": 8, "window": 6}},
        "data": {"reset_attention_at_eod": True},
    },
    "shared attention": {
        "model": {
            "layers": "(mamba2+shared_attention) x2",
            "mamba2": {"head_dim": 8, "state_size": 8},
            "shared_attention": {"heads": 4, "blocks": 1, "adapter_rank": 4, "attention_adapters": True},
        }
    },
}


def written_out(q: Tensor, k: Tensor, pattern, documents: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Probabilities [B, n, S, S], a query after the other. A sink takes the part that they lack of 1."""
    B, n, _, _ = q.shape
    found = torch.zeros(B, n, S, S, dtype=DOUBLE)
    for b in range(B):
        for head in range(n):
            for i in range(S):
                weights = {}
                for j in range(i + 1):
                    apart = documents is not None and documents[b, i] != documents[b, j]
                    if apart or (pattern.window is not None and i - j >= pattern.window):
                        continue
                    own = k[b, head * k.shape[1] // n, j]
                    logit = float(q[b, head, i].double() @ own.double()) * pattern.scale
                    if pattern.softcap:
                        logit = pattern.softcap * math.tanh(logit / pattern.softcap)
                    if pattern.slopes is not None:
                        logit += pattern.slopes[head] * (j - i)
                    weights[j] = math.exp(logit)
                total = sum(weights.values()) + (0 if sinks is None else math.exp(float(sinks[head])))
                for j, weight in weights.items():
                    found[b, head, i, j] = weight / total
    return found


def entropy_of(probabilities: Tensor) -> Tensor:
    """Of each query [B, n, S], with the sink's share."""
    sink = (1 - probabilities.sum(-1)).clamp(min=0)
    sink = torch.where(sink < 1e-13, 0.0, sink)
    return -torch.special.xlogy(probabilities, probabilities).sum(-1) - torch.special.xlogy(sink, sink)


@pytest.mark.parametrize("name", CASES)
def test_entropy_is_that_of_the_layers_own_probabilities(name, monkeypatch):
    case = CASES[name]
    config = resolve({
        "training": {"steps": 1, "sequence_length": S, "micro_batch_size": 2, "global_batch_size": 2},
        "tokenizer": {"eod_id": 0},
        **case,
        "model": {"hidden_size": 32, "vocab_size": 40, **case["model"]},
        "data": {"synthetic": "copy", **case.get("data", {})},
    })
    model = build_model(config, dtype=DOUBLE)
    randomise(model, 3)
    seen: list[tuple[Tensor, Tensor]] = []
    for kind in MODULES:
        module = importlib.import_module(f"megatron.kinds.{kind}.layer")
        plain = module.attend_in

        def attend(context, q, k, v, pattern, stream, dropout=None, sinks=None, elsewhere=None, plain=plain):
            y = plain(context, q, k, v, pattern, stream, dropout, sinks, elsewhere)
            probabilities = written_out(q, k, pattern, stream.documents, sinks)
            values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
            assert torch.allclose(probabilities @ values, y, rtol=EXACT, atol=EXACT)
            seen.append(entropy_of(probabilities))
            return y

        monkeypatch.setattr(module, "attend_in", attend)
    measured = [
        each.entropy for each in model.modules() if isinstance(getattr(each, "entropy", None), AttentionEntropy)
    ]
    for each in measured:
        each.begin()
    tokens = torch.randint(1, 40, (2, S), generator=torch.Generator().manual_seed(1))
    extras = {}
    if config.data.reset_attention_at_eod:
        documents = torch.tensor([[0] * 6 + [1] * 8, [0] * 1 + [1] * 4 + [2] * 9], dtype=torch.int32)
        begins = [[documents[b].tolist().index(int(each)) for each in documents[b]] for b in range(2)]
        extras = {"documents": documents, "positions": torch.arange(S) - torch.tensor(begins)}
    with torch.no_grad():
        model.train().logits(tokens, **extras)
    found = [each.finish() for each in measured]
    total, count = float(sum(each for each, _ in found)), sum(count for _, count in found)
    assert count == sum(each.numel() for each in seen) > 0
    assert total == pytest.approx(float(sum(each.sum() for each in seen)), rel=EXACT)
    assert 0 < total / count < math.log(S + 1)
