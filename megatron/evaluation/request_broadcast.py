"""One rank asks, all ranks compute: the harness only runs on rank 0, and the others follow it.

So tasks are loaded, texts tokenised and results kept once, and the harness need not know any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.checkpoint.format.communicator import Communicator
from megatron.data.tokenizer import Tokenizer
from megatron.decoding.sampling import Sampling, ending
from megatron.decoding.schedule import Request
from megatron.evaluation.scoring import Score, Scorer, Text

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
    how: dict[str, Any] = {"sampling": sampling, "finished": ending(tokenizer, stops), "end": tokenizer.eod_id}
    requests = [Request(tuple(prompt), tokens, number, **how) for number, prompt in enumerate(prompts)]
    return [each.tokens for each in scorer.answer(requests, tokenizer.size)]
