"""The decoder in a thread of its own. Texts join and leave between its passes."""

import math
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..decoder import Decoder, ReadsOn
from ..schedule import Live, Request, RequestError

Likeliest = list[tuple[int, float]]


@dataclass
class News:
    """Tokens that a pass has added to a text.

    Attributes:
        number: of the text in its client's request.
        tokens, logs, likeliest: ids, their log-probabilities, and the likeliest ids in their places.
        scores, score_likeliest: of the prompt's tokens, with the first news.
        reason: "stop" or "length" if the text is complete.
        failure: why there is no more of it.
    """

    number: int
    tokens: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    likeliest: list[Likeliest] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    score_likeliest: list[Likeliest] = field(default_factory=list)
    reason: str | None = None
    failure: str | None = None

    @property
    def last(self) -> bool:
        return self.reason is not None or self.failure is not None


@dataclass(eq=False)
class Text:
    """A text that a client waits for."""

    request: Request
    number: int
    deliver: Callable[[News], object]  # gets news of it, in the thread of `Service.soon`
    live: Live | None = None
    sent: int = 0  # its tokens in earlier news

    def news(self, active: bool) -> News | None:
        """Tokens since the last news. None without any."""
        assert self.live is not None
        drawn, prompt = self.live.drawn, len(self.request.prompt)
        begin, end = self.sent, len(drawn.tokens)
        if begin == end and active:
            return None
        found = News(self.number, drawn.tokens[begin:end], drawn.log_p[begin:end])
        noted = drawn.likeliest
        if self.request.likeliest:
            found.likeliest = [noted[place] for place in range(prompt + begin, prompt + end)]
        if not begin and self.request.scored:
            found.scores = drawn.scores
            if self.request.likeliest:
                found.score_likeliest = [noted[place] for place in range(prompt - self.request.scored, prompt)]
        if not all(map(math.isfinite, (*found.logs, *found.scores))):
            return News(self.number, failure="the model's probabilities are no finite numbers")
        if not active:
            found.reason = "stop" if drawn.ended else "length"
        self.sent = end
        return found


class Service:
    """Continues texts with a decoder. All methods but `_run` and what it calls are of other threads.

    Args:
        soon: calls a function in the thread that waits for news, such as `loop.call_soon_threadsafe`.

    Attributes:
        failures: passes that have raised an exception since the last one that did not.
    """

    def __init__(self, decoder: Decoder, soon: Callable[[Callable[[], object]], object]) -> None:
        self.decoder, self.soon = decoder, soon
        self.orders: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.texts: dict[int, Text] = {}
        self.closed, self.failures = False, 0
        decoder.begin([])
        self.thread = threading.Thread(target=self._run, name="decoder", daemon=True)
        self.thread.start()

    def submit(self, text: Text) -> None:
        """Continue a text, which `Request.check` has accepted."""
        self.orders.put(partial(self._add, text))

    def cancel(self, text: Text) -> None:
        """End a text, and free its pages. Nothing happens to one that is complete."""
        self.orders.put(partial(self._remove, text))

    def replace(self, engine: ReadsOn, done: Callable[[], object]) -> None:
        """Continue with another model. Texts that are unfinished fail."""

        def change() -> None:
            self.decoder.engine = engine
            self._restart("the model's weights were replaced")
            self.soon(done)

        self.orders.put(change)

    def close(self) -> None:
        """End the thread after its pass."""
        self.orders.put(lambda: setattr(self, "closed", True))
        self.thread.join()

    @property
    def counts(self) -> dict[str, Any]:
        """Numbers of the schedule at this moment, for a page of state."""
        schedule = self.decoder.schedule
        return {
            "running": len(schedule.running),
            "waiting": len(schedule.waiting),
            "passes": schedule.passes,
            "tokens_read": schedule.read,
            "tokens_reused": schedule.reused,
            "preempted": schedule.preempted,
            "pages_in_use": schedule.pool.pages - len(schedule.pool.free),
            "pages": schedule.pool.pages,
        }

    def _run(self) -> None:
        while not self.closed:
            while not self.texts or not self.orders.empty():
                order = self.orders.get()  # waits where there is no text
                try:
                    order()
                except Exception:  # an order is one request's, the thread serves all of them
                    traceback.print_exc(file=sys.stderr)
                if self.closed:
                    return
            try:
                self._pass()
            except Exception as error:  # texts begin again, and /health reports several failures in a row
                traceback.print_exc(file=sys.stderr)
                self.failures += 1
                self._restart(f"a pass of the decoder has failed ({type(error).__name__})", spares=True)

    def _pass(self) -> None:
        self.decoder.step()
        schedule, found = self.decoder.schedule, list[tuple[Text, News]]()
        active = {each.arrival for each in (*schedule.running, *schedule.waiting)}
        try:
            for arrival, text in list(self.texts.items()):
                news = text.news(arrival in active)
                if news is not None:
                    found.append((text, news))
                if news is not None and news.last:
                    self._remove(text)
        finally:
            self._deliver(found)
        self.failures = 0

    def _deliver(self, found: list[tuple[Text, News]]) -> None:
        if found:
            self.soon(lambda: [text.deliver(news) for text, news in found])

    def _add(self, text: Text) -> None:
        try:
            text.live = self.decoder.add(text.request)
        except RequestError as error:
            return self._deliver([(text, News(text.number, failure=str(error)))])
        self.texts[text.live.arrival] = text

    def _remove(self, text: Text) -> None:
        if text.live is None or self.texts.get(text.live.arrival) is not text:
            return
        del self.texts[text.live.arrival]
        if text.live.slot or text.live in self.decoder.schedule.waiting:
            self.decoder.schedule.leave(text.live)

    def _restart(self, reason: str, spares: bool = False) -> None:
        """End the texts.

        Args:
            spares: texts that have not begun wait on. None does if none has begun, so that failures come to an end.
        """
        schedule, texts, self.texts = self.decoder.schedule, self.texts, {}
        spared = {each.arrival for each in schedule.waiting} if spares and schedule.running else set[int]()
        self.decoder.begin([])
        ended = list[tuple[Text, News]]()
        for arrival, text in texts.items():
            if arrival in spared and not text.sent:
                self._add(text)
            else:
                ended.append((text, News(text.number, failure=reason)))
        self._deliver(ended)
