"""Who reads what in a ring, what it sends, and rectangles of attention in pieces. Against masks written out."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch

from megatron.kinds.common.attention import blocks
from megatron.kinds.common.attention.blocks import AttentionTile, tile_gradients, tile_output
from megatron.kinds.common.attention.pattern import Dropped, Pattern, alibi_slopes
from megatron.kinds.common.attention.ring import Ring, mask_of, neighbourhoods, ring_attention
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Axis, Mesh
from megatron.parallel.messages.account import Recorder
from tests.workers import run

RANKS = 4


def allowed(S: int, window: int | None, documents_BS: torch.Tensor | None) -> torch.Tensor:
    """Which key each query sees, bool [B, S, S]."""
    place = torch.arange(S)
    seen = (place[None] <= place[:, None])[None]
    if window is not None:
        seen = seen & (place[:, None] - place[None] < window)
    return seen if documents_BS is None else seen & (documents_BS[:, :, None] == documents_BS[:, None])


@pytest.mark.parametrize("seed", range(30))
def test_what_is_masked_of_a_rectangle(seed: int):
    draw = Random(seed)
    ranks, together = draw.choice([(4, 1), (4, 2), (6, 2), (6, 3)])
    length = 2 * draw.randint(1, 4)
    S = ranks * length
    window = draw.choice([None, draw.randint(1, S)])
    documents = None
    if draw.random() < 0.6:
        begins = torch.tensor([[draw.random() < 0.15 for _ in range(S)] for _ in range(2)])
        documents = begins.long().cumsum(1)
    seen = allowed(S, window, documents)
    context = ContextGroup(Axis(0, ranks), zigzag=draw.random() < 0.5)
    groups = neighbourhoods(context, together, length * together)
    assert sorted(place for runs in groups for run in runs for place in range(run.first, run.stop)) == list(range(S))
    needed = [[False] * len(groups) for _ in groups]
    for (reader, mine), (owner, theirs) in product(enumerate(groups), repeat=2):
        for q, k in product(mine, theirs):
            pairs = []
            for own in () if documents is None else documents:
                pairs.append(tuple((own[each.there].min().item(), own[each.there].max().item()) for each in (q, k)))
            mask, rectangle = mask_of(q, k, window, pairs), seen[:, q.there, k.there]
            needed[reader][owner] |= bool(rectangle.any())
            assert mask is not None or not rectangle.any()
            assert mask != "none" or rectangle.all()
            if window is None or documents is None:  # a window and documents may mask a rectangle only together
                assert (mask is None) == (not rectangle.any())
                assert mask in ("none", "causal") or not rectangle.all()
            if mask == "causal":
                assert q == k and rectangle.equal(torch.ones_like(rectangle).tril())
    hops = Ring.of(context, together, length * together, window, documents).hops
    for owner in range(len(groups)):
        last = [step for step in range(len(groups)) if needed[(owner + step) % len(groups)][owner]][-1]
        assert hops[owner] >= last if window is not None and documents is not None else hops[owner] == last


def test_a_zigzag_cut_gives_all_ranks_the_same_work():
    work = {}
    for zigzag in (False, True):
        context = ContextGroup(Axis(0, RANKS), zigzag=zigzag)
        seen = allowed(32, None, None)[0]
        groups = neighbourhoods(context, 1, 8)
        work[zigzag] = [sum(int(seen[run_.there].sum()) for run_ in runs) for runs in groups]
    assert len(set(work[True])) == 1 and max(work[False]) > 6 * min(work[False])


PATTERNS = (Pattern(0.4), Pattern(0.4, window=6), Pattern(0.4, softcap=0.8, slopes=tuple(alibi_slopes(4))))


@pytest.mark.parametrize("pattern", PATTERNS, ids=["plain", "window", "cap and slopes"])
def test_a_rectangle_in_pieces(pattern: Pattern, monkeypatch):
    draw = torch.Generator().manual_seed(3)
    q, k, v, of_y = (torch.randn(2, n, 10, 4, generator=draw, dtype=torch.float64) for n in (4, 2, 2, 4))
    dropout = Dropped(0.3, 11, torch.tensor([3, 9]), length=40) if pattern.window else None
    at = AttentionTile(pattern, 10, 10, "some", None, dropout)
    found = []
    for chunk in (1 << 24, 2 * 4 * 10 * 3, 1):
        monkeypatch.setattr(blocks, "CHUNK", chunk)
        y, normalizer = tile_output(q, k, v, at)
        found.append([y, normalizer, *tile_gradients(of_y, q, k, v, y, normalizer, (y * of_y).sum(-1), at)])
    for pieces in found[1:]:
        for one, other in zip(found[0], pieces):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


B, M, N, D, E, S = 2, 2, 4, 4, 6, 32


def sent(zigzag: bool, together: int, window: int | None, separate: bool) -> dict:
    """Bytes that this rank sends in a forward and in a backward pass."""
    mesh = Mesh.build(Layout(context=RANKS, zigzag=zigzag))
    context, recorder, found = ContextGroup.of(mesh), Recorder(mesh), {}
    draw = torch.Generator().manual_seed(1)
    shape = (B, N, S // RANKS * together, D)
    q = torch.randn(shape, generator=draw, requires_grad=True)
    k, v = (torch.randn(B, M, *shape[2:3], width, generator=draw, requires_grad=True) for width in (D, E))
    documents = (torch.arange(S) // (S // RANKS)).expand(B, S) if separate else None
    recorder.install()
    try:
        y = ring_attention(
            context, together, q, k, v, Pattern(1.0, window), documents, None, None, lambda _, make: make()
        )
        found["forward"] = recorder.tally.take().by("operation").get(("send",), (0, 0))
        y.sum().backward()
        found["backward"] = recorder.tally.take().by("operation").get(("send",), (0, 0))
    finally:
        recorder.remove()
    return found


@pytest.mark.parametrize(
    ("zigzag", "together", "window", "separate", "hops"),
    [
        (True, 1, None, False, [3, 3, 3, 3]),  # every rank has early and late tokens
        (False, 1, None, False, [3, 2, 1, 0]),  # the last tokens are read by no other rank
        (False, 1, 5, False, [1, 1, 1, 0]),
        (False, 1, None, True, [0, 0, 0, 0]),  # a document per rank
        (True, 2, None, False, [1, 1]),
    ],
)
def test_bytes_are_those_of_the_formula(zigzag, together, window, separate, hops):
    answers = run(RANKS, sent, zigzag, together, window, separate)
    size = B * M * (S // RANKS * together) * (D + E) * 4
    count = len(hops)
    for rank, found in enumerate(answers):
        place = rank // together
        # The keys of the member `step` places before pass through here if they go further.
        passed = sum(hops[(place - step) % count] > step for step in range(count))
        # Their gradients come with them, and move on or home.
        gradients_ = sum(hops[(place - step) % count] >= step for step in range(1, count))
        assert found["forward"] == (passed, passed * size)
        assert found["backward"] == (passed + gradients_, (passed + gradients_) * size)
