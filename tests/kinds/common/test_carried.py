"""Scans in pieces: what a piece makes of no state, and what it leaves of one before it, are all that later ones need.

Float64. The outputs and gradients of layers on ranks that share sequences are in tests/layouts.yml.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from megatron.kinds.common.recurrence.decays import chunk_product
from megatron.kinds.common.recurrence.pieces import document_bounds, document_starts
from megatron.kinds.common.recurrence.recomputed import recomputed
from megatron.kinds.common.recurrence.sequence_scan import carried_by_decay, carried_by_matrix
from megatron.kinds.gated_delta import delta_rule
from megatron.kinds.mamba import selective_scan, ssd
from megatron.kinds.rwkv import rwkv4 as wkv4
from megatron.kinds.rwkv import wkv6, wkv7
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from megatron.parallel.messages.account import Recorder
from tests.float64 import EXACT
from tests.model.parity import relative
from tests.workers import run

B, S, H, N, CHUNK = 2, 23, 2, 4, 5


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def fade(state, left):
    return lambda before: state if before is None else before * left + state


def mamba2(seed: int):
    x, dt, b = drawn(seed, (B, S, H, 3), (B, S, H), (B, S, 1, N))
    bias, rate, D = drawn(seed + 1, (H,), (H,), (H,))

    def state(at, starts):
        return ssd.ssd(x[:, at], dt[:, at], bias, rate, D, b[:, at], b[:, at], chunk=CHUNK, starts_BS=starts)[1]

    def piece(at, starts):
        return fade(*ssd.ends(x[:, at], dt[:, at], bias, rate, b[:, at], starts, chunk=CHUNK, limits=(0.0, None)))

    return state, piece


def mamba(seed: int):
    u, z, dt, b = drawn(seed, (B, S, H), (B, S, H), (B, S, H), (B, S, N))
    bias, rate, D = drawn(seed + 1, (H,), (H, N), (H,))

    def state(at, starts):
        inputs = (u[:, at], z[:, at], dt[:, at], bias, rate, D, b[:, at], b[:, at])
        return selective_scan.selective_scan(*inputs, chunk=CHUNK, starts_BS=starts)[1]

    def piece(at, starts):
        return fade(*selective_scan.ends(u[:, at], dt[:, at], bias, rate, b[:, at], chunk=CHUNK, starts_BS=starts))

    return state, piece


def gated_delta(seed: int):
    k, v, decay, beta = drawn(seed, (B, S, 1, N), (B, S, H, 3), (B, S, H), (B, S, H))
    decay, beta = -decay.exp(), 2 * beta.sigmoid()

    def state(at, starts):
        inputs = (k[:, at], k[:, at], v[:, at], decay[:, at], beta[:, at])
        return delta_rule.gated_delta_rule(*inputs, chunk=CHUNK, starts_BS=starts)[1]

    def piece(at, starts):
        made, left = delta_rule.ends(k[:, at], v[:, at], decay[:, at], beta[:, at], starts, chunk=CHUNK)
        return lambda before: made if before is None else left @ before + made

    return state, piece


def rwkv6(seed: int):
    k, v, moved = drawn(seed, *[(B, S, H, N)] * 3)
    decay, bonus = drawn(seed + 1, (H, N), (H, N))

    def state(at, starts):
        inputs = (k[:, at], k[:, at], v[:, at], moved[:, at])
        return wkv6.wkv6(*inputs, decay, bonus, chunk=CHUNK, starts_BS=starts)[1]

    def piece(at, starts):
        return fade(*wkv6.ends(k[:, at], v[:, at], moved[:, at], decay, starts, chunk=CHUNK))

    return state, piece


def rwkv7(seed: int):
    w, k, v, a, rate = drawn(seed, *[(B, S, H, N)] * 5)
    log_w, a, b = -0.6 * w.sigmoid(), -torch.nn.functional.normalize(a, dim=-1), a
    b = torch.nn.functional.normalize(b, dim=-1) * rate.sigmoid()

    def state(at, starts):
        factors = [each[:, at] for each in (k, log_w, k, v, a, b)]
        return wkv7.wkv7(*factors, chunk=CHUNK, starts_BS=starts)[1]

    def piece(at, starts):
        made = state(at, starts)
        left = wkv7.left_of_state(log_w[:, at], a[:, at], b[:, at], chunk=CHUNK, starts_BS=starts)
        return lambda before: made if before is None else before @ left + made

    return state, piece


def rwkv4(seed: int):
    k, v = drawn(seed, (B, S, H), (B, S, H))
    decay, bonus = drawn(seed + 1, (H,), (H,))
    k = 30 * k  # exponents far apart

    def state(at, starts):
        return mean(wkv4.wkv4(k[:, at], v[:, at], decay, bonus, chunk=CHUNK, starts_BS=starts)[1])

    def piece(at, starts):
        made, aged = wkv4.ends(k[:, at], v[:, at], decay, starts, chunk=CHUNK)
        return lambda before: made if before is None else wkv4.joined(aged, before, made, True)

    return state, piece


def mean(state) -> Tensor:
    """The content of RWKV-4's state: the mean of values and the logarithm of its weight."""
    above, below, exponent = state
    return torch.stack([above / below, below.log() + exponent])


@pytest.mark.parametrize("kind", [mamba, mamba2, gated_delta, rwkv4, rwkv6, rwkv7], ids=lambda kind: kind.__name__)
def test_pieces_make_the_state_of_the_whole(kind):
    """Random cuts, of any lengths, and random documents."""
    for seed in range(12):
        draw = Random(seed)
        state, piece = kind(seed)
        documents = None
        if seed % 3:
            documents = torch.tensor([[draw.random() < 0.12 for _ in range(S)] for _ in range(B)]).long().cumsum(1)
        cuts = sorted({0, S, *draw.sample(range(1, S), draw.randint(1, 6))})
        found = None
        for begin, stop in pairwise(cuts):
            starts = None
            if documents is not None:
                starts = document_starts(documents[:, begin:stop], documents[:, begin - 1] if begin else None)
            found = piece(slice(begin, stop), starts)(found)
        expected = state(slice(0, S), None if documents is None else document_starts(documents))
        assert relative(mean(found) if kind is rwkv4 else found, expected) < EXACT, (seed, cuts)


RANKS = 5


def scanned(kind: str):
    """The state before this rank's part, gradients of what the parts make and leave, bytes given to others forward and
    backward."""
    mesh, sent = Mesh.build(Layout(context=RANKS)), []
    context, recorder = ContextGroup.of(mesh), Recorder(mesh)
    made, left, of = (own[context.rank].clone() for own in parts(kind))
    made.requires_grad_()
    left.requires_grad_()
    recorder.install()
    try:
        found = (
            carried_by_matrix(context, made, lambda: left)
            if kind == "turned"
            else carried_by_decay(context, made, left)
        )
        sent.append(recorder.tally.take().by("operation")["all_to_all",][1])
        (found * of).sum().backward()
        sent.append(recorder.tally.take().by("operation")["all_to_all",][1])
    finally:
        recorder.remove()
    return found.detach(), made.grad, left.grad, sent


def scanned_from_a_state(kind: str, ranks: int):
    """The same, where the first rank's tokens follow a state. With that state's gradient."""
    context = ContextGroup.of(Mesh.build(Layout(context=ranks)))
    made, left, of = (own[context.rank].clone().requires_grad_() for own in parts(kind))
    before = first_state() if context.rank == 0 else torch.zeros_like(first_state())
    before.requires_grad_()
    if kind == "turned":
        found = carried_by_matrix(context, made, lambda: left, before)
    else:
        found = carried_by_decay(context, made, left, before)
    (found * of).sum().backward()
    return found.detach(), made.grad, left.grad, before.grad


def first_state() -> Tensor:
    return drawn(7, (2, N, N))[0]


@pytest.mark.parametrize("ranks", [2, RANKS])
@pytest.mark.parametrize("kind", ["faded", "turned"])
def test_a_state_before_the_first_rank_reaches_all(kind: str, ranks: int):
    answers = run(ranks, scanned_from_a_state, kind, ranks)
    made, left, of = (each[:ranks].clone().requires_grad_() for each in parts(kind))
    states = [first_state().requires_grad_()]
    for own, passed in zip(made, left):
        states.append((passed @ states[-1] if kind == "turned" else passed * states[-1]) + own)
    (torch.stack(states[:-1]) * of).sum().backward()
    for rank, (found, of_made, of_left, of_first) in enumerate(answers):
        assert relative(found, states[rank].detach()) < EXACT
        torch.testing.assert_close(of_made, made.grad[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_left, left.grad[rank], rtol=1e-12, atol=1e-12)
        if rank == 0:
            torch.testing.assert_close(of_first, states[0].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_a_product_of_decays_has_the_bits_of_torch(chunks: int, zeros: int):
    draw = torch.Generator().manual_seed(chunks)
    decays = torch.rand(2, chunks, 3, generator=draw)
    decays[0, :zeros, 1] = 0.0
    of_product, found = torch.randn(2, 3, generator=draw), []
    for product in (chunk_product, lambda each: each.prod(1)):
        leaf = decays.clone().requires_grad_()
        made = product(leaf)
        made.backward(of_product)
        found.append((made.detach(), leaf.grad))
    (made, of_decays), (torchs, of_torchs) = found
    assert torch.equal(made, torchs) and torch.equal(of_decays, of_torchs)


def parts(kind: str) -> list[Tensor]:
    return drawn(3, (RANKS, 2, N, N), (RANKS, 2, N, N) if kind == "turned" else (RANKS, 2, N, 1), (RANKS, 2, N, N))


@pytest.mark.parametrize("kind", ["faded", "turned"])
def test_states_reach_every_rank(kind: str):
    answers = run(RANKS, scanned, kind)
    made, left, of = parts(kind)
    made.requires_grad_()
    left.requires_grad_()
    states = [torch.zeros_like(made[0])]
    for own, passed in zip(made, left):
        states.append((passed @ states[-1] if kind == "turned" else passed * states[-1]) + own)
    (torch.stack(states[:-1]) * of).sum().backward()
    M, L = made[0].numel(), left[0].numel()
    messages = {1: [M + L, M + L], 2: [M]}  # to the rank that stands so far behind
    for rank, (found, of_made, of_left, sent) in enumerate(answers):
        forward = sum(sum(sizes) for by, sizes in messages.items() if rank + by < RANKS)
        backward = sum(sum(sizes) for by, sizes in messages.items() if rank - by >= 0)
        assert sent == [8 * forward, 8 * backward]
        assert relative(found, states[rank].detach()) < EXACT or rank == 0 and not found.any()
        torch.testing.assert_close(of_made, made.grad[rank], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(of_left, left.grad[rank], rtol=1e-12, atol=1e-12)


def test_bounds_of_documents_are_found_once_for_all_layers():
    documents = torch.tensor([[0, 0, 1, 1, 1], [2, 3, 3, 4, 4]])
    starts = document_starts(documents)
    bounds = document_bounds(starts)
    assert bounds.tolist() == [0, 2, 5, 6, 8, 10] and bounds.dtype == torch.int64
    assert document_bounds(starts) is bounds  # kernels know their own plans by the object
    assert document_bounds(document_starts(torch.zeros_like(documents))).tolist() == [0, 5, 10]
    assert document_bounds(starts.clone()).tolist() == bounds.tolist()


def test_bounds_of_documents_are_not_found_again_in_a_backward_pass():
    starts, found = document_starts(torch.tensor([[0, 0, 1]])), []

    def scan(x: Tensor, starts: Tensor) -> Tensor:
        found.append(document_bounds(starts))
        return x.square()

    x = torch.ones(3, requires_grad=True)
    recomputed(scan, x, starts).sum().backward()
    assert len(found) == 2 and found[0] is found[1]
