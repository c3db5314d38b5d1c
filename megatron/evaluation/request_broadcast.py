"""One rank asks, all ranks compute: the harness only runs on rank 0, and the others follow it.

So tasks are loaded, texts tokenised and results kept once, and the harness need not know any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.checkpoint.format.communicator import Communicator
from megatron.data.tokenizer import Tokenizer
from megatron.evaluation.scoring import Score, Scorer, Text
from megatron.model.generate import Sampling

Row = Sequence[int]


class Leader:
    """Rank 0's side: each call is made on all ranks. `dismiss` ends the other ranks' loops."""

    def __init__(self, scorer: Scorer, communicator: Communicator, tokenizer: Tokenizer) -> None:
        self._scorer, self._communicator, self._tokenizer = scorer, communicator, tokenizer

    def score(self, texts: Sequence[Text]) -> list[Score]:
        self._call("score", [[list(text.tokens), text.scored] for text in texts])
        return self._scorer.score(texts)

    def generate(
        self, prompts: Sequence[Row], tokens: int, sampling: Sampling, stops: Sequence[str]
    ) -> list[list[int]]:
        """Up to `tokens` tokens after each prompt. The last one is the end-of-document token or the end of one of
        `stops`."""
        self._call("generate", [[list(prompt) for prompt in prompts], tokens, vars(sampling), list(stops)])
        return _generate(self._scorer, self._tokenizer, prompts, tokens, sampling, stops)

    def dismiss(self) -> None:
        self._call("dismiss", None)

    def _call(self, verb: str, what: Any) -> None:
        self._communicator.broadcast([verb, what])


def follow(scorer: Scorer, communicator: Communicator, tokenizer: Tokenizer) -> None:
    """The loop of the other ranks, until the leader dismisses them."""
    while True:
        verb, what = communicator.broadcast(None)
        if verb == "dismiss":
            return
        if verb == "score":
            scorer.score([Text(tuple(tokens), scored) for tokens, scored in what])
        else:
            prompts, tokens, sampling, stops = what
            _generate(scorer, tokenizer, prompts, tokens, Sampling(**sampling), stops)


def _generate(
    scorer: Scorer, tokenizer: Tokenizer, prompts: Sequence[Row], tokens: int, sampling: Sampling, stops: Sequence[str]
) -> list[list[int]]:
    rows = [tuple(prompt) for prompt in prompts]
    return scorer.generate(rows, tokens, sampling, ending(tokenizer, stops), tokenizer.size)


def ending(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[list[int]], bool]:
    """Whether a text of these tokens is at its end: its last token ends documents, or a stop is in its last tokens."""
    longest = max((len(stop.encode()) for stop in stops), default=0)

    def ended(tokens: list[int]) -> bool:
        if tokens[-1] == tokenizer.eod_id:
            return True
        # A stop has no more tokens than bytes. A few more, so that no character is cut at the front.
        tail = tokenizer.decode(tokens[-(longest + 4) :]) if longest else ""
        return any(stop in tail for stop in stops)

    return ended
