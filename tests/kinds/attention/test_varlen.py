"""Attention of documents by FlashAttention of variable lengths, its kernels emulated on a CPU, against masks."""

from __future__ import annotations

import pytest
import torch

from megatron.config import resolve
from megatron.config.variants import overlay
from megatron.data.batch import StepBatch
from megatron.data.errors import DataError
from megatron.engine.parts.document_limit import document_limit, refuse_more_documents
from megatron.kinds.common.attention import attend as paths
from megatron.kinds.common.attention.attend import attend, choose
from megatron.kinds.common.attention.pattern import Pattern, alibi_slopes
from megatron.kinds.common.attention.varlen import attend_by_documents, begins
from megatron.model.stack import build_model
from tests.float64 import DOUBLE, EXACT
from tests.kinds.attention.flash_on_cpu import flash_attention
from tests.model.parity import relative

B, HEADS, KV, S, D = 2, 4, 2, 24, 8
DOCUMENTS = {
    "several": [[0] * 9 + [1] * 15, [0] * 3 + [1] * 4 + [2] * 17],
    "one": [[0] * S, [0] * S],
    "as many as tokens": [list(range(S)), [0] * S],
}


@pytest.mark.parametrize("most", [24, 50])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_where_documents_begin(name: str, most: int):
    found = begins(torch.tensor(DOCUMENTS[name]), most)
    assert found.dtype == torch.int32 and found.shape == (B * most + 1,)
    wanted = [
        row * S + place
        for row, numbers in enumerate(DOCUMENTS[name])
        for place in range(S)
        if not place or numbers[place] != numbers[place - 1]
    ]
    assert found.tolist() == wanted + [B * S] * (B * most + 1 - len(wanted))


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DOUBLE)


@pytest.mark.parametrize("window", [None, 5, S])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_results_and_gradients_are_those_of_masks(name: str, window: int | None):
    pattern, documents = Pattern(0.3, window, most_documents=S), torch.tensor(DOCUMENTS[name])
    grad, results = drawn(B, HEADS, S, D, seed=9), []
    for masked in (False, True):
        inputs = [
            drawn(B, S, heads, D, seed=seed).transpose(1, 2).detach().requires_grad_()
            for seed, heads in enumerate((HEADS, KV, KV))
        ]
        with flash_attention():
            y = (
                attend(*inputs, pattern, documents_BS=documents)
                if masked
                else attend_by_documents(*inputs, pattern, begins(documents, S))
            )
            y.backward(grad)
        results.append([y.detach(), *(each.grad for each in inputs)])
    for found, wanted in zip(*results, strict=True):
        assert relative(found, wanted) < EXACT


SLOPES = tuple(alibi_slopes(HEADS))


@pytest.mark.parametrize(
    "pattern, facts, wanted",
    [
        (Pattern(1.0, most_documents=8), {}, "varlen"),
        (Pattern(1.0, window=8, most_documents=8), {}, "varlen"),
        (Pattern(1.0), {}, "flex"),
        (Pattern(1.0, most_documents=8), {"documents": False}, "causal"),
        (Pattern(1.0, window=8, most_documents=8), {"documents": False}, "flex"),
        (Pattern(1.0, most_documents=8), {"device": "cpu"}, "masked"),
        (Pattern(1.0, most_documents=8), {"flash": False}, "flex"),
        (Pattern(1.0, most_documents=8), {"sinks": True}, "flex"),
        (Pattern(1.0, most_documents=8), {"dropout": 0.1}, "math"),
        (Pattern(1.0, most_documents=8), {"square": False}, "masked"),
        (Pattern(1.0, softcap=2.0, most_documents=8), {}, "flex"),
        (Pattern(1.0, slopes=SLOPES, most_documents=8), {}, "flex"),
    ],
)
def test_the_choice(pattern: Pattern, facts: dict, wanted: str):
    usual = {"documents": True, "keys": 64, "square": True, "dropout": 0.0, "device": "cuda"}
    assert choose(pattern, **{**usual, **facts})[0] == wanted


SETTINGS = {
    "model": {
        "layers": "(attention/mlp attention@near/mlp) x1",
        "hidden_size": 32,
        "vocab_size": 64,
        "attention": {"heads": 4, "kv_heads": 2},
        "variants": {"near": {"window": 6}},
    },
    "precision": {"compute": "bf16"},
    "data": {"synthetic": "copy", "reset_attention_at_eod": True},
    "tokenizer": {"eod_id": 0},
    "training": {"steps": 1, "sequence_length": S, "micro_batch_size": B, "global_batch_size": B},
}


def gradients(**settings) -> tuple[float, torch.Tensor]:
    """Loss and all gradients of a model, in float64."""
    config = resolve(overlay(SETTINGS, settings), check_inputs=False)
    model = build_model(config, dtype=DOUBLE)
    tokens = torch.randint(1, 64, (B, S + 1), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor(DOCUMENTS["several"])
    places = torch.cat([torch.arange(n) for n in (9, 15, 3, 4, 17)]).view(B, S)
    weights = torch.full((B, S), 1 / (B * S), dtype=DOUBLE)
    loss, _ = model(tokens[:, :-1], tokens[:, 1:], weights, positions=places, documents=documents)
    loss.backward()
    return loss.item(), torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_model(recompute: str, monkeypatch):
    """The whole path, as a GPU takes it, with the kernels emulated."""
    wanted_loss, wanted = gradients()
    taken, plain = [], paths.choose

    def on_a_gpu(pattern: Pattern, **facts) -> tuple[str, str]:
        taken.append(plain(pattern, **{**facts, "device": "cuda"}))
        return taken[-1]

    monkeypatch.setattr(paths, "choose", on_a_gpu)
    with flash_attention():
        loss, found = gradients(
            model={"fused_attention": {"documents": "varlen"}},
            training={"activation_checkpointing": {"mode": recompute}},
        )
    assert {kind for kind, _ in taken} == {"varlen"}
    assert abs(loss / wanted_loss - 1) < EXACT and relative(found, wanted) < EXACT


def batch(numbers: list[list[int]]) -> StepBatch:
    """Micro-batches of two samples, with a number of documents each."""
    documents = torch.zeros(len(numbers), 2, 16, dtype=torch.int32)
    for row, samples in enumerate(numbers):
        for sample, number in enumerate(samples):
            documents[row, sample] = torch.clamp(torch.arange(16), max=number - 1)
    tokens = torch.zeros(len(numbers), 2, 17, dtype=torch.int64)
    ids = torch.zeros(len(numbers), 2, dtype=torch.int64)
    return StepBatch(0, tokens, ids, 0, documents=documents, positions=torch.zeros_like(documents))


def test_more_documents_than_there_is_room_for():
    refuse_more_documents(batch([[3, 5], [1, 7]]), 4)  # on average
    with pytest.raises(DataError, match=r"4 a sample must be room .* 9 in 2 samples\n.*most_documents=10") as raised:
        refuse_more_documents(batch([[1, 1], [2, 7]]), 4)
    assert "documents=auto" in str(raised.value)


def test_who_counts_documents():
    config = resolve(overlay(SETTINGS, {"model": {"fused_attention": {"documents": "varlen"}}}), check_inputs=False)
    assert config.model.fused_attention.most_documents == 8
    assert document_limit(config, torch.device("cuda")) == 8
    assert document_limit(config, torch.device("cpu")) is None
    assert document_limit(resolve(SETTINGS, check_inputs=False), torch.device("cuda")) is None
