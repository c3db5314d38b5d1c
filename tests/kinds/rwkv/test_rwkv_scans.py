"""The scans of RWKV against token-by-token recurrences in float64: outputs, last states, every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron.kinds.common.recurrence.pieces import document_starts
from megatron.kinds.rwkv.rwkv4 import wkv4
from megatron.kinds.rwkv.wkv6 import wkv6
from megatron.kinds.rwkv.wkv7 import wkv7
from tests.kinds.common.test_scans import CONTINUED, DOCUMENTS, Bs, S, check, draw
from tests.selection import covering

h, N = 2, 4


def starts_of(kind: str | None):
    return None if kind is None else document_starts(DOCUMENTS, CONTINUED[kind])


def kept(starts, t: int, dims: int) -> torch.Tensor:
    """1 where the state before token t belongs to its document, [B, 1, ...]."""
    alive = torch.ones(Bs, dtype=torch.bool) if starts is None else starts[:, t] != t
    return alive.view(-1, *[1] * dims)


def loop7(r, log_w, k, v, a, b, state, starts):
    rows = []
    for t in range(S):
        state = state * kept(starts, t, 3)
        seen = (state * a[:, t].unsqueeze(-2)).sum(-1, keepdim=True)
        state = state * log_w[:, t].exp().unsqueeze(-2) + seen * b[:, t].unsqueeze(-2)
        state = state + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        rows.append((state * r[:, t].unsqueeze(-2)).sum(-1))
    return torch.stack(rows, 1), state


def loop6(r, k, v, moved, decay, bonus, state, starts):
    rows = []
    for t in range(S):
        state = state * kept(starts, t, 3)
        written = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        rows.append(((state + bonus.unsqueeze(-1) * written) * r[:, t].unsqueeze(-1)).sum(-2))
        state = state * torch.exp(-torch.exp(decay + moved[:, t])).unsqueeze(-1) + written
    return torch.stack(rows, 1), state


def loop4(k, v, decay, bonus, above, below, largest, starts):
    rows, w = [], -decay.exp()
    above, below = above * largest.exp(), below * largest.exp()
    for t in range(S):
        above, below = above * kept(starts, t, 1), below * kept(starts, t, 1)
        own = (bonus + k[:, t]).exp()
        rows.append((above + own * v[:, t]) / (below + own))
        above = above * w.exp() + k[:, t].exp() * v[:, t]
        below = below * w.exp() + k[:, t].exp()
    return torch.stack(rows, 1), above, below


def inputs7() -> list[torch.Tensor]:
    inputs = [draw(Bs, S, h, N, seed=seed) for seed in range(6)]
    inputs[1] = -0.6065 * torch.sigmoid(3 * inputs[1])
    inputs[4] = -F.normalize(inputs[4], dim=-1)
    inputs[5] = -inputs[4] * torch.sigmoid(inputs[5])
    return [*inputs, draw(Bs, h, N, N, seed=6)]


# In the plain suite "one" has chunks of 5. A document begins inside one.
@pytest.mark.parametrize(("documents", "chunk"), covering(["one", "none", "all", None], [5, 64, 1]))
def test_wkv7(chunk: int, documents: str | None):
    starts = starts_of(documents)

    def scan(*leaves):
        return wkv7(*leaves[:6], chunk=chunk, initial_BhNN=leaves[6], starts_BS=starts)

    check(scan, partial(loop7, starts=starts), inputs7(), ["r", "log_w", "k", "v", "a", "b", "initial"])


@pytest.mark.parametrize("of", ["outputs", "state"])
@pytest.mark.parametrize("documents", [None, "one"])
def test_the_gradient_of_wkv7_is_exact(documents: str | None, of: str):
    """In float64, of the outputs or only of the last state, of the same tensors twice."""
    inputs, starts = [each.double().requires_grad_() for each in inputs7()], starts_of(documents)
    place = ["outputs", "state"].index(of)
    found = wkv7(*inputs[:6], chunk=5, initial_BhNN=inputs[6], starts_BS=starts)[place]
    wanted = loop7(*inputs, starts)[place]
    by = draw(*wanted.shape, seed=7).double()
    gradients = torch.autograd.grad(wanted, inputs, by, materialize_grads=True)
    for _ in range(2):
        for mine, theirs in zip(torch.autograd.grad(found, inputs, by, retain_graph=True), gradients):
            assert (mine - theirs).norm() <= 1e-12 * theirs.norm().clamp_min(1.0)


@pytest.mark.parametrize("fast", [True, False])
def test_wkv7_keeps_its_digits_where_keys_repeat_and_decays_are_fastest(fast: bool):
    """128 tokens with one and the same key that each removes what the last wrote: powers of the scores would be
    binomials.
    """
    key = F.normalize(draw(1, 1, 1, N, seed=1), dim=-1).repeat(1, 128, 1, 1)
    log_w = torch.full((1, 128, 1, N), -0.6065 if fast else 0.0)
    inputs = [draw(1, 128, 1, N, seed=2), log_w, key, draw(1, 128, 1, N, seed=3), -key, key.clone()]

    def recurrence(*leaves):
        rows, last = [], torch.zeros(N, N, dtype=leaves[0].dtype)
        for r, log_w, k, v, a, b in zip(*(each[0, :, 0] for each in leaves)):
            last = last @ (torch.diag(log_w.exp()) + torch.outer(a, b)) + torch.outer(v, k)
            rows.append(last @ r)
        return torch.stack(rows)[None, :, None], last[None, None]

    check(partial(wkv7, chunk=128), recurrence, inputs, ["r", "log_w", "k", "v", "a", "b"])


# 4: a token keeps e^-50 of the past. -5: hardly anything is lost
@pytest.mark.parametrize(
    ("shift", "documents", "chunk"), covering([0.0, 4.0, -5.0], [None, "none", "all", "one"], [1, 5, 9, 64])
)
def test_wkv6(chunk: int, documents: str | None, shift: float):
    inputs = [draw(Bs, S, h, N, seed=seed) for seed in range(4)]
    inputs += [draw(h, N, seed=4) + shift, draw(h, N, seed=5), draw(Bs, h, N, N, seed=6)]
    starts = starts_of(documents)

    def scan(*leaves):
        return wkv6(*leaves[:6], chunk=chunk, initial_BhNN=leaves[6], starts_BS=starts)

    check(scan, partial(loop6, starts=starts), inputs, ["r", "k", "v", "moved", "decay", "bonus", "initial"])


@pytest.mark.parametrize("move", [10.0, 36.0, 100.0])
def test_wkv6_of_a_token_that_forgets_everything(move: float):
    """Its rate is e^move: next to it in a sum the rates of other tokens have no digits left, and e^100 fp32 has not at
    all.
    """
    inputs = [draw(Bs, S, h, N, seed=seed) for seed in range(3)] + [draw(Bs, S, h, N, seed=3) - 2.0]
    inputs[3][:, 7, :, 1:] = move
    inputs += [draw(h, N, seed=4), draw(h, N, seed=5), draw(Bs, h, N, N, seed=6)]

    def scan(*leaves):
        return wkv6(*leaves[:6], chunk=64, initial_BhNN=leaves[6])

    check(scan, partial(loop6, starts=None), inputs, ["r", "k", "v", "moved", "decay", "bonus", "initial"])


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_wkv6_of_decays_that_all_tokens_share(chunk: int):
    """RWKV-5's: one gradient for all samples and positions."""
    inputs = [draw(Bs, S, h, N, seed=seed) for seed in range(3)]
    inputs += [draw(h, N, seed=4), draw(h, N, seed=5), draw(Bs, h, N, N, seed=6)]

    def scan(r, k, v, decay, bonus, initial):
        return wkv6(r, k, v, None, decay, bonus, chunk=chunk, initial_BhNN=initial)

    def recurrence(r, k, v, *others):
        return loop6(r, k, v, torch.zeros_like(r), *others, None)

    check(scan, recurrence, inputs, ["r", "k", "v", "decay", "bonus", "initial"])


@pytest.mark.parametrize(
    ("shift", "documents", "chunk"), covering([0.0, 4.0, -5.0], [None, "none", "all", "one"], [1, 5, 9, 64])
)
def test_wkv4(chunk: int, documents: str | None, shift: float):
    inputs = [3 * draw(Bs, S, N, seed=0), draw(Bs, S, N, seed=1), draw(N, seed=2) + shift, draw(N, seed=3)]
    inputs += [draw(Bs, N, seed=4), draw(Bs, N, seed=5).abs() + 0.5, draw(Bs, N, seed=6)]
    starts = starts_of(documents)

    def scan(*leaves):
        y, (above, below, largest) = wkv4(*leaves[:4], chunk=chunk, initial=leaves[4:], starts_BS=starts)
        return y, above * largest.exp(), below * largest.exp()

    names = ["k", "v", "decay", "bonus", "numerator", "denominator"]
    check(scan, partial(loop4, starts=starts), inputs, names)


def test_wkv4_of_huge_keys():
    """Exponents that fp32 has not: the largest key decides."""
    k, v = torch.full((1, 6, 2), -500.0), draw(1, 6, 2, seed=1)
    k[:, 2] = 500.0
    y, _ = wkv4(k, v, torch.zeros(2), torch.zeros(2), chunk=64)
    assert y.isfinite().all() and torch.allclose(y[:, 2:], v[:, 2:3].expand(-1, 4, -1))
