"""Attention and recurrences over a sequence whose tokens ranks share, against one rank that has all of them, in
float64.

Training runs on such layouts are in tests/layouts.yml.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron.config.sequences import choose_method
from megatron.kinds.common.attention.attend import attend
from megatron.kinds.common.attention.attend_across import attend_in
from megatron.kinds.common.attention.pattern import Dropped, Pattern, alibi_slopes
from megatron.model.relay import Relay
from megatron.model.stream import Stream
from megatron.parallel.layers.context import ContextGroup
from megatron.parallel.layout.layout import Layout
from megatron.parallel.layout.mesh import Mesh
from tests.float64 import EXACT
from tests.model.parity import relative
from tests.workers import run

RANKS, B, S, D = 4, 2, 24, 6
PATTERNS = {
    "plain": Pattern(D**-0.5),
    "window": Pattern(D**-0.5, window=7),
    "alibi": Pattern(D**-0.5, slopes=tuple(alibi_slopes(4))),
    "cap": Pattern(D**-0.5, softcap=0.7),
}
HEADS = ((4, 4), (4, 2), (4, 1))
METHODS = ("gather", "ulysses", "ring", "nested")
CASES = [
    *product(METHODS, PATTERNS, HEADS, (False, True), (0.0,), (False,)),
    *product(METHODS, ("plain", "window"), HEADS, (False,), (0.3,), (False,)),
    *product(METHODS, ("plain", "window"), ((4, 2),), (False, True), (0.0,), (True,)),
    *((how, "plain", heads, True, 0.0, False) for how in ("gather", "ring") for heads in ((6, 2), (3, 3), (1, 1))),
    *(("nested", "plain", heads, True, 0.0, False) for heads in ((6, 2), (2, 1))),
]


def inputs(heads: int, kv_heads: int) -> list[Tensor]:
    """Queries, keys, values (wider than keys where these have fewer heads) and the gradient of the output."""
    draw = torch.Generator().manual_seed(5)
    wide = D if heads == kv_heads else D + 2
    shapes = [(heads, D), (kv_heads, D), (kv_heads, wide), (heads, wide)]
    return [torch.randn(B, own, S, width, generator=draw, dtype=torch.float64) for own, width in shapes]


def documents() -> Tensor:
    """Some borders at cuts, some not, and a document over several ranks."""
    begins = torch.zeros(B, S, dtype=torch.int64)
    begins[0, [6, 7, 18]] = begins[1, [3]] = 1
    return begins.cumsum(1)


def attended(case, context: ContextGroup | None):
    """Outputs and gradients of queries, keys and values: of this rank's tokens, or of all."""
    method, name, heads, separate, rate, sinking = case
    cut = (lambda x, dim: x) if context is None else context.cut
    q, k, v, of_y = (cut(each, 2).clone() for each in inputs(*heads))
    for each in (q, k, v):
        each.requires_grad_()
    dropout = Dropped(rate, 11, torch.tensor([3, 9]), first_head=2) if rate else None
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64, requires_grad=True) if sinking else None
    pattern = PATTERNS[name]
    whole = documents() if separate else None
    if context is None:
        y = attend(q, k, v, pattern, documents_BS=whole, dropout=dropout, sinks_n=sinks)
    else:
        context = dataclasses.replace(context, method=method, together=2 if method == "nested" else None)
        stream = Stream(q, documents=None if whole is None else context.cut(whole, 1))
        y = attend_in(context, q, k, v, pattern, stream, dropout, sinks)
    y.backward(of_y)
    gradients = () if sinks is None else (sinks.grad,)
    return [each.detach() for each in (y, q.grad, k.grad, v.grad, *gradients)]


def all_attended(zigzag: bool):
    context = ContextGroup.of(Mesh.build(Layout(context=RANKS, zigzag=zigzag)))
    return context.places(S // RANKS), [attended(case, context) for case in CASES]


@pytest.mark.parametrize("zigzag", [False, True])
def test_attention_of_one_rank(zigzag):
    answers = run(RANKS, all_attended, zigzag)
    order = torch.cat([places for places, _ in answers]).argsort()
    for index, case in enumerate(CASES):
        for number, expected in enumerate(attended(case, None)):
            parts = [answer[index][number] for _, answer in answers]
            found = sum(parts) if number == 4 else torch.cat(parts, 2)[:, :, order]
            assert relative(found, expected) < EXACT, (case, ("output", "queries", "keys", "values", "sinks")[number])


@dataclass
class Memory:
    total: Tensor | None = None
    last: Tensor | None = None
    document: Tensor | None = None


def recurrence(x: Tensor, past: Memory, weight: Tensor, documents_BS: Tensor) -> Tensor:
    """y_t = s_t * x_(t-1), s_t = weight * s_(t-1) + x_t, both again with each document."""
    total, last, document = past.total, past.last, past.document
    out = []
    for place in range(x.shape[1]):
        if document is not None:
            same = (document == documents_BS[:, place]).unsqueeze(1)
            total, last = total * same, last * same
        now = x[:, place]
        total = now if total is None else weight * total + now
        out.append(total * (torch.zeros_like(now) if last is None else last))
        last, document = now, documents_BS[:, place]
    past.total, past.last, past.document = total, last, document
    return torch.stack(out, 1)


def relayed(repeat: bool):
    """Three layers with a state handed along. Output and gradients of this rank."""
    mesh = Mesh.build(Layout(context=RANKS))
    context = ContextGroup.of(mesh)
    x = context.cut(inputs(3, 1)[0][:, 0], 1).clone().requires_grad_()
    weight = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    own = context.cut(documents(), 1)
    relays = [Relay(mesh.context) for _ in range(3)]

    def layers(x: Tensor) -> Tensor:
        for relay in relays:
            x = x + relay(Memory(), x, lambda y, past: recurrence(y, past, weight, own))
        return x

    if repeat:
        from megatron.model.recompute import deciding

        y = torch.utils.checkpoint.checkpoint(
            layers, x, use_reentrant=False, preserve_rng_state=False, context_fn=deciding
        )
    else:
        y = layers(x)
    y.backward(context.cut(inputs(3, 1)[0][:, 1], 1))
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("repeat", [False, True])
def test_states_handed_along_are_those_of_one_rank(repeat):
    answers = run(RANKS, relayed, repeat)
    x = inputs(3, 1)[0][:, 0].clone().requires_grad_()
    weight = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(3):
        y = y + recurrence(y, Memory(), weight, documents())
    y.backward(inputs(3, 1)[0][:, 1])
    assert relative(torch.cat([answer[0] for answer in answers], 1), y.detach()) < EXACT
    assert relative(torch.cat([answer[1] for answer in answers], 1), x.grad) < EXACT
    assert relative(sum(answer[2] for answer in answers), weight.grad) < EXACT


def test_a_rank_has_a_run_of_the_sequence():
    mesh = Mesh.describe(Layout(tensor=2, context=3, data=2), 9)
    assert (mesh.at.tensor, mesh.at.context, mesh.at.data) == (1, 1, 1)
    assert mesh.replicas.rank == 4 and mesh.replicas.size == 6
    context, whole = ContextGroup.of(mesh), torch.arange(12)
    assert context.cut(whole, 0).equal(context.places(4)) and context.places(4).tolist() == [4, 5, 6, 7]


def of_chunks(chunk: int, length: int) -> tuple[list[int], list[int], torch.Tensor]:
    """The places of this rank's tokens, all of them gathered, and the gradient of the gathering."""
    context = ContextGroup.of(Mesh.build(Layout(context=RANKS)), chunk)
    x = context.cut(torch.arange(float(length)).view(1, length), 1).clone().requires_grad_()
    whole = context.gather(x)
    (whole * torch.arange(float(length))).sum().backward()
    return context.places(length // RANKS).tolist(), whole[0].long().tolist(), x.grad[0]


@pytest.mark.parametrize(("chunk", "length"), [(8, 24), (16, 24), (24, 24)])
def test_ranks_have_a_part_of_every_chunk(chunk: int, length: int):
    """The last chunk may be shorter."""
    answers, wanted = run(RANKS, of_chunks, chunk, length), [[] for _ in range(RANKS)]
    for first in range(0, length, chunk):
        size = min(chunk, length - first) // RANKS
        for rank, own in enumerate(wanted):
            own += range(first + rank * size, first + (rank + 1) * size)
    assert [each[0] for each in answers] == wanted
    assert all(each[1] == list(range(length)) for each in answers)
    assert all((RANKS * torch.tensor(own).float()).equal(each[2]) for own, each in zip(wanted, answers))


def returned() -> tuple[torch.Tensor, torch.Tensor]:
    """The last rank's value, on the first, and its gradient."""
    context = ContextGroup.of(Mesh.build(Layout(context=RANKS)))
    x = torch.full((2, 3), float(context.rank + 1), requires_grad=True)
    found = context.to_first(x)
    (found * 5).sum().backward()
    return found.detach(), x.grad


def test_what_the_last_rank_leaves_goes_to_the_first():
    answers = run(RANKS, returned)
    assert [each[0].unique().tolist() for each in answers] == [[RANKS], [0], [0], [0]]
    assert [each[1].unique().tolist() for each in answers] == [[0], [0], [0], [5]]


def test_the_method_follows_from_the_heads():
    found = [choose_method(*asked) for asked in (("auto", 8, 4), ("auto", 6, 4), ("auto", 3, 4), ("gather", 8, 4))]
    assert [(each.name, each.together) for each in found] == [("ulysses", 4), ("nested", 2), ("ring", 1), ("gather", 1)]
    assert choose_method("nested", 8, 8, 4).together == 4


def shifted():
    """The end of the rank before, and its gradient."""
    context = ContextGroup.of(Mesh.build(Layout(context=RANKS)))
    x = context.cut(torch.arange(16.0).view(2, 8), 1).clone().requires_grad_()
    before = context.from_before(x[:, -1:])
    (before * (context.rank + 1)).sum().backward()
    return before.detach(), x.grad


def test_the_last_tokens_go_to_the_next_rank():
    answers = run(RANKS, shifted)
    assert [each[0].flatten().tolist() for each in answers] == [[0, 0], [1, 9], [3, 11], [5, 13]]
    assert [each[1][0].tolist() for each in answers] == [[0, 2], [0, 3], [0, 4], [0, 0]]
