"""Packed documents know nothing of each other, wherever ranks cut the sequence, in every kind of layer.

Masked values of attention are multiplied by zero, so not one bit may differ. Scans compute the tokens of a chunk by
sums and products that documents share, whose parts cancel: they may differ by rounding, and by no more.
"""

from __future__ import annotations

import pytest
import torch

from tests.selection import toured
from tests.training import matrix, runs
from tests.workers import run

MATRIX = matrix.read()
STARTS = (0, 5, 6, 13)  # of the documents. Cuts into 2 and 4 parts at 8, and at 4, 8 and 12, pass through some of them
CHANGED = 1, 3  # the documents that get other tokens: one of a single token, and the last
MASKED = ("documents", "deepseek")
ROUNDING = 100 * torch.finfo(torch.float32).eps  # of the largest logit. Four layers have some ten sums each
# (architecture, layout): each way to share a sequence, and each kind of layer whose states pass from rank to rank
CASES = [
    ("documents", "cp2, ZeRO 0"),
    ("documents", "cp4 by ring, ZeRO 1, selective recomputation"),
    ("documents", "cp4 nested, ZeRO 2, recomputation"),
    ("documents", "pp2 · cp2 by gathering, ZeRO 1, recomputation"),
    ("state space", "cp4, ZeRO 2, selective recomputation"),
    ("state space", "tp2 · cp2, ZeRO 1, sequence parallel"),
    ("rwkv4", "cp2, ZeRO 0"),
    ("rwkv5", "cp2, ZeRO 0"),
    ("rwkv6", "cp2, ZeRO 0"),
    ("rwkv7", "cp4, ZeRO 2, selective recomputation"),
    ("gated delta", "cp4, ZeRO 2, selective recomputation"),
    ("deepseek", "cp2 by ring, ZeRO 0"),
    ("cca", "cp2, ZeRO 0"),
]


def settings_of(architecture: str, layout: str) -> tuple[dict, int]:
    own = {k: v for k, v in MATRIX["architectures"][architecture].items() if k not in ("about", "apart")}
    cut = {k: v for k, v in MATRIX["layouts"][layout].items() if k != "ranks"}
    packed = {"data": {"reset_attention_at_eod": True}}
    return matrix.merged(MATRIX["common"], own, cut, packed), MATRIX["layouts"][layout]["ranks"]


def logits(settings: dict, ranks: int) -> list[torch.Tensor] | None:
    """[S, V] of the first sample before and after its documents `CHANGED` get other tokens. None on other ranks."""
    import dataclasses

    config, engine = runs.start(settings, ranks)
    S, data = config.training.sequence_length, engine.mesh.data
    batch = runs.local_batch(config, 0, data.rank, data.size)
    documents_S = torch.zeros(S, dtype=torch.int32)
    for start in STARTS[1:]:
        documents_S[start:] += 1
    positions_S = torch.arange(S, dtype=torch.int32) - torch.tensor(STARTS, dtype=torch.int32)[documents_S.long()]
    places = [place for place, document in enumerate(documents_S.tolist()) if document in CHANGED]
    tokens = batch.tokens.clone()
    tokens[0, 0, places] = (tokens[0, 0, places] + 1) % config.model.vocab_size
    packed = {
        "documents": documents_S.expand_as(batch.documents).contiguous(),
        "positions": positions_S.expand_as(batch.positions).contiguous(),
    }
    pairs = []
    for each in (batch.tokens, tokens):
        micros = len(each)
        readers = [lambda head, x_BSH: head.logits_at(x_BSH[0])] * micros
        found = engine.read(dataclasses.replace(batch, tokens=each, **packed), readers)
        pairs.append(found[0] if found else None)
    return None if pairs[0] is None else [each.cpu() for each in pairs]


@pytest.mark.parametrize(("architecture", "layout"), toured(CASES, "layouts"), ids=lambda word: word.replace(" ", "-"))
def test_a_change_in_one_document_changes_no_logit_of_another(architecture: str, layout: str):
    settings, ranks = settings_of(architecture, layout)
    (before, after), *_ = [each for each in run(ranks, logits, settings, ranks) if each is not None]
    bound = 0.0 if architecture in MASKED else ROUNDING * float(before.abs().max())
    same = ((before - after).abs().amax(-1) <= bound).tolist()
    document = [sum(place >= start for start in STARTS) - 1 for place in range(len(same))]
    assert same == [each not in CHANGED for each in document]
