"""Requests of clients, checked: bodies of /v1/completions and /v1/chat/completions as requests to the decoder."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron.config.sections.model import ModelSection
from megatron.data.chat.encode import BadConversation, ChatTemplate, control_tokens
from megatron.data.tokenizer import HuggingFaceTokenizer, Tokenizer

from ..growing_text import CONTEXT
from ..sampling import Sampling, ending
from ..schedule import Request, RequestError, Row
from .limits import CHOICES, LIKELIEST, STOP, STOPS, TEXTS, Limits, Refusal

# Options of other servers that this one lacks, with values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
Stop = Annotated[str, Field(min_length=1, max_length=STOP)]
Count = Annotated[int, Field(ge=0, le=1 << 31)]
Item = TypeVar("Item")
T = TypeVar("T", bound=BaseModel)
Many = Annotated[list[Item], Field(fail_fast=True)]  # one error, not one for each item of a body that is full of them
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


# Values of keys that have several forms. An error of one form is misleading.
SEVERAL = {
    "prompt": "a text, a list of ids, or a list of either",
    "stop": f"a text of 1 to {STOP} characters, or a list of up to {STOPS}",
}


class StreamOptions(BaseModel):
    model_config = STRICT
    include_usage: bool = False


class Body(BaseModel):
    """Keys that both forms of request have."""

    model_config = STRICT
    model: str | None = None
    max_tokens: Count | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=1 << 31)
    n: int = Field(1, ge=1, le=CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Stop | Annotated[Many[Stop], Field(max_length=STOPS)] = []
    stop_token_ids: Many[Count] = Field([], max_length=256)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count = 0
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    return_token_ids: bool = False
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """The keys that ask for something."""
        if not isinstance(value, dict):
            return value
        return {key: each for key, each in value.items() if each is not None and each not in NEUTRAL.get(key, ())}


class CompletionBody(Body):
    prompt: str | Many[str] | Many[Count] | Many[Many[Count]]
    logprobs: int | None = Field(None, ge=0, le=LIKELIEST)
    echo: bool = False


class Part(BaseModel):
    model_config = STRICT
    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = STRICT
    role: str
    content: str | Many[Part]
    name: str | None = None


class ChatBody(Body):
    messages: Many[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=LIKELIEST)


@dataclass(frozen=True)
class Question:
    """A client's request."""

    requests: list[Request]  # of its texts: n for each prompt
    chat: bool
    stream: bool
    usage: bool
    echo: bool
    logs: bool  # whether log-probabilities are asked for
    return_ids: bool
    stops: Sequence[str]
    keep_stop: bool
    ends: frozenset[int]  # ids that end a text without being a part of it
    prompt_tokens: int


class Reader:
    """Reads requests for one model.

    Args:
        names: that the model has in requests.
        template: of conversations. None refuses them.
    """

    def __init__(
        self,
        model: ModelSection,
        tokenizer: Tokenizer,
        names: Sequence[str],
        template: ChatTemplate | None,
        limits: Limits,
    ) -> None:
        self.model, self.tokenizer, self.names, self.template, self.limits = model, tokenizer, names, template, limits
        self.control: list[str] = []
        self.turn_stops: list[str] = []
        self.turn_ids: list[int] = []
        if template is None:
            return
        if isinstance(tokenizer, HuggingFaceTokenizer):
            added = tokenizer.backend.get_added_tokens_decoder().values()
            self.control = control_tokens([each.content for each in added], template)
        if end := end_of_turn(template):
            ids = tokenizer.encode(end)
            self.turn_ids, self.turn_stops = (ids, []) if len(ids) == 1 else ([], [end])

    def completion(self, content: bytes) -> Question:
        """Of a body of /v1/completions.

        Raises:
            Refusal: it asks for something that cannot be answered.
        """
        body = _parsed(CompletionBody, content)
        given = body.prompt
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        several: list[Any] = [given] if one else list(given)
        if not several or len(several) * body.n > TEXTS:
            raise Refusal(400, f"a request must have 1 to {TEXTS} texts, which are its prompts times n", "prompt")
        prompts = [tuple(self.tokenizer.encode(each)) if isinstance(each, str) else tuple(each) for each in several]
        scored = body.echo and body.logprobs is not None
        most = 16 if body.max_tokens is None else body.max_tokens
        if most == 0 and not body.echo:
            raise Refusal(400, "max_tokens must be at least 1, or come with echo", "max_tokens")
        likeliest = body.logprobs or 0
        return self._question(
            body, prompts, most, likeliest=likeliest, scored=scored, logs=body.logprobs is not None, echo=body.echo
        )

    def chat(self, content: bytes) -> Question:
        """Of a body of /v1/chat/completions.

        Raises:
            Refusal: it asks for something that cannot be answered.
        """
        if self.template is None:
            rule = "the model must have a chat template: start the endpoint with --template, or use /v1/completions"
            raise Refusal(400, rule, "messages")
        body, messages = _parsed(ChatBody, content), []
        if body.top_logprobs and not body.logprobs:
            raise Refusal(400, "top_logprobs must come with logprobs", "top_logprobs")
        for number, each in enumerate(body.messages, 1):
            text = each.content if isinstance(each.content, str) else "".join(part.text for part in each.content)
            if found := next((token for token in self.control if token in text), None):
                rule = f"message {number} has {found!r}, which the template writes between messages"
                raise Refusal(400, rule, "messages")
            messages.append({"role": each.role, "content": text})
        try:
            prompt = tuple(self.tokenizer.encode(self.template.prompt(messages)))
        except BadConversation as error:
            raise Refusal(400, str(error), "messages") from error
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        most = max(self.limits.longest - len(prompt), 1) if asked is None else asked
        if most == 0:
            raise Refusal(400, "max_tokens must be at least 1", "max_tokens")
        return self._question(
            body, [prompt], most, likeliest=body.top_logprobs, scored=False, logs=body.logprobs, echo=False
        )

    def _question(
        self, body: Body, prompts: list[Row], most: int, *, likeliest: int, scored: bool, logs: bool, echo: bool
    ) -> Question:
        if body.model is not None and body.model not in self.names:
            rule = f"the model must be one of {', '.join(self.names)}, not {body.model[:100]!r}"
            raise Refusal(404, rule, "model", "model_not_found")
        chat = isinstance(body, ChatBody)
        stops = [body.stop] if isinstance(body.stop, str) else list(body.stop)
        ids = {*body.stop_token_ids, *(self.turn_ids if chat else ())}
        stops += self.turn_stops if chat else []
        end = None if body.ignore_eos else self.tokenizer.eod_id
        seed = secrets.randbits(31) if body.seed is None else body.seed
        least = min(body.min_tokens, most)
        first = Request(
            (),
            most,
            0,
            Sampling(body.temperature, max(body.top_k, 0), body.top_p, seed, "serve"),
            None,
            end,
            least,
            likeliest=likeliest,
            further_ends=frozenset(ids),
        )
        if least and first.ends.issuperset(range(self.tokenizer.size)):
            raise Refusal(400, "stop_token_ids must not be all ids where min_tokens is above 0", "stop_token_ids")
        requests = list[Request]()
        for prompt in prompts:
            own = replace(first, prompt=prompt, scored=max(len(prompt) - 1, 0) if scored else 0)
            self._check(own)
            finished = ending(self.tokenizer, stops, least, () if chat else prompt[-CONTEXT:])
            for _ in range(body.n):
                requests.append(replace(own, finished=finished, number=len(requests)))
        return Question(
            requests,
            chat,
            body.stream,
            not body.stream or body.stream_options.include_usage,
            echo,
            logs,
            body.return_token_ids,
            stops,
            body.include_stop_str_in_output,
            first.ends,
            sum(map(len, prompts)),
        )

    def _check(self, request: Request) -> None:
        whole = len(request.prompt) + request.tokens
        if whole > self.limits.longest:
            rule = f"prompt and continuation have {whole} tokens, and must have at most {self.limits.longest}"
            raise Refusal(400, rule, "max_tokens", "context_length_exceeded")
        size = min(self.model.vocab_size, self.tokenizer.size)
        if (largest := max(request.prompt, default=0)) >= size:
            raise Refusal(400, f"ids of a prompt must be below {size}, not {largest}", "prompt")
        try:
            request.check(self.model, self.tokenizer.size)
        except RequestError as error:
            raise Refusal(400, str(error), "prompt") from error


def end_of_turn(template: ChatTemplate) -> str | None:
    """The text with which a template ends the assistant's turn."""
    answer = "0x5eed"
    try:
        text, spans = template.assistant_spans([
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": answer},
        ])
    except BadConversation:
        return None
    begin, end = spans[-1] if spans else (0, 0)
    return text[begin:end].partition(answer)[2].strip() or None


def _parsed(form: type[T], content: bytes) -> T:
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = [str(each) for each in first["loc"] if not (isinstance(each, str) and "[" in each)]
        key = place[0][:100] if place else None
        if first["type"] == "extra_forbidden":
            rule = f"{key}: this endpoint does not have it. Omit it, or give the value that changes nothing"
        elif key in SEVERAL and first["type"] != "missing":
            rule = f"{key}: it must be {SEVERAL[key]}"
        else:
            rule = f"{'.'.join(place)[:200] or 'the body'}: {first['msg'][:300]}"
        raise Refusal(400, rule, key) from error
