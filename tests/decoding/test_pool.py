"""The schedule of requests and its pages, under random arrivals: nothing is lost, shared wrongly, or starved."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

import pytest

from megatron.config import resolve
from megatron.decoding.pool import Pool, digests_of
from megatron.decoding.schedule import Live, Request, RequestError, Schedule, is_over, pages_of
from megatron.kinds.common.attention.paged_keys import PAGE

ROWS = 4


class Content:
    """Contents that layers would have: in each place of a page, and in each state, a hash of the text up to there."""

    def __init__(self, recurrent: bool) -> None:
        self.recurrent = recurrent
        self.pages: dict[int, list[int | None]] = {}
        self.slots: dict[int, int] = {}

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        self.pages[target] = [*self.pages[source][:tokens], *[None] * (PAGE - tokens)]

    def copy_slot(self, source: int, target: int) -> None:
        if self.recurrent:
            self.slots[target] = self.slots[source]

    def read(self, live: Live, begin: int, end: int) -> None:
        """Write the places of a piece, and compare all places that its last token reads."""
        hashes = [*accumulate(live.text[:end], lambda before, token: hash((before, token)), initial=0)][1:]
        if self.recurrent and begin:
            assert self.slots[live.slot] == hashes[begin - 1], "the state is of another text"
        self.slots[live.slot] = hashes[-1]
        for place in range(begin, end):
            page = self.pages.setdefault(live.table[place // PAGE], [None] * PAGE)
            if place % PAGE == 0:
                page[:] = [None] * PAGE
            page[place % PAGE] = hashes[place]
        found = [self.pages[live.table[place // PAGE]][place % PAGE] for place in range(end)]
        assert found == hashes, "keys of another text"


def check(schedule: Schedule) -> None:
    """Every page is free or used, as often as tables name it, and every slot is somewhere once."""
    pool, used = schedule.pool, Counter(page for live in schedule.running for page in live.table)
    assert all(pool.uses[page] == used[page] for page in range(pool.pages + 1))
    assert set(pool.free) == {page for page in range(1, pool.pages + 1) if not used[page]}
    assert sorted([*schedule.slots, *(live.slot for live in schedule.running)]) == list(range(1, ROWS + 1))
    assert not any(live.table or live.slot for live in schedule.waiting)
    assert pool.known == {digest: page for page, digest in pool.digests.items()}
    order = [live.arrival for live in schedule.waiting]
    assert order == sorted(order)


@pytest.mark.parametrize("recurrent", [False, True])
def test_random_arrivals(recurrent: bool) -> None:
    """Against a record of what each page and each state has. Requests come, leave early, and are preempted."""
    counts = Counter[str]()
    for seed in range(30):
        draw, content = random.Random(seed), Content(recurrent)
        pages = draw.randint(6, 14)
        schedule = Schedule(
            Pool(pages), ROWS, draw.choice([3, 40, 100]), content.copy_page, content.copy_slot, lambda: not recurrent
        )
        lowest: dict[int, int] = {}  # places from which texts were read
        left, lives, stems = 25, list[Live](), [tuple(draw.choices(range(9), k=70)) for _ in range(2)]
        while left or schedule.busy:
            while left and draw.random() < 0.3:
                stem = draw.choice(stems)[: draw.choice([1, 31, 32, 33, 64, 70])]
                prompt = (*stem, *draw.choices(range(9), k=draw.choice([0, 0, 3])))
                most = pages * PAGE - len(prompt) if draw.random() < 0.1 else 40
                scored = 0 if sum(prompt) % 3 else len(prompt) // 3
                lives.append(schedule.add(Request(prompt, draw.randint(1, most), scored=scored)))
                lowest[lives[-1].arrival] = len(prompt)
                left -= 1
            pieces = schedule.plan()
            check(schedule)
            assert bool(pieces) == schedule.busy
            assert sum(each.end - each.begin for each in pieces) <= schedule.budget
            if pieces:
                first = min(schedule.running, key=lambda each: each.arrival)
                assert any(piece.live is first for piece in pieces), "the oldest request waits"
            for piece in pieces:
                content.read(piece.live, piece.begin, piece.end)
                lowest[piece.live.arrival] = min(lowest[piece.live.arrival], piece.begin)
            schedule.done(pieces)
            for live in list(schedule.running):
                if live.leader is None and live.read == len(live.text):
                    live.drawn.tokens.append(draw.randrange(9))
                    if is_over(live.request, live.drawn) or draw.random() < 0.02:
                        schedule.leave(live)
            check(schedule)
        counts["preempted"] += schedule.preempted
        counts["reused"] += schedule.reused
        for live in lives:  # a text with a leader of the same scored tokens has the leader's
            request = live.request
            alike = [lowest[each.arrival] for each in lives if each.request.prompt == request.prompt]
            assert not request.scored or min(alike) < len(request.prompt) - request.scored
        assert len(schedule.pool.free) == pages and all(live.drawn.tokens for live in lives)
    assert counts["preempted"] > 20 and counts["reused"] > 1000


def test_requests_that_can_never_be_answered() -> None:
    schedule = Schedule(Pool(2), ROWS, 10, lambda *_: None, lambda *_: None, lambda: True)
    schedule.add(Request((1,) * PAGE, PAGE + 1))
    with pytest.raises(RequestError, match="65 tokens, and all pages together 64"):
        schedule.add(Request((1,) * PAGE, PAGE + 2))
    shape = {
        "layers": "attention/mlp",
        "hidden_size": 32,
        "vocab_size": 10,
        "attention": {"heads": 4, "position": "none"},
    }
    learned = {**shape, "embedding": {"position": "learned", "max_positions": 8}}
    model = resolve({"model": learned, "training": {"steps": 1, "sequence_length": 8}}).model
    Request((0, 9), 7, scored=1).check(model)
    Request((0,) * 9, 0, scored=8).check(model)  # its last token is not read
    for wrong in (
        Request((), 3),
        Request((1, 2), 0, scored=2),
        Request((1,), -1),
        Request((3, -1), 1),
        Request((10,), 1),
        Request((0, 9), 8),
    ):
        with pytest.raises(RequestError):
            wrong.check(model)
    with pytest.raises(RequestError, match="scored ids must be below the vocabulary's 9, not 9"):
        Request((0, 9), 0, scored=1).check(model, vocabulary=9)


def test_digests_grow_with_a_text() -> None:
    live = Live(0, Request((5,) * 40, 60))
    assert live.digests(31) == [] and live.digests(40) == digests_of(live.text)
    live.drawn.tokens += range(60)
    assert live.digests(live.length - 1) == digests_of(live.text[:-1]) and len(live.digests(64)) == 2


def test_a_page_is_known_by_its_whole_text() -> None:
    one, other = (1,) * PAGE + (2,) * PAGE, (3,) * PAGE + (2,) * PAGE
    assert len(digests_of(one + (4,))) == 2 and digests_of(one)[1] != digests_of(other)[1]
    assert digests_of((1, 2) + (0,) * 30) != digests_of((12,) + (0,) * 31) and pages_of(PAGE) == 1
    pool = Pool(3)
    pages = [pool.take(), pool.take()]
    for page, digest in zip(pages, digests_of(one)):
        pool.name(page, digest)
    pool.release(pages)
    assert pool.find(digests_of(one)) == pages and pool.find(digests_of(other)) == []
    assert pool.take() == 3 and pool.take() == pages[1]  # the end of a text is forgotten before its beginning
    assert pool.find(digests_of(one)) == pages[:1]
    with pytest.raises(RuntimeError, match="more often"):
        pool.release([pages[0]])
