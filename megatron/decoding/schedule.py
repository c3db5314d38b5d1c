"""The tokens of requests that the next pass reads: first come, first served.

Requests join and leave between passes. Where pages run out, the request that came last gives up its pages, and reads
its text again later. The oldest request always has room, so each request ends."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.sections.model import ModelSection
from megatron.kinds.common.attention.paged_keys import PAGE, Token

from .pool import Pool, digests_of
from .sampling import GREEDY, Sampling

Row = tuple[int, ...]


class RequestError(ValueError):
    """A request that the decoder cannot answer."""


@dataclass(frozen=True)
class Request:
    """A text to continue."""

    prompt: Row
    tokens: int  # the most that follow. 0 where only `scored` tokens are asked for.
    number: int = 0  # keys its draws
    sampling: Sampling = GREEDY
    finished: Callable[[list[int]], bool] | None = None  # whether the continuation has ended, from its ids
    end: int | None = None  # the id that ends documents, and the continuation
    least: int = 0  # fewest tokens. Before that, no id that ends the continuation is chosen.
    scored: int = 0  # tokens at the end of the prompt whose log-probabilities are asked for
    likeliest: int = 0  # number of likeliest tokens that are noted in the place of each scored or chosen token
    further_ends: frozenset[int] = frozenset()  # ids that end the continuation like `end`

    @property
    def ends(self) -> frozenset[int]:
        return self.further_ends if self.end is None else self.further_ends | {self.end}

    @property
    def whole(self) -> int:
        """Tokens that may have to be read. Nothing follows the last one of a text that is only scored."""
        if self.scored and not self.tokens:
            return len(self.prompt) - 1
        return len(self.prompt) + max(self.tokens - 1, 0)

    def check(self, model: ModelSection, vocabulary: int | None = None) -> None:
        """Check that a model can answer. Each rank checks all requests before it begins with its own.

        Args:
            vocabulary: only ids below it have probability.

        Raises:
            RequestError: it has no token, an id without a vector or a probability, or more tokens than positions.
        """
        if not self.prompt or not 0 <= self.scored < len(self.prompt) or self.tokens < 0:
            raise RequestError("a request must have a token before the first one that is scored or follows")
        if not 0 <= min(self.prompt) <= max(self.prompt) < model.vocab_size:
            wrong = next(each for each in self.prompt if not 0 <= each < model.vocab_size)
            raise RequestError(f"a request must have ids of at least 0 and below {model.vocab_size}, not {wrong}")
        targets = self.prompt[len(self.prompt) - self.scored :]
        if vocabulary is not None and max(targets, default=-1) >= vocabulary:
            raise RequestError(f"scored ids must be below the vocabulary's {vocabulary}, not {max(targets)}")
        most = model.embedding.max_positions
        if model.embedding.position == "learned" and self.whole > most:
            raise RequestError(
                f"prompt and continuation have {self.whole} tokens to read, and the model {most} positions"
            )


@dataclass
class Drawn:
    """A continuation: its ids, their log-probabilities, and whether it ended before the largest length.

    Attributes:
        scores: log-probabilities of the prompt's tokens that were asked for.
        likeliest: by the place of a token in the text, the likeliest ids with their log-probabilities.
        routes: by the place of a token that was read, its experts in all layers, if the decoder keeps them.
    """

    tokens: list[int] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)
    ended: bool = False
    scores: list[float] = field(default_factory=list)
    likeliest: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    routes: dict[int, Any] = field(default_factory=dict, compare=False)


@dataclass
class Live:
    """A request that waits or runs."""

    arrival: int  # its place in the order of arrival
    request: Request
    drawn: Drawn = field(default_factory=Drawn)
    table: list[int] = field(default_factory=list)  # its pages
    slot: int = 0  # of its states. 0 while it waits.
    read: int = 0  # tokens that the states have
    leader: "Live | None" = None  # reads the same prompt now, and this request continues from its states
    of_pages: list[bytes] = field(default_factory=list)  # what `digests` has found

    @property
    def text(self) -> Row:
        return (*self.request.prompt, *self.drawn.tokens)

    @property
    def length(self) -> int:
        """Tokens of `text` that have to be read."""
        return min(len(self.request.prompt) + len(self.drawn.tokens), self.request.whole)

    def digests(self, tokens: int) -> list[bytes]:
        """Of each whole page among its first tokens, the digest of all tokens up to the page's end."""
        known, pages = self.of_pages, tokens // PAGE
        if len(known) < pages:
            known += digests_of(self.text[len(known) * PAGE : pages * PAGE], known[-1] if known else b"")
        return known[:pages]


@dataclass(frozen=True)
class Piece:
    """Tokens of a request in a pass."""

    live: Live
    begin: int
    end: int

    def tokens(self) -> list[Token]:
        live, text = self.live, self.live.text
        last = len(live.request.prompt) - live.request.scored - 1  # scored tokens count as drawn
        places = range(self.begin, self.end)
        return [Token(text[place], place, live.table, live.slot, max(place - last, 0)) for place in places]


class Schedule:
    """The queues.

    Args:
        rows: requests that run at once.
        budget: tokens of a pass.
        copy_page: (page, other page, tokens), `copy_slot`: (slot, other slot). Both act between passes.
        shares: whether a text may begin with pages of another text. Not with states besides keys.

    Attributes:
        passes, read, preempted: counts of passes, of tokens that they read, and of requests that gave up their pages.
        reused: tokens that were not read, since another text had read them.
    """

    def __init__(
        self,
        pool: Pool,
        rows: int,
        budget: int,
        copy_page: Callable[[int, int, int], None],
        copy_slot: Callable[[int, int], None],
        shares: Callable[[], bool],
    ) -> None:
        self.pool, self.rows, self.budget = pool, rows, max(budget, rows + 1)  # texts that grow leave one token
        self.copy_page, self.copy_slot, self.shares = copy_page, copy_slot, shares
        self.waiting: deque[Live] = deque()
        self.running: list[Live] = []  # in the order of arrival
        self.slots = list(range(rows, 0, -1))
        self.arrivals = self.passes = self.read = self.preempted = self.reused = 0

    def add(self, request: Request) -> Live:
        """Queue a request.

        Raises:
            RequestError: it can never have enough pages.
        """
        if pages_of(request.whole) > self.pool.pages:
            room = self.pool.pages * PAGE
            raise RequestError(f"prompt and continuation have {request.whole} tokens, and all pages together {room}")
        live = Live(self.arrivals, request)
        self.arrivals += 1
        self.waiting.append(live)
        return live

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def plan(self) -> list[Piece]:
        """The pieces of the next pass: single tokens first, then pieces of longer texts while the budget lasts."""
        self._admit()
        pieces, left = list[Piece](), self.budget
        for live in sorted(self.running, key=lambda each: (each.length - each.read > 1, each.arrival)):
            if live.leader is not None or live not in self.running or left < 1:
                continue
            end = min(live.length, live.read + left)
            if self._room(live, end):
                pieces.append(Piece(live, live.read, end))
                left -= end - live.read
        # A request that was planned may have given up its pages to an older one.
        pieces = [each for each in pieces if each.live.slot]
        self.passes += bool(pieces)
        self.read += sum(each.end - each.begin for each in pieces)
        return pieces

    def done(self, pieces: Sequence[Piece]) -> list[tuple[Live, Live]]:
        """Note that the pieces were read.

        Returns:
            The requests that continue from the states of another one from now on, each with the other.
        """
        forked = []
        for piece in pieces:
            live, first = piece.live, piece.begin // PAGE
            live.read = piece.end
            if piece.end // PAGE > first and self.shares():
                for page, digest in zip(live.table[first:], live.digests(piece.end)[first:]):
                    self.pool.name(page, digest)
            for each in self.running if live.read == live.length else ():
                if each.leader is live:
                    each.leader, each.read = None, live.read
                    each.table = [self.pool.share(page) for page in live.table]
                    self.copy_slot(live.slot, each.slot)
                    self.reused += live.read
                    forked.append((each, live))
        return forked

    def leave(self, live: Live) -> None:
        """End a request, whether it runs or waits."""
        if live.slot:
            self._give_up(live)
        else:
            self.waiting.remove(live)

    def _admit(self) -> None:
        while self.waiting and self.slots:
            live = self.waiting[0]
            leader = None if live.drawn.tokens else self._leader(live.request)
            found = list[int]()
            if leader is None:
                if self.shares():
                    known = len(live.request.prompt) + len(live.drawn.tokens)
                    found = self.pool.find(live.digests(known - 1 - live.request.scored))
                idle = sum(not self.pool.uses[page] for page in found)
                if self.running and pages_of(live.length) - len(found) + idle > len(self.pool.free):
                    return
            self.waiting.popleft()
            live.leader, live.slot = leader, self.slots.pop()
            live.table = [self.pool.share(page) for page in found]
            live.read = len(found) * PAGE
            self.reused += live.read
            self.running.append(live)
            self.running.sort(key=lambda each: each.arrival)

    def _leader(self, request: Request) -> Live | None:
        """A running request that still reads the same prompt."""
        for each in self.running:
            other = each.request
            noted = other.scored == request.scored and other.likeliest == request.likeliest
            same = noted and other.prompt == request.prompt
            # Without tokens that follow, a leader has no logits after the prompt.
            if (
                same
                and bool(other.tokens) == bool(request.tokens)
                and each.leader is None
                and not each.drawn.tokens
                and each.read < len(request.prompt)
            ):
                return each
        return None

    def _room(self, live: Live, end: int) -> bool:
        """Have pages for the tokens up to `end`. No other text uses their places from `live.read` on."""
        page = live.read // PAGE
        if page < len(live.table) and self.pool.uses[live.table[page]] > 1:
            if not self._free_one(live):
                return False
            old, live.table[page] = live.table[page], self.pool.take()
            self.copy_page(old, live.table[page], live.read % PAGE)
            self.pool.release([old])
        while len(live.table) < pages_of(end):
            if not self._free_one(live):
                return False
            live.table.append(self.pool.take())
        return True

    def _free_one(self, live: Live) -> bool:
        """Whether there is a free page, after preempting requests that came later if necessary. False: this one was the
        latest, and was preempted itself."""
        while not self.pool.free:
            later = [each for each in self.running if each.table and each.arrival > live.arrival]
            last = max(later, key=lambda each: each.arrival, default=live)
            self._give_up(last)
            last.read, self.preempted = 0, self.preempted + 1
            place = sum(each.arrival < last.arrival for each in self.waiting)
            self.waiting.insert(place, last)
            if last is live:
                return False
        return True

    def _give_up(self, live: Live) -> None:
        self.pool.release(live.table)
        self.slots.append(live.slot)
        self.running.remove(live)
        live.table, live.slot, live.leader = [], 0, None
        for each in self.running:
            if each.leader is live:
                each.leader = None


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def is_over(request: Request, drawn: Drawn) -> bool:
    """Whether a continuation is complete. Notes whether it ended by itself."""
    tokens = drawn.tokens
    if tokens and len(tokens) >= request.least:
        drawn.ended = tokens[-1] in request.ends or (request.finished is not None and request.finished(tokens))
    return drawn.ended or len(tokens) >= request.tokens
