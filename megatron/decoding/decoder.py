"""Continues many texts at once. A text's tokens and log-probabilities do not depend on the others, on CPUs bit for bit.

A pass reads tokens of any number of texts, each token as a row of its own: the next token of texts that grow, and
pieces of new texts. Sizes of products follow from a token's position, or have enough rows that kernels round each row
in the same way (`kinds/common/attention/paged_keys.py`). Recurrences read one token of a text at a time (`states.py`).
So a text can be cut into any pieces, read in any company, and read again after preemption."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config import Config
from megatron.kinds.common.attention.fewer_keys import Reading
from megatron.kinds.common.attention.paged_keys import PADDED, Pass
from megatron.model.embedding_and_head import LogitsAt, Reader
from megatron.model.expert_tally import recorded
from megatron.model.stack import Model
from megatron.parallel.layout.mesh import ALONE, Axis
from megatron.parallel.layout.precision import numbers_on

from .pool import Pool
from .routes import note_routes
from .sampling import choose_tokens, likeliest, log_probabilities
from .schedule import Drawn, Live, Piece, Request, Schedule, is_over, pages_of
from .states import States

BUDGET = 512  # tokens of a pass


class ReadsOn(Protocol):
    """See `engine/protocol.py`."""

    @property
    def config(self) -> Config: ...

    def new_state(self) -> list[Any]: ...

    def read_on(self, tokens_BS: Tensor, reader: Reader, state: list[Any], begin: int | Tensor) -> Any: ...


@runtime_checkable
class ReadsLater(ReadsOn, Protocol):
    """See `engine/protocol.py`."""

    def read_later(
        self, tokens_BS: Tensor, reader: LogitsAt, state: list[Any], begin: Tensor
    ) -> Callable[[], Tensor]: ...


@dataclass(frozen=True)
class WholeModel:
    """A model that this process has, as an engine."""

    model: Model

    @property
    def config(self) -> Config:
        return self.model.plan.config

    def new_state(self) -> list[Any]:
        return self.model.new_state()

    @torch.no_grad()
    def read_on(self, tokens_BS: Tensor, reader: Reader, state: list[Any], begin: int | Tensor) -> Any:
        return self.model.eval()(tokens_BS, tokens_BS, tokens_BS, reader=reader, state=state, begin=begin)


def largest_of(axis: Axis, device: torch.device | str, number: int) -> int:
    """The largest number of all ranks of an axis."""
    if axis.size == 1:
        return number
    value = torch.tensor([number], device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=axis.group)
    return int(value)


class Decoder:
    """Continues requests on one data parallel rank.

    Args:
        rows: requests that run at once.
        vocabulary: only ids below it are chosen, and have probability.
        pages: of the pool. By default enough for the `rows` longest requests of a `run`.
        budget: tokens of a pass.
        agree: (number) -> the largest of all data parallel ranks, which make equally many passes and turns.
        stages: the ranks of a pipeline, which all plan the same passes.
        alive: called after each pass.
        reading: (number of a layer with keys) -> how it reads them (`read_less.py`). None is full attention.
        routes: keep the experts of each token. Each text is then read from its first token on.

    Attributes:
        schedule: of the last `run`, with its counts.
        logits: called with each token's logits, for tests and probes.
    """

    schedule: Schedule

    def __init__(
        self,
        engine: ReadsOn,
        device: torch.device | str,
        *,
        rows: int = 32,
        vocabulary: int | None = None,
        pages: int | None = None,
        budget: int = BUDGET,
        agree: Callable[[int], int] = int,
        stages: Axis = ALONE,
        alive: Callable[[], None] = lambda: None,
        reading: Callable[[int], Reading] | None = None,
        routes: bool = False,
    ) -> None:
        self.engine, self.device, self.rows, self.vocabulary = engine, device, rows, vocabulary
        self.pages, self.budget, self.agree, self.alive = pages, budget, agree, alive
        self.reading, self.routes = reading, routes
        self.logits: Callable[[Live, int, Tensor], None] | None = None
        self.stages = stages
        self._continues: bool | None = None  # on any stage

    def run(self, requests: Sequence[Request]) -> list[Drawn]:
        """The continuation of each request.

        Raises:
            RequestError: one can never be answered. None is begun then.
        """
        return run_together([self], [requests])

    def begin(self, requests: Sequence[Request]) -> list[Live]:
        """Begin with these requests and an empty pool. Others may join by `add` between two steps."""
        for each in requests:
            each.check(self.engine.config.model, self.vocabulary)
        needed = sorted((pages_of(each.whole) for each in requests), reverse=True)
        pages = self.pages or max(sum(needed[: self.rows]), 1)
        self.states = States(self.engine.new_state(), pages, self.rows, self.device, self.reading)
        copies = self.states.copy_page, self.states.copy_slot
        self.schedule = Schedule(Pool(pages), self.rows, self.budget, *copies, self._shares)
        return [self.schedule.add(each) for each in requests]

    def add(self, request: Request) -> Live:
        """Queue one more request.

        Raises:
            RequestError: it can never be answered.
        """
        request.check(self.engine.config.model, self.vocabulary)
        return self.schedule.add(request)

    def step(self) -> bool:
        """One pass. False when no rank has requests left."""
        finish = self.start()
        if finish is not None:
            finish()
        return finish is not None

    def start(self) -> Callable[[], None] | None:
        """Begin a pass. The next one may begin when the function has finished it. None when no rank has requests
        left."""
        pieces = self.schedule.plan()
        both = len({not each.begin for each in pieces}) == 2  # first tokens of texts have a turn of their own
        turns = self.agree(max((each.end - each.begin for each in pieces), default=0) + both)
        if not turns:
            return None
        now = Pass([token for piece in pieces for token in piece.tokens()], self.device, turns)
        wanted = list(self._wanted(pieces))
        self.states.current.read = now
        engine, given = self.engine, (self._reader(wanted), self.states.of_layers, now.positions_T1)
        found: Any
        whole: Any = engine
        keep: AbstractContextManager[dict[int, list[Tensor]]] = nullcontext({})
        if self.routes:
            keep = recorded(whole.model)
        with keep as layers:
            if isinstance(engine, ReadsLater):
                found = engine.read_later(now.ids_T1, *given)
            else:
                found = partial(torch.as_tensor, engine.read_on(now.ids_T1, *given))

        def finish() -> None:
            if self.routes and pieces:
                note_routes(pieces, layers)
            self._use(wanted, found()[: len(wanted), : self.vocabulary], pieces)
            self.alive()

        return finish

    def _shares(self) -> bool:
        """Whether a text may begin with pages of another one: no layer of any stage has states besides keys."""
        if self.routes:
            return False
        if self.stages.size == 1:
            return not self.states.continues
        if not self.schedule.passes:  # a pass shows which states there are
            return False
        if self._continues is None:
            self._continues = bool(largest_of(self.stages, self.device, self.states.continues))
        return not self._continues

    @staticmethod
    def _wanted(pieces: Sequence[Piece]) -> Any:
        """(row, request, position) of the tokens whose logits are needed."""
        row = 0
        for piece in pieces:
            live = piece.live
            first = len(live.request.prompt) - 1 - live.request.scored
            for place in range(piece.begin, piece.end):
                scored = first <= place < len(live.request.prompt) - 1
                if scored or (place + 1 == live.length and live.request.tokens):
                    yield row, live, place
                row += 1

    @staticmethod
    def _reader(wanted: Sequence[tuple[int, Live, int]]) -> LogitsAt:
        rows = [row for row, *_ in wanted]
        return LogitsAt(rows + [0] * (max(PADDED, -(-len(rows) // PADDED) * PADDED) - len(rows)))

    def _use(self, wanted: Sequence[tuple[int, Live, int]], logits_NV: Tensor, pieces: Sequence[Piece]) -> None:
        """Note the log-probabilities of scored tokens, and choose the next tokens."""
        due: dict[int, int] = {}  # arrival of a request -> row of its logits
        scores = self._scores(wanted, logits_NV)
        for at, (_, live, place) in enumerate(wanted):
            if count := live.request.likeliest:
                live.drawn.likeliest[place + 1] = likeliest(logits_NV[at : at + 1], count)[0]
        for at, (_, live, place) in enumerate(wanted):
            if self.logits is not None:
                self.logits(live, place, logits_NV[at])
            prompt = live.request.prompt
            if place + 1 < len(prompt):
                if place + 1 - (len(prompt) - live.request.scored) == len(live.drawn.scores):
                    live.drawn.scores.append(scores[at])
            else:
                due[live.arrival] = at
        for follower, leader in self.schedule.done(pieces):
            follower.drawn.scores = list(leader.drawn.scores)
            follower.drawn.likeliest = dict(leader.drawn.likeliest)
            follower.drawn.routes = dict(leader.drawn.routes)
            if leader.arrival in due:
                due[follower.arrival] = due[leader.arrival]
        running = [each for each in self.schedule.running if each.arrival in due]
        texts = [(each.request, each.drawn) for each in running]
        rows = numbers_on(logits_NV.device, [due[each.arrival] for each in running])
        for live, token, log_p in zip(running, *next_tokens(texts, logits_NV[rows])):
            live.drawn.tokens.append(token)
            live.drawn.log_p.append(log_p)
        for live in list(self.schedule.running):
            request, drawn = live.request, live.drawn
            if live.read < min(len(request.prompt), request.whole) or live.leader is not None:
                continue
            if is_over(request, drawn):
                self.schedule.leave(live)

    @staticmethod
    def _scores(wanted: Sequence[tuple[int, Live, int]], logits_NV: Tensor) -> dict[int, float]:
        """The log-probabilities of the prompts' tokens that follow these places, by the number of the row."""
        rows = [at for at, (_, live, place) in enumerate(wanted) if place + 1 < len(live.request.prompt)]
        if not rows:
            return {}
        ids = [wanted[at][1].request.prompt[wanted[at][2] + 1] for at in rows]
        return dict(zip(rows, log_probabilities(logits_NV[rows], numbers_on(logits_NV.device, ids)).tolist()))


def run_together(decoders: Sequence[Decoder], requests: Sequence[Sequence[Request]]) -> list[Drawn]:
    """The continuation of each decoder's requests. Each stage of a pipeline reads the pass of another decoder.

    Raises:
        RequestError: one can never be answered. None is begun then.
    """
    lives = [live for decoder, own in zip(decoders, requests, strict=True) for live in decoder.begin(own)]
    running = [decoder.start() for decoder in decoders]
    while any(running):
        for number, finish in enumerate(running):
            if finish is not None:
                finish()
                running[number] = decoders[number].start()
    return [each.drawn for each in lives]


def next_tokens(texts: Sequence[tuple[Request, Drawn]], logits_NV: Tensor) -> tuple[list[int], list[float]]:
    """The next token of each text and its log-probability, from logits that belong to the vocabulary."""
    ids, logs = [0] * len(texts), [0.0] * len(texts)
    alike: dict[Any, list[int]] = {}
    for at, (request, drawn) in enumerate(texts):
        held = request.ends if len(drawn.tokens) < request.least else frozenset[int]()
        alike.setdefault((request.sampling, held), []).append(at)
    for (sampling, held), places in alike.items():
        logits_BV = open_BV = logits_NV[numbers_on(logits_NV.device, places)]
        if held:
            open_BV = logits_BV.clone()
            open_BV[:, [each for each in held if each < logits_NV.shape[1]]] = float("-inf")
        some = [texts[at] for at in places]
        numbers = [request.number for request, _ in some]
        positions = [len(request.prompt) + len(drawn.tokens) for request, drawn in some]
        ids_B, logs_B = choose_tokens(open_BV, sampling, numbers, positions)
        if held:
            logs_B = log_probabilities(logits_BV, ids_B)
        for at, token, log in zip(places, *torch.stack([ids_B.double(), logs_B.double()]).tolist()):  # one copy
            ids[at], logs[at] = int(token), log
    return ids, logs
