"""Answers in OpenAI's forms: choices of completions and of chats, whole or as pieces of a stream."""

import secrets
import time
from typing import Any

from megatron.data.tokenizer import Tokenizer

from ..growing_text import CONTEXT, GrowingText
from .question import Question
from .service import Likeliest, News

LEAST = -9999.0  # OpenAI's number for log-probabilities that JSON has no number for


class Answer:
    """The answer to one request.

    Args:
        name: of the model.
    """

    def __init__(self, question: Question, tokenizer: Tokenizer, name: str) -> None:
        self.question, self.tokenizer, self.name = question, tokenizer, name
        self.id = f"{'chatcmpl' if question.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created, self.drawn = int(time.time()), 0
        texts = [
            GrowingText(
                tokenizer,
                question.stops,
                question.keep_stop,
                after=() if question.chat else each.prompt[-CONTEXT:],
                least=each.least,
            )
            for each in question.requests
        ]
        self.texts, self.offsets, self.begun = texts, [0] * len(texts), [False] * len(texts)
        self.bytes = tokenizer.bytes_of_ids() if question.chat and question.logs else None

    def whole(self, news: list[list[News]]) -> dict[str, Any]:
        """The JSON of all choices, from the news of each."""
        choices = [self._choice(_joined(each), stream=False) for each in news]
        kind = "chat.completion" if self.question.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage}

    def piece(self, news: News) -> dict[str, Any] | None:
        """The JSON of a piece of a stream. None where nothing can be shown yet."""
        first = not self.begun[news.number]
        choice = self._choice(news, stream=True)
        question = self.question
        seen = choice["delta"].get("content") if question.chat else choice["text"]
        if not (seen or first or news.last or question.logs or question.return_ids):
            return None
        kind = "chat.completion.chunk" if question.chat else "text_completion"
        return {**self._head(kind), "choices": [choice]}

    def last(self) -> dict[str, Any]:
        """The piece with the counts of tokens."""
        kind = "chat.completion.chunk" if self.question.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        prompt = self.question.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": self.drawn, "total_tokens": prompt + self.drawn}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name}

    def _choice(self, news: News, stream: bool) -> dict[str, Any]:
        question, number = self.question, news.number
        first, self.begun[number] = not self.begun[number], True
        text, prompt = self._text(news), question.requests[number].prompt
        self.drawn += len(news.tokens)
        found: dict[str, Any] = {"index": number}
        if question.chat:
            content = {"role": "assistant"} if first or not stream else {}
            found["delta" if stream else "message"] = {**content, "content": text}
            found["logprobs"] = self._chat_logs(news) if question.logs else None
        else:
            found["text"] = self.tokenizer.decode(prompt) + text if question.echo and first else text
            found["logprobs"] = self._logs(news, first) if question.logs else None
        found["finish_reason"] = news.reason
        if question.return_ids:
            found["token_ids"] = news.tokens
            if first:
                found["prompt_token_ids"] = list(prompt)
        return found

    def _text(self, news: News) -> str:
        growing, question = self.texts[news.number], self.question
        shown = news.tokens
        if shown and shown[-1] in question.ends and news.reason == "stop" and not question.keep_stop:
            shown = shown[:-1]
        text = "".join(map(growing.add, shown))
        return text + growing.rest() if news.last else text

    def _logs(self, news: News, first: bool) -> dict[str, Any]:
        """The form of completions."""
        question = self.question
        ids, logs, likeliest = list(news.tokens), [_number(each) for each in news.logs], list(news.likeliest)
        if first and question.echo:
            ids = [*question.requests[news.number].prompt, *ids]
            logs = [None, *map(_number, news.scores), *logs]
            likeliest = [[], *news.score_likeliest, *likeliest]
        names, offsets = [self.tokenizer.token(each) for each in ids], []
        for name in names:
            offsets.append(self.offsets[news.number])
            self.offsets[news.number] += len(name)
        tops = [self._by_name(each) for each in likeliest] if question.requests[0].likeliest else None
        return {"tokens": names, "token_logprobs": logs, "top_logprobs": tops, "text_offset": offsets}

    def _by_name(self, likeliest: Likeliest) -> dict[str, float | None] | None:
        """The likeliest tokens by their texts. Of ids with one text the likelier one counts."""
        found: dict[str, float | None] = {}
        for identity, log in likeliest:
            found.setdefault(self.tokenizer.token(identity), _number(log))
        return found or None

    def _chat_logs(self, news: News) -> dict[str, Any]:
        likeliest = news.likeliest or [[] for _ in news.tokens]
        return {
            "content": [
                {**self._token(identity, log), "top_logprobs": [self._token(*each) for each in others]}
                for identity, log, others in zip(news.tokens, news.logs, likeliest)
            ]
        }

    def _token(self, identity: int, log: float) -> dict[str, Any]:
        name = self.tokenizer.token(identity)
        data = name.encode("utf-8", "replace") if self.bytes is None else self.bytes[identity]
        return {"token": name, "logprob": _number(log), "bytes": list(data)}


def _number(log: float) -> float | None:
    """A log-probability, which may be -inf for a token that is not chosen."""
    return max(log, LEAST)


def _joined(news: list[News]) -> News:
    first = news[0]
    return News(
        first.number,
        [token for each in news for token in each.tokens],
        [log for each in news for log in each.logs],
        [tokens for each in news for tokens in each.likeliest],
        first.scores,
        first.score_likeliest,
        news[-1].reason,
        news[-1].failure,
    )
